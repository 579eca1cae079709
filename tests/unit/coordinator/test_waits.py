"""What an operator is told to wait for: a learner that hangs is named, though its stream stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

from echo2.base.ids import PeerId, Step, Version
from echo2.coordinator.planning.telemetry import LearnerHello, LearnerReport
from tests.unit.coordinator.test_daemon import RUN
from tests.unit.coordinator.test_provisioner import Cloud, Scene


def test_a_learner_whose_stream_stands_and_who_says_nothing_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Scene(tmp_path, Cloud())
        hello = LearnerHello(1, RUN, "a:1", "m", b"{}", "d", 4, 64, 8, Step(0), Version(0))
        run.hub.board.on_hello(PeerId("learner"), hello, "", run.clock.now())
        beat_s = run.options.config.coordinator.heartbeat_interval

        def told() -> list[float]:
            return [wait.since_unix_s for wait in run.commands.waits() if "nothing is heard" in wait.what]

        heard_at = run.clock.now()
        run.clock.time += 2.9 * beat_s
        assert told() == []
        run.clock.time += 0.2 * beat_s
        assert told() == [heard_at]
        run.hub.board.on_report(LearnerReport(step=Step(1)), run.clock.now())
        assert told() == []

    asyncio.run(asyncio.wait_for(scene(), 30))
