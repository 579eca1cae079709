"""The rate that a worker measures before its first lease."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from echo2.outside import SteadyClock
from echo2.sim.virtual_loop import VirtualLoop
from echo2.worker import generation
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest
from echo2.worker.generation import FIRST_TOKEN_S_MAX, PROBE_S_MAX, TOKENS_EACH, Generation
from echo2.worker.options import WorkerLimits
from tests.unit.worker.test_leases import Surroundings


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
