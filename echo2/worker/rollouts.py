"""The rollouts of a lease as they grow, and the gate at which tokens of unproven weights wait.

Guarantees: tokens are kept in the order sampled, each with the version that sampled it, until the learner holds them; a report
contains what the learner does not hold yet, in bounded segments; a rollout is settled only by the learner's verdict. Tokens of an
unproven version pass the gate after its proof or never; once a sequence has lost tokens, only its end passes, as an abort, and its
lease is handed back. Storage is compact: 20 bytes a token, with log-probabilities as float32, as on the wire.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from echo2.base.errors import EngineError
from echo2.base.ids import GroupId, LeaseId, Version
from echo2.base.rollout import (
    NO_ROUTING,
    PROMPT_ROUTING_BYTES_MAX,
    ROLLOUT_ROUTING_BYTES_MAX,
    STOP_STRING_BYTES_MAX,
    FinishReason,
    GroupSpec,
    Rollout,
    Routing,
    SamplingParams,
    SegmentVerdict,
    Verdict,
    spans_of,
)  # fmt: skip
from echo2.worker.engines.engine import TokenChunk

SIBLING_WEIGHT = 4.0  # lengths of one prompt are like each other


def expected_remaining(length: int, limit: int, siblings: Sequence[int], others: Iterable[int]) -> int:
    """Estimated remaining tokens, from 1 to limit - length, of an unfinished rollout with `length` of at most `limit` tokens.

    A rollout that has reached `length` resembles only those that got at least that far, so the estimate is the mean of (t -
    length) over finished lengths t > length. Siblings answer the same prompt and weigh more. If no finished rollout got that
    far, the rollout is taken to be half way (as likely as not for a heavy tail), within its limit.

    `siblings`, `others`: lengths of finished rollouts of its group and of recent rollouts of this worker."""
    room = max(limit - length, 1)
    weight = 0.0
    total = 0.0
    for longer, each in ((siblings, SIBLING_WEIGHT), (others, 1.0)):
        for finished in longer:
            if finished > length:
                weight += each
                total += each * (finished - length)
    guess = total / weight if weight else max(length, 1)
    return max(1, min(room, round(guess)))


SEGMENT_TOKENS_MAX = 1 << 14  # most tokens in one segment; the wire allows four times as many

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)
_SETTLING = (Verdict.ADMITTED, Verdict.DUPLICATE, Verdict.STALE, Verdict.REFUSED, Verdict.CLOSED)


@dataclass(slots=True)
class PartialRollout:
    """One rollout as it grows. The learner holds its first `held` tokens."""

    group_id: GroupId
    index: int
    started_at: float
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    raw_logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("Q"))
    prompt_rows: bytes = b""
    rows: bytearray = field(default_factory=bytearray)
    row_bytes: int = 0  # routing bytes per token; 0: not known for every token, so none is reported
    finish_reason: FinishReason = FinishReason.UNFINISHED
    held: int = 0
    is_settled: bool = False
    is_stopped: bool = False  # the engine no longer works on it

    @property
    def is_ended(self) -> bool:
        return self.finish_reason in _ENDED

    @property
    def is_over(self) -> bool:
        """Whether the engine neither has it nor will get it."""
        return self.is_stopped or self.is_settled

    @property
    def has_news(self) -> bool:
        """Whether the learner still lacks tokens or the end of it."""
        return not self.is_settled and (self.is_ended or self.held < len(self.token_ids))

    def resume(self, partial: Rollout, sampling: SamplingParams) -> None:
        """Takes over the tokens that the learner holds; ends the rollout if they are complete and only the end was lost."""
        assert not self.token_ids, f"rollout {self.index} of group {self.group_id} has tokens already"
        self.token_ids.extend(partial.token_ids)
        self.logprobs.extend(partial.logprobs)
        self.raw_logprobs.extend(partial.raw_logprobs)
        self.versions.extend(partial.versions)
        self._keep_routing(0, len(partial.token_ids), partial.routing)
        self.held = len(self.token_ids)
        if partial.is_finished:
            self.finish_reason = partial.finish_reason
            self.is_settled = self.is_stopped = True
            return
        last = len(self.token_ids) - 1
        if self.token_ids and (
            self.token_ids[-1] in sampling.stop_token_ids or sampling.string_stop(self.token_ids, last) == last
        ):
            self.finish_reason, self.is_stopped = FinishReason.STOP, True
        elif len(self.token_ids) >= sampling.max_new_tokens:
            self.finish_reason, self.is_stopped = FinishReason.LENGTH, True

    def up_to_stop(self, chunk: TokenChunk, sampling: SamplingParams) -> TokenChunk:
        """The chunk cut after the token that completes a stop string, with finish reason STOP; unchanged if none does."""
        if not sampling.stop_strings or not chunk.token_ids:
            return chunk
        begin = len(self.token_ids)
        known = [*self.token_ids[max(0, begin - STOP_STRING_BYTES_MAX) :], *chunk.token_ids]
        place = sampling.string_stop(known, len(known) - len(chunk.token_ids))
        if place is None:
            return chunk
        count = place - (len(known) - len(chunk.token_ids)) + 1
        return replace(
            chunk,
            token_ids=chunk.token_ids[:count],
            logprobs=chunk.logprobs[:count],
            raw_logprobs=chunk.raw_logprobs[:count],
            finish_reason=FinishReason.STOP,
            routing=chunk.routing.up_to(count, len(chunk.token_ids)),
        )

    def append(self, chunk: TokenChunk) -> None:
        """Adds the tokens of a chunk. A finish reason ABORTED stops the rollout but leaves it unfinished. Raises EngineError if
        the numbers of tokens and log-probabilities differ."""
        count = len(chunk.token_ids)
        if len(chunk.logprobs) != count or len(chunk.raw_logprobs) != count:
            raise EngineError(
                f"chunk of {chunk.request_id}: expected {count} log-probabilities of each kind, got "
                f"{len(chunk.logprobs)} sampled and {len(chunk.raw_logprobs)} raw"
            )
        assert not self.is_stopped or not count, f"{chunk.request_id}: tokens after its end"
        self._keep_routing(len(self.token_ids), count, chunk.routing)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.raw_logprobs.extend(chunk.raw_logprobs)
        self.versions.extend([chunk.version] * count)
        if chunk.finish_reason is not FinishReason.UNFINISHED:
            self.is_stopped = True
        if chunk.finish_reason in _ENDED:
            self.finish_reason = chunk.finish_reason

    def _keep_routing(self, before: int, count: int, routing: Routing) -> None:
        """Keeps the routing of `count` new tokens after the first `before`. Routing is useful only if complete: if some tokens
        lack it or it grows too large, drops all of it."""
        if count == 0:
            return
        row_bytes = len(routing.tokens) // count
        if before == 0:
            self.row_bytes = row_bytes
            if self.index == 0:  # siblings share the prompt, so only the first reports its routing
                self.prompt_rows = routing.prompt
        if row_bytes != self.row_bytes or (before + count) * row_bytes > ROLLOUT_ROUTING_BYTES_MAX:
            self.row_bytes, self.prompt_rows = 0, b""
            self.rows.clear()
        elif row_bytes:
            self.rows += routing.tokens

    def news(self, tokens_max: int, expected_remaining: int) -> Rollout:
        """The next segment that the learner lacks, at most `tokens_max` tokens; the finish reason goes with the last token."""
        begin = self.held
        end = min(len(self.token_ids), begin + min(tokens_max, SEGMENT_TOKENS_MAX))
        rows = bytes(self.rows[begin * self.row_bytes : end * self.row_bytes])
        prompt_rows = self.prompt_rows if begin == 0 and len(self.prompt_rows) <= PROMPT_ROUTING_BYTES_MAX else b""
        is_whole = end == len(self.token_ids)
        return Rollout(
            group_id=self.group_id,
            index=self.index,
            offset=begin,
            token_ids=tuple(self.token_ids[begin:end]),
            logprobs=tuple(self.logprobs[begin:end]),
            raw_logprobs=tuple(self.raw_logprobs[begin:end]),
            version_spans=spans_of(cast(Sequence[Version], self.versions[begin:end])),
            finish_reason=self.finish_reason if is_whole else FinishReason.UNFINISHED,
            expected_remaining_tokens=0 if self.is_ended else expected_remaining,
            routing=Routing(prompt_rows, rows) if rows else NO_ROUTING,
        )

    def judge(self, verdict: SegmentVerdict) -> None:
        """Applies the learner's verdict on the last segment. `held_tokens` is capped at the tokens that this worker has."""
        self.held = min(verdict.held_tokens, len(self.token_ids))
        if verdict.verdict in _SETTLING:
            self.is_settled = True


