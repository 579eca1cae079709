"""How fast a worker generates: rates over a sliding window of busy time, and a measurement before the first lease.

Guarantees: rates are per second in which the engine had something to decode, so a worker without leases does not look slow; the
window and the sample of durations are bounded. The probe takes about `PROBE_S_MAX` from the first token on, and `FIRST_TOKEN_S_MAX`
at most before it (vLLM warms up on its first requests); its tokens are dropped; requests that the engine refuses are not measured.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.errors import EngineError, LimitExceeded
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.outside import monotonic
from echo2.worker.engines.engine import Engine, GenerateRequest, TokenChunk

WINDOW_S = 20.0  # evens out single steps; a change of load is seen whole after as long
BUCKET_S = 0.5  # 40 buckets a window
DURATIONS_MAX = 256  # 12 of them lie above the 95th percentile
BUSY_S_MIN = 0.05  # one or two steps of a large model; a rate over less is noise


@dataclass(slots=True)
class _Bucket:
    begin: float
    tokens: int = 0
    rollouts: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per busy second of the window. `rollout_s_*`: seconds from a rollout's start on this worker to its last token, over
    recent rollouts."""

    tokens_per_s: float
    rollouts_per_s: float
    rollout_s_mean: float
    rollout_s_p95: float


@dataclass(slots=True)
class RateWindow:
    """Counts tokens and finished rollouts as they come. The caller reports through `busy` when the engine has work."""

    window_s: float = WINDOW_S
    sampled_tokens: int = 0
    finished_rollouts: int = 0
    _buckets: deque[_Bucket] = field(default_factory=deque)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))
    _busy_since: float | None = None
    _last: Rates = Rates(0.0, 0.0, 0.0, 0.0)

    def sampled(self, tokens: int, now: float) -> None:
        self.sampled_tokens += tokens
        self._bucket(now).tokens += tokens

    def finished(self, duration_s: float, now: float) -> None:
        self.finished_rollouts += 1
        self._bucket(now).rollouts += 1
        self._durations.append(duration_s)

    def declare(self, tokens_per_s: float) -> None:
        """Sets the rate measured before the first lease; it holds until leases give measured rates."""
        self._last = Rates(tokens_per_s, 0.0, 0.0, 0.0)

    def busy(self, is_busy: bool, now: float) -> None:
        """Records whether the engine has sequences from `now` on."""
        self._account(now)
        self._busy_since = now if is_busy else None

    def rates(self, now: float) -> Rates:
        """Rates over the window; the last known ones while the window holds less than `BUSY_S_MIN` of busy time."""
        self._account(now)
        self._forget(now)
        busy_s = sum(bucket.busy_s for bucket in self._buckets)
        if busy_s >= BUSY_S_MIN:
            durations = sorted(self._durations)
            self._last = Rates(
                tokens_per_s=sum(bucket.tokens for bucket in self._buckets) / busy_s,
                rollouts_per_s=sum(bucket.rollouts for bucket in self._buckets) / busy_s,
                rollout_s_mean=sum(durations) / len(durations) if durations else 0.0,
                rollout_s_p95=durations[min(len(durations) - 1, int(0.95 * len(durations)))] if durations else 0.0,
            )
        return self._last

    def _account(self, now: float) -> None:
        # All time since the last call goes to the current bucket. Coarse, but calls come at least every heartbeat.
        if self._busy_since is not None:
            self._bucket(now).busy_s += max(0.0, now - self._busy_since)
            self._busy_since = now

    def _bucket(self, now: float) -> _Bucket:
        if not self._buckets or now >= self._buckets[-1].begin + BUCKET_S:
            self._forget(now)
            self._buckets.append(_Bucket(now))
        return self._buckets[-1]

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0].begin < now - self.window_s:
            self._buckets.popleft()


PROBE_S_MAX = 1.0  # what a join may cost beside the first token
FIRST_TOKEN_S_MAX = 20.0  # vLLM warms up on its first requests
LOOK_S = 0.02  # 1/50 of the probe
PROMPT_TOKENS = 8  # prefill is not what is measured
TOKENS_EACH = 12  # an engine with steps below 83 ms is done before PROBE_S_MAX
_LEASE = "rate probe"


class RateProbe:
    """One measurement with all slots busy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[str] = set()

    async def run(self) -> float:
        """Tokens per second, without the wait for the first ones; 0 if nothing could be measured."""
        engine = self._engine
        began, before = monotonic(), engine.stats().sampled_tokens
        try:
            for index in range(engine.slot_count):
                self._submit(f"{_LEASE}/{index}", index)
        except (EngineError, LimitExceeded):
            pass  # context or vocabulary too small for the probe: measure the requests that were accepted
        wanted = before + TOKENS_EACH * len(self._open)
        first_at, first = began, before  # when the first tokens were seen, and how many tokens there were then
        while self._open and (tokens := engine.stats().sampled_tokens) < wanted:
            if first == before and tokens > before:
                first_at, first = monotonic(), tokens
            until = began + FIRST_TOKEN_S_MAX if first == before else first_at + PROBE_S_MAX
            if monotonic() >= until:
                break
            await asyncio.sleep(LOOK_S)
        now, tokens = monotonic(), engine.stats().sampled_tokens
        for request_id in list(self._open):
            await engine.abort(request_id)
        if first > before and tokens > first:
            return (tokens - first) / (now - first_at)
        return (tokens - before) / max(now - began, 1e-9)  # all came at once

    def without_probe(self, chunks: Sequence[TokenChunk]) -> Sequence[TokenChunk]:
        """The chunks without the probe's."""
        if not self._open:
            return chunks
        others = []
        for chunk in chunks:
            if chunk.request_id not in self._open:
                others.append(chunk)
            elif chunk.finish_reason is not FinishReason.UNFINISHED:
                self._open.discard(chunk.request_id)
        return others

    def _submit(self, request_id: str, seed: int) -> None:
        sampling = SamplingParams(max_new_tokens=TOKENS_EACH, seed=seed)
        self._engine.submit(GenerateRequest(request_id, (0,) * PROMPT_TOKENS, (), sampling, _LEASE))
        self._open.add(request_id)
