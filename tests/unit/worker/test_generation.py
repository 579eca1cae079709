"""What stands between leases and engine: the rate before the first lease, and weights that turn out to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason, FinishReason
from echo2.outside import SteadyClock
from echo2.sim.virtual_loop import VirtualLoop
from echo2.worker import generation
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest, TokenChunk
from echo2.worker.generation import FIRST_TOKEN_S_MAX, PROBE_S_MAX, TOKENS_EACH, Generation
from echo2.worker.options import WorkerLimits
from tests.unit.worker.test_leases import Surroundings, group


@dataclass
class Fake:
    """Samples `tokens_per_s` from `starts_after_s` on, in all slots together; never more than was asked for."""

    loop: VirtualLoop
    tokens_per_s: float
    starts_after_s: float
    slot_count: int = 4
    open: set[str] = field(default_factory=set)
    began: float = 0.0

    def submit(self, request: GenerateRequest) -> None:
        self.began = self.began or self.loop.time()
        self.open.add(request.request_id)

    def stats(self) -> EngineStats:
        worked_s = max(0.0, self.loop.time() - self.began - self.starts_after_s) if self.open else 0.0
        tokens = min(self.slot_count * TOKENS_EACH, int(worked_s * self.tokens_per_s))
        return EngineStats(0, 0, 1_000 + tokens, 0.0, 0.0, 0.0, 0)

    async def abort(self, request_id: str) -> None:
        self.open.discard(request_id)


@pytest.mark.parametrize(
    ("tokens_per_s", "starts_after_s", "expected", "within_s"),
    [
        (60.0, 0.0, 60.0, PROBE_S_MAX),
        (60.0, 15.0, 60.0, 15.0 + PROBE_S_MAX),  # a first step may take long: it is not part of the rate
        (10.0, 0.0, 10.0, PROBE_S_MAX + 0.2),
        (0.0, 0.0, 0.0, FIRST_TOKEN_S_MAX),
        (1e9, 0.0, 2e3, 0.1),  # done at the first look
    ],
)
def test_the_rate_is_measured_without_the_wait_for_the_first_token_in_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, starts_after_s: float, expected: float, within_s: float
) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr(generation, "monotonic", loop.time)
    engine, ports = Fake(loop, tokens_per_s, starts_after_s), Surroundings()
    began = loop.time()
    made = Generation(WorkerLimits(), SteadyClock(), ports, ports)
    rate = loop.run_until_complete(made.measure_rate(cast(Engine, engine)))
    assert rate == pytest.approx(expected, rel=0.25) and not engine.open
    assert loop.time() - began <= within_s + 0.05
    loop.close()


async def test_what_is_open_in_an_engine_of_wrong_weights_is_thrown_away_and_nothing_begins_before_they_are_replaced() -> (
    None
):
    """Also a token of the right version's number that comes only after the proof of the second swap."""
    loop = VirtualLoop()
    engine, ports = Fake(loop, 0.0, 0.0), Surroundings()
    made = Generation(WorkerLimits(), SteadyClock(), ports, ports)
    made.engine = cast(Engine, engine)
    made.leases.on_coordinator(1.0)
    made.leases.on_learner()
    made.leases.on_version_live(Version(5), 8)

    def granted(name: str) -> bool:
        made.leases.grant(LeaseId(name), group(name, 1), 1e6, is_continuation=False)
        return f"{name}/0" in engine.open

    assert granted("a")
    made.gate.hold(Version(5))
    made.gate.discard()
    assert not granted("b") and ports.ended[LeaseId("b")][0] is EndReason.REFUSED
    made.gate.hold(Version(5))
    made.gate.release()
    assert granted("c")
    made.gate.take([TokenChunk("a/0", (7,), (-1.0,), (-1.0,), Version(5), FinishReason.UNFINISHED)])
    made.gate.take([TokenChunk("a/0", (), (), (), Version(5), FinishReason.ABORTED)])
    assert ports.ended[LeaseId("a")][0] is EndReason.HANDED_BACK and not ports.reports
    made.close()
    loop.close()
