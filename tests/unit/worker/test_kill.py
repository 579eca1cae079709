"""A worker killed without warning costs at most the tokens of one report interval; another one goes on from there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

from tests.unit.worker.peers import SmallRun
from tests.unit.worker.test_daemon import group, judged, prepared, working

REPORT_INTERVAL_S = 0.5
SLACK_S = 2.0
"""For a report's and a heartbeat's way, on a busy machine."""

SLOWDOWN = 100
"""Times slower than the machine can: even a fast one would need some 20 s, so the kill after 4 s is in the middle."""

REPORTS = 8
"""Reports before the kill: 4 s, more than `SLACK_S` and one interval after the first tokens."""


async def watched_tokens(run: SmallRun, seen: list[tuple[float, int]]) -> None:
    """Notes when each heartbeat came and how many tokens it counts."""
    noted = 0
    while True:
        await run.coordinator.until(lambda it, noted=noted: len(it.heartbeats) > noted, within_s=60.0)
        for beat in run.coordinator.heartbeats[noted:]:
            seen.append((time.monotonic(), beat.sampled_tokens))
            noted += 1


def test_a_killed_worker_costs_at_most_one_report_interval_of_tokens(tmp_path: Path) -> None:
    async def scene() -> None:
        async with SmallRun(tmp_path / "run") as run:
            models = await prepared(run)
            run.coordinator.report_interval_s = REPORT_INTERVAL_S
            run.coordinator.groups = [group("g1", 8, 230)]
            arguments = ["-m", "tests.unit.worker.worker_process", run.link(), str(tmp_path / "w1"), str(SLOWDOWN), "8"]
            doomed = await asyncio.create_subprocess_exec(sys.executable, *arguments, env={**os.environ})
            seen: list[tuple[float, int]] = []
            watching = asyncio.create_task(watched_tokens(run, seen))
            try:
                await run.learner.until(lambda it: len(it.reports) >= REPORTS, within_s=60.0)
                killed_at = time.monotonic()
            finally:
                doomed.kill()
                await doomed.wait()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            held = {key: run.learner.rollout_of(key).token_ids for key in run.learner.held}
            reported = sum(map(len, held.values()))
            before = [tokens for at, tokens in seen if at <= killed_at - REPORT_INTERVAL_S - SLACK_S]
            assert reported >= max(before) > 0
            assert 0 < reported < 8 * 230, "it was killed in the middle"
            run.coordinator.groups = [group("g1", 8, 230)]
            run.coordinator.continues = {"g1"}
            async with working(run, tmp_path / "w2") as second:
                await run.learner.until(lambda it: len(it.finished) == 8, within_s=60.0)
            assert second.shift.desk.rates.sampled_tokens == 8 * 230 - reported
            for key, rollout in run.learner.finished.items():
                with contextlib.suppress(KeyError):
                    assert rollout.token_ids[: len(held[key])] == held[key]
                assert judged(models, (5, 6, 7), rollout) < 1e-4

    asyncio.run(scene())
