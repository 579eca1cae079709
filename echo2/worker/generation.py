"""Between the leases and the engine: requests go down, tokens come up through the gate; the rate is measured before work begins.

Guarantees: tokens reach the leases in order, on the loop's thread; a request that the engine refuses costs its lease. The
measurement takes about `PROBE_S_MAX` from the first token on, and `FIRST_TOKEN_S_MAX` at most before it; its tokens are dropped,
and requests that the engine refuses are not measured. Waits for the engine's tokens; the leases set the timer that wakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo2.base.clock import Clock
from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.outside import monotonic
from echo2.worker.engines.engine import Engine, GenerateRequest, TokenChunk
from echo2.worker.leases import CoordinatorPort, LearnerPort, Leases
from echo2.worker.rollouts import TokenGate

PUMP_PAUSE_S = 0.02
"""Pause between two reads of the engine's tokens, so that tokens of several steps pass through the leases together."""
PROBE_S_MAX = 1.0  # what a join may cost beside the first token
FIRST_TOKEN_S_MAX = 20.0  # vLLM warms up on its first requests
LOOK_S = 0.02  # 1/50 of the probe
PROMPT_TOKENS = 8  # prefill is not what is measured
TOKENS_EACH = 12  # an engine with steps below 83 ms is done before PROBE_S_MAX
_PROBE = "rate probe"


class Generation:
    """One per worker. Until `engine` is set, requests are refused. `unheld_tokens`: lost by the drain."""

    def __init__(self, clock: Clock, learner: LearnerPort, coordinator: CoordinatorPort) -> None:
        self.leases = Leases(clock, learner, coordinator, self)
        why = "its tokens were sampled by weights of no version"
        self.gate = TokenGate(
            self.leases.on_tokens, lambda lease_id: self.leases.revoke(lease_id, why), lambda: self.leases.open_requests
        )
        self.engine: Engine | None = None
        self.drained = asyncio.Event()
        self.unheld_tokens = 0
        self._clock = clock
        self._version_admitted = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._probes: set[str] = set()  # requests of the measurement whose last chunk has not come

    async def run(self, engine: Engine) -> None:
        self.engine = engine
        while chunks := await engine.next_chunks():
            self.gate.take(self._without_probes(chunks))
            await asyncio.sleep(PUMP_PAUSE_S)

    async def version_may_go_live(self) -> None:
        """Returns once no lease needs the live version any more, so that the one that has arrived may replace it."""
        self._version_admitted.clear()
        self.leases.on_version_arrived()
        await self._version_admitted.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._aborts:
            task.cancel()

    # -- called by the leases

    def submit(self, request: GenerateRequest) -> str:
        if self.engine is None:
            return f"request {request.request_id}: the engine has not started"
        if self.gate.is_broken:
            return f"request {request.request_id}: the engine's weights are of no version, until they are replaced"
        try:
            self.engine.submit(request)
        except (EngineError, LimitExceeded) as error:
            return str(error)
        return ""

    def abort(self, request_id: str) -> None:
        if self.engine is not None:
            task = asyncio.get_running_loop().create_task(self.engine.abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def admit_version(self) -> None:
        self._version_admitted.set()

    def on_drained(self, unheld_tokens: int) -> None:
        self.unheld_tokens = unheld_tokens
        self.drained.set()

    def wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(at - self._clock.now(), self.leases.wake)

    # -- the rate

    async def measure_rate(self, engine: Engine) -> float:
        """Tokens per second with all slots busy, without the wait for the first ones; 0 if nothing could be measured."""
        began, before = monotonic(), engine.stats().sampled_tokens
        try:
            for index in range(engine.slot_count):
                request_id = f"{_PROBE}/{index}"
                sampling = SamplingParams(max_new_tokens=TOKENS_EACH, seed=index)
                # Each a group of its own: several engines keep a group on one of them.
                engine.submit(GenerateRequest(request_id, (0,) * PROMPT_TOKENS, (), sampling, request_id))
                self._probes.add(request_id)
        except (EngineError, LimitExceeded):
            pass  # context or vocabulary too small for the probe: measure the requests that were accepted
        wanted = before + TOKENS_EACH * len(self._probes)
        first_at, first = began, before  # when the first tokens were seen, and how many tokens there were then
        while self._probes and (tokens := engine.stats().sampled_tokens) < wanted:
            if first == before and tokens > before:
                first_at, first = monotonic(), tokens
            until = began + FIRST_TOKEN_S_MAX if first == before else first_at + PROBE_S_MAX
            if monotonic() >= until:
                break
            await asyncio.sleep(LOOK_S)
        now, tokens = monotonic(), engine.stats().sampled_tokens
        for request_id in list(self._probes):
            await engine.abort(request_id)
        if first > before and tokens > first:
            return (tokens - first) / (now - first_at)
        return (tokens - before) / max(now - began, 1e-9)  # all came at once

    def _without_probes(self, chunks: Sequence[TokenChunk]) -> Sequence[TokenChunk]:
        if not self._probes:
            return chunks
        others = [chunk for chunk in chunks if chunk.request_id not in self._probes]
        if len(others) < len(chunks):
            self._probes -= {c.request_id for c in chunks if c.finish_reason is not FinishReason.UNFINISHED}
        return others