class LeasePhase(enum.Enum):
    FETCHING = "waits for the partial rollouts"
    RUNNING = "generates"
    HANDING_BACK = "hands back"


@dataclass(slots=True)
class LeaseWork:
    lease_id: LeaseId
    group: GroupSpec
    deadline: float
    margin_s: float
    phase: LeasePhase
    rollouts: dict[int, PartialRollout]
    report_due: float
    is_reporting: bool = False
    end_message: str = ""

    @property
    def is_settled(self) -> bool:
        return self.phase is not LeasePhase.FETCHING and all(rollout.is_settled for rollout in self.rollouts.values())

    @property
    def unheld_tokens(self) -> int:
        """Number of tokens that the learner does not hold yet."""
        return sum(len(r.token_ids) - r.held for r in self.rollouts.values() if not r.is_settled)

    @property
    def is_handed_back(self) -> bool:
        return all(r.is_settled or (r.is_stopped and not r.has_news) for r in self.rollouts.values())

    @property
    def has_finished_news(self) -> bool:
        return any(rollout.has_news and rollout.is_ended for rollout in self.rollouts.values())


@dataclass(slots=True)
class TokenGate:
    """`passed` receives chunks in order; `spoiled` receives the leases whose tokens were discarded. `open_requests`: those that the
    engine may still sample for. `is_broken`: the engine's weights are of no version, until a swap is proven."""

    passed: Callable[[tuple[TokenChunk, ...]], None]
    spoiled: Callable[[LeaseId], None]
    open_requests: Callable[[], Iterable[str]] = tuple
    is_broken: bool = False
    _unproven: Version | None = None
    _held: list[TokenChunk] = field(default_factory=list)
    _held_requests: set[str] = field(default_factory=set)
    _spoiled_requests: set[str] = field(default_factory=set)

    @property
    def is_holding(self) -> bool:
        """Whether the live weights are not proven yet."""
        return self._unproven is not None

    def hold(self, version: Version) -> None:
        self._unproven = version

    def release(self) -> None:
        self.is_broken = False
        if held := self._no_longer_held():
            self.passed(tuple(held))

    def _no_longer_held(self) -> list[TokenChunk]:
        held, self._held = self._held, []
        self._held_requests.clear()
        self._unproven = None
        return held

    def discard(self) -> None:
        """Discards the held tokens, which were sampled by weights of no version, and all that comes of the open requests: until the
        next swap these sample by them too. Reports their leases as spoiled."""
        self.is_broken = True
        held = self._no_longer_held()
        lost = {chunk.request_id for chunk in held}.union(self.open_requests())
        self._spoiled_requests |= lost
        ends = self._without_spoiled(held)
        for lease_id in sorted({request_id.rpartition("/")[0] for request_id in lost}):
            self.spoiled(LeaseId(lease_id))
        if ends:
            self.passed(tuple(ends))

    def take(self, chunks: Sequence[TokenChunk]) -> None:
        """Takes chunks from the engine; holds those of the unproven version and all later ones of the same sequences."""
        passing = []
        for chunk in self._without_spoiled(chunks) if self._spoiled_requests else chunks:
            if self._unproven is not None and (
                chunk.version == self._unproven or chunk.request_id in self._held_requests
            ):
                self._held.append(chunk)
                self._held_requests.add(chunk.request_id)
            else:
                passing.append(chunk)
        if passing:
            self.passed(tuple(passing))

    def _without_spoiled(self, chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
        passing = []
        for chunk in chunks:
            if chunk.request_id not in self._spoiled_requests:
                passing.append(chunk)
            elif chunk.finish_reason is not FinishReason.UNFINISHED:
                self._spoiled_requests.discard(chunk.request_id)
                passing.append(TokenChunk(chunk.request_id, (), (), (), chunk.version, FinishReason.ABORTED))
        return passing
