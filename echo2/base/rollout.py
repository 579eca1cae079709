"""The types of rollouts, shared by all planes: sampling parameters, tokens with log-probabilities and versions, finish reasons.

Guarantees: a `Rollout` is self-consistent (lengths agree, spans cover the tokens). Leaves to others: whether
it may be trained on (staleness/), whether its sender may be believed (learner/).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, Version
from echo2.base.routing import NO_ROUTING, Routing


class FinishReason(enum.Enum):
    """Why a sequence stopped. UNFINISHED marks a partial rollout."""

    UNFINISHED = "unfinished"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class EndReason(enum.Enum):
    """Why a worker ended a lease."""

    FINISHED = "finished"
    HANDED_BACK = "handed back"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1.0 and `top_k` 0 switch the filters off.

    A completion ends with the token that completes one of `stop_strings` (UTF-8); `stop_pieces` are the texts of the tokens
    `stop_piece_ids`, the only tokens that can be part of one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_strings: tuple[bytes, ...] = ()
    stop_piece_ids: tuple[int, ...] = ()
    stop_pieces: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.stop_strings or self.stop_pieces:
            check_stops(self.stop_strings, self.stop_piece_ids, self.stop_pieces)
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise MalformedMessage(f"temperature: expected 0 to 100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise MalformedMessage(f"top_p: expected above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 1 << 32:
            raise MalformedMessage(f"top_k: expected 0 (off) to {(1 << 32) - 1}, got {self.top_k}")
        if not 0 <= self.seed < 1 << 64:
            raise MalformedMessage(f"seed: expected 0 to {(1 << 64) - 1}, got {self.seed}")
        if not 1 <= self.max_new_tokens <= 1 << 20:
            raise MalformedMessage(f"max_new_tokens: expected 1 to {1 << 20}, got {self.max_new_tokens}")

    def without_seed(self) -> SamplingParams:
        """The same distribution, without the seed and the stop strings."""
        return replace(self, seed=0, stop_strings=(), stop_piece_ids=(), stop_pieces=())

    def string_stop(self, token_ids: Sequence[int], begin: int = 0) -> int | None:
        """Index of the first token, from `begin` on, that completes a stop string; None if none does."""
        return stop_place(self.stop_strings, self.stop_piece_ids, self.stop_pieces, token_ids, begin)

    @property
    def is_filtered(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0

    def trained_logprobs(self, logprobs: tuple[float, ...], raw_logprobs: tuple[float, ...]) -> tuple[float, ...]:
        """Chooses which of the two log-probabilities per token counts in training and audits.

        At temperature 1 the learner computes the raw model's, so the raw ones count, whatever filter was on; at other
        temperatures the sampling distribution's count, in which a filter's renormalisation remains as a mismatch that the
        correction sees. For greedy completions, which are audited but never trained on, the raw ones count: log-probabilities
        of a draw mean nothing there.
        """
        return raw_logprobs if self.temperature in (0.0, 1.0) else logprobs


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`count` consecutive tokens sampled by `version`."""

    version: Version
    count: int


def spans_of(versions: Iterable[Version]) -> tuple[VersionSpan, ...]:
    """Run-length encoding of one version per token."""
    return tuple(VersionSpan(version, len(list(run))) for version, run in itertools.groupby(versions))


def joined_spans(first: Sequence[VersionSpan], second: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Spans of `first`'s tokens followed by `second`'s; equal neighbours are merged."""
    if first and second and first[-1].version == second[0].version:
        seam = VersionSpan(first[-1].version, first[-1].count + second[0].count)
        return (*first[:-1], seam, *second[1:])
    return (*first, *second)


def _check_tokens(
    whose: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    raw_logprobs: Sequence[float],
    version_spans: Sequence[VersionSpan],
    routing: Routing,
) -> None:
    count = len(token_ids)
    if len(logprobs) != count or len(raw_logprobs) != count:
        raise MalformedMessage(
            f"{whose}: expected {count} log-probabilities, one a token, got {len(logprobs)} sampled and "
            f"{len(raw_logprobs)} raw"
        )
    covered = sum(span.count for span in version_spans)
    if covered != count or any(span.count < 1 for span in version_spans):
        raise MalformedMessage(f"{whose}: expected version spans that cover {count} tokens, got {covered}")
    routing.check(count, whose)
    for values in (logprobs, raw_logprobs):
        if values and (not all(map(math.isfinite, values)) or max(values) > 1e-3):
            raise MalformedMessage(f"{whose}: expected finite log-probabilities <= 0")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion, whole or partial.

    `logprobs[i]` is the natural log-probability, under the sampling distribution (after temperature and filters), of
    `token_ids[i]` given the prompt and the tokens before it; `raw_logprobs[i]` is that of the raw model (temperature
    1, no filter). Both in nats, float32 precision. `routing`: the experts that computed them, where they were recorded.
    """

    group_id: GroupId
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routing: Routing = NO_ROUTING

    def __post_init__(self) -> None:
        whose = f"rollout {self.index} of group {self.group_id}"
        _check_tokens(whose, self.token_ids, self.logprobs, self.raw_logprobs, self.version_spans, self.routing)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def oldest_version(self) -> Version | None:
        """The oldest version that sampled one of its tokens; None without tokens."""
        return min((span.version for span in self.version_spans), default=None)


@dataclass(frozen=True, slots=True)
class RolloutSegment:
    """Tokens from `offset` on of one rollout, as a worker reports them; a whole rollout is the segment at offset 0.

    The finish reason is the rollout's and is set on its last segment; UNFINISHED and ABORTED leave the rollout open.
    `expected_remaining_tokens`: the worker's estimate of how many tokens will follow; 0 if it has none.
    """

    group_id: GroupId
    index: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    expected_remaining_tokens: int = 0
    routing: Routing = NO_ROUTING

    def __post_init__(self) -> None:
        whose = f"tokens {self.offset}.. of rollout {self.index} of group {self.group_id}"
        _check_tokens(whose, self.token_ids, self.logprobs, self.raw_logprobs, self.version_spans, self.routing)

    @property
    def end(self) -> int:
        """The offset after its last token."""
        return self.offset + len(self.token_ids)

    @property
    def is_final(self) -> bool:
        """Whether it ends the rollout."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


class Verdict(enum.Enum):
    """What the learner did with a segment."""

    HELD = "held"  # a partial rollout, kept
    ADMITTED = "admitted"  # the rollout is finished and kept durably
    DUPLICATE = "duplicate"  # the rollout was finished before; nothing changed
    STALE = "stale"  # its oldest token is over the bound
    REFUSED = "refused"  # malformed, or not leased to this worker
    RESEND = "resend"  # tokens before the segment are missing: send again from `held_tokens`
    CLOSED = "closed"  # the group is closed: stop generating


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """The learner's answer to one segment; `held_tokens`: how many of the rollout's tokens it now holds."""

    group_id: GroupId
    index: int
    verdict: Verdict
    held_tokens: int
    message: str = ""


class Work(enum.Enum):
    """What a group is leased for."""

    TRAIN = "train"  # sampled by any live versions within the staleness bound
    EVALUATE = "evaluate"  # held-out: sampled by one version from first to last token, never trained on


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One prompt to be completed `rollout_count` times: everything that a worker needs to know about it.

    `consume_step`: the learner's estimate of the step that will train on it; a worker whose version is older than
    `consume_step - S` should not begin it. `exact_version`: the only version that may sample it; None for training.
    """

    group_id: GroupId
    prompt_token_ids: tuple[int, ...]
    rollout_count: int
    sampling: SamplingParams
    consume_step: int
    work: Work = Work.TRAIN
    exact_version: Version | None = None

    def __post_init__(self) -> None:
        if (self.work is Work.TRAIN) != (self.exact_version is None):
            expected = "none" if self.work is Work.TRAIN else "one"
            raise MalformedMessage(
                f"exact_version of group {self.group_id}: expected {expected} for work to {self.work.value}, got "
                f"{self.exact_version}"
            )


STOP_STRINGS_MAX = 16  # four times what OpenAI's API takes
STOP_STRING_BYTES_MAX = 64  # a closing tag; each byte more lengthens what engines must hold back
STOP_PIECES_MAX = 16_384
"""The most tokens that may be part of a stop string; a string in more tokens than this is refused as too common."""
STOP_PIECE_BYTES_MAX = 2 * STOP_STRING_BYTES_MAX + 1  # a token that begins in one stop string and ends in another


def check_stops(strings: Sequence[bytes], piece_ids: Sequence[int], pieces: Sequence[bytes]) -> None:
    """Raises `MalformedMessage` unless they are within the limits and consistent."""
    if len(strings) > STOP_STRINGS_MAX or not all(1 <= len(text) <= STOP_STRING_BYTES_MAX for text in strings):
        raise MalformedMessage(
            f"stop strings: expected at most {STOP_STRINGS_MAX} of 1 to {STOP_STRING_BYTES_MAX} bytes, got "
            f"{len(strings)} of up to {max(map(len, strings), default=0)}"
        )
    if len(piece_ids) != len(pieces) or len(pieces) > STOP_PIECES_MAX:
        raise MalformedMessage(
            f"stop pieces: expected at most {STOP_PIECES_MAX} tokens with a text each, got {len(piece_ids)} tokens and "
            f"{len(pieces)} texts"
        )
    if pieces and (not strings or not all(1 <= len(text) <= STOP_PIECE_BYTES_MAX for text in pieces)):
        raise MalformedMessage(f"stop pieces: expected stop strings and texts of 1 to {STOP_PIECE_BYTES_MAX} bytes")


@lru_cache(maxsize=64)
def _texts(piece_ids: tuple[int, ...], pieces: tuple[bytes, ...]) -> Mapping[int, bytes]:
    return dict(zip(piece_ids, pieces, strict=True))


def stop_place(
    strings: Sequence[bytes],
    piece_ids: tuple[int, ...],
    pieces: tuple[bytes, ...],
    token_ids: Sequence[int],
    begin: int,
) -> int | None:
    """Index of the first of `token_ids`, from `begin` on, that completes a stop string; None if none does.

    A match may start in tokens before `begin`.
    """
    if not strings:
        return None
    texts = _texts(piece_ids, pieces)
    longest = max(map(len, strings))
    tail = b""
    for place in range(max(0, begin - longest), len(token_ids)):
        text = texts.get(token_ids[place])
        if text is None:
            tail = b""
            continue
        tail += text
        if any(string in tail for string in strings):
            if place >= begin:
                return place
            tail = b""
            continue
        tail = tail[-longest:]
    return None


def piece_of_part(text: bytes, strings: Sequence[bytes]) -> bytes:
    """What a lease carries of a token's `text` that can be part of a stop string (tasks/token_text finds those tokens)."""
    for string in strings:
        if string in text:
            return string
    longest = max(map(len, strings))
    return text if len(text) <= 2 * longest else text[:longest] + b"\0" + text[-longest:]
