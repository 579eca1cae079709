"""The types of rollouts, shared by all planes: sampling parameters, tokens with log-probabilities and versions, finish reasons.

Guarantees: a `Rollout` is self-consistent (lengths agree, spans cover the tokens).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Version

# Expert routing of a rollout in a mixture of experts: which experts computed each token. Packed, optional, bounded.
#
# Guarantees: `unpacked(packed(x))` is x; a `Routing` matches the number of its rollout's tokens; it is dropped entirely unless
# known for every token. Leaves to others: recording and replaying it (weights/routers), whether its sender may be
# believed: a learner that replays it still weighs the experts with its own router.
#
# A row holds each router's chosen experts for one position, `bits_of(experts)` bits each. The row of a sampled token is the row of
# the position that predicts it: for the first token, the prompt's last position. `prompt` holds the positions before that.
#
# Shapes: N rows, L routers, K experts chosen.

ROUTING_KEY = "echo2_routing"  # key in the learner's model config that asks workers to record routing
ROW_BYTES_MAX = 1 << 11  # limit per row; 48 routers that choose 8 of 128 experts take 336 bytes
PROMPT_ROUTING_BYTES_MAX = 2 << 20  # the rows of a longer prompt are not sent: the trainer's own router chooses there
REPORT_ROUTING_BYTES_MAX = 3 << 20
"""Limit for the tokens of one report; together with a prompt's rows it fits into one message."""
ROLLOUT_ROUTING_BYTES_MAX = 16 << 20  # limit for the tokens of one rollout; a longer one is trained on without routing


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """A model's number of `routers`, each of which chooses `chosen` of `experts`."""

    routers: int
    chosen: int
    experts: int

    @property
    def bits(self) -> int:
        return max(1, (self.experts - 1).bit_length())

    @property
    def row_bytes(self) -> int:
        return -(-self.routers * self.chosen * self.bits // 8)


@dataclass(frozen=True, slots=True)
class Routing:
    """`tokens`: one row per token; `prompt`: one row per position before the prompt's last. Either may be empty."""

    prompt: bytes = b""
    tokens: bytes = b""

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def check(self, count: int, owner: str) -> None:
        """MalformedMessage unless it fits `count` tokens."""
        if not self.tokens:
            if self.prompt:
                raise MalformedMessage(f"routing of {owner}: expected that of its tokens with that of its prompt")
            return
        if count < 1 or len(self.tokens) % count or len(self.tokens) // count > ROW_BYTES_MAX:
            raise MalformedMessage(
                f"routing of {owner}: expected rows of one size, up to {ROW_BYTES_MAX} bytes, for {count} tokens, got "
                f"{len(self.tokens)} bytes"
            )
        if len(self.prompt) % (len(self.tokens) // count) or len(self.prompt) > PROMPT_ROUTING_BYTES_MAX:
            raise MalformedMessage(
                f"routing of {owner}: expected a prompt's rows of {len(self.tokens) // count} bytes, up to "
                f"{PROMPT_ROUTING_BYTES_MAX} bytes, got {len(self.prompt)} bytes"
            )

    def of_rows(self, count: int, row_bytes: int) -> Routing:
        """Itself, if its tokens' rows are `count` of `row_bytes`; else none."""
        return self if len(self.tokens) == count * row_bytes else NO_ROUTING

    def after(self, skipped: int, count: int) -> Routing:
        """The routing of the tokens after the first `skipped` of `count`."""
        if not skipped or not self.tokens:
            return self
        return Routing(b"", self.tokens[skipped * (len(self.tokens) // count) :])

    def up_to(self, length: int, count: int) -> Routing:
        """The routing of the prompt and of the first `length` of `count` tokens."""
        return Routing(self.prompt, self.tokens[: length * (len(self.tokens) // count)]) if self.tokens else self


NO_ROUTING = Routing()  # shared: a rollout without routers carries no array


def joined_routing(first: Routing, first_count: int, second: Routing, second_count: int) -> Routing:
    """The routing of `first_count` tokens followed by `second_count`; none if either part is unknown or both are too long."""
    if not first_count:
        return second
    if not second_count:
        return first
    is_whole = first.tokens and second.tokens
    is_long = len(first.tokens) + len(second.tokens) > ROLLOUT_ROUTING_BYTES_MAX
    if not is_whole or is_long or len(first.tokens) * second_count != len(second.tokens) * first_count:
        return NO_ROUTING
    return Routing(first.prompt, first.tokens + second.tokens)


def packed(experts_NLK: npt.NDArray[np.integer], shape: RoutingShape) -> bytes:
    """Packs rows of experts; each row starts at a byte boundary."""
    count = len(experts_NLK)
    flat = experts_NLK.reshape(count, shape.routers * shape.chosen).astype(np.uint32)
    places = np.arange(shape.bits, dtype=np.uint32)
    bits = ((flat[:, :, None] >> places) & 1).astype(np.uint8).reshape(count, -1)
    return np.packbits(bits, axis=1, bitorder="little").tobytes()


def unpacked(rows: bytes, shape: RoutingShape) -> npt.NDArray[np.int16]:
    """Experts [N, L, K] of packed rows. MalformedMessage if they have another shape or an expert index is out of range."""
    if len(rows) % shape.row_bytes:
        raise MalformedMessage(f"routing: expected rows of {shape.row_bytes} bytes, got {len(rows)} bytes")
    count, width = len(rows) // shape.row_bytes, shape.routers * shape.chosen * shape.bits
    raw = np.frombuffer(rows, np.uint8).reshape(count, shape.row_bytes)
    bits = np.unpackbits(raw, axis=1, count=width, bitorder="little").reshape(count, -1, shape.bits)
    numbers = (bits.astype(np.int32) << np.arange(shape.bits, dtype=np.int32)).sum(-1)
    experts_NLK: npt.NDArray[np.int16] = numbers.reshape(count, shape.routers, shape.chosen).astype(np.int16)
    if count and int(experts_NLK.max()) >= shape.experts:
        raise MalformedMessage(f"routing: expected experts below {shape.experts}, got {int(experts_NLK.max())}")
    return experts_NLK


class FinishReason(enum.Enum):
    """Why a sequence stopped. UNFINISHED marks a partial rollout."""

    UNFINISHED = "unfinished"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class EndReason(enum.Enum):
    FINISHED = "finished"
    HANDED_BACK = "handed back"
    REFUSED = "refused"


STOP_TOKENS_MAX = 256  # as a message may hold: a group with more would have every message of its learner refused
TEMPERATURE_MIN = 1e-6  # smaller ones draw greedily too, and at last divide logits to infinity in float32
TEMPERATURE_MAX = 2.0  # as of OpenAI's API; vLLM takes none above it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1.0 and `top_k` 0 switch the filters off. A completion ends with
    the token that completes one of `stop_strings` (UTF-8); `stop_pieces` are the texts of the tokens `stop_piece_ids`, the only
    tokens that can be part of one."""

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
        if self.temperature and not TEMPERATURE_MIN <= self.temperature <= TEMPERATURE_MAX:
            expected = f"0, or {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}"
            raise MalformedMessage(f"temperature: expected {expected}, got {self.temperature}")
        if len(self.stop_token_ids) > STOP_TOKENS_MAX:
            raise MalformedMessage(
                f"stop_token_ids: expected at most {STOP_TOKENS_MAX}, got {len(self.stop_token_ids)}"
            )
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
        """Chooses which of the two log-probabilities per token counts in training and audits. At temperature 1 the learner
        computes the raw model's, so the raw ones count, whatever filter was on; at other temperatures the sampling
        distribution's count, in which a filter's renormalisation remains as a mismatch that the correction sees. For greedy
        completions, which are audited but never trained on, the raw ones count: log-probabilities of a draw mean nothing there."""
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


@dataclass(frozen=True, slots=True)
class Rollout:
    """Tokens of one sampled completion: a whole one, what is held of it so far or, in a worker's report, those from `offset` on.

    `logprobs[i]` is the natural log-probability, under the sampling distribution (after temperature and filters), of
    `token_ids[i]` given the prompt and the tokens before it; `raw_logprobs[i]` is that of the raw model (temperature
    1, no filter). Both in nats, float32 precision. The finish reason comes with the last token; UNFINISHED and ABORTED leave the
    rollout open. `routing`: the experts that computed them, where they were recorded. `expected_remaining_tokens`: the worker's
    estimate of how many will follow; 0 if it has none.
    """

    group_id: GroupId
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routing: Routing = NO_ROUTING
    offset: int = 0
    expected_remaining_tokens: int = 0

    def __post_init__(self) -> None:
        name = f"rollout {self.index} of group {self.group_id}"
        if self.offset:
            name = f"tokens {self.offset}.. of {name}"
        count = len(self.token_ids)
        if len(self.logprobs) != count or len(self.raw_logprobs) != count:
            raise MalformedMessage(
                f"{name}: expected {count} log-probabilities, one a token, got {len(self.logprobs)} sampled and "
                f"{len(self.raw_logprobs)} raw"
            )
        covered = sum(span.count for span in self.version_spans)
        if covered != count or any(span.count < 1 for span in self.version_spans):
            raise MalformedMessage(f"{name}: expected version spans that cover {count} tokens, got {covered}")
        self.routing.check(count, name)
        for values in (self.logprobs, self.raw_logprobs):
            if values and (not all(map(math.isfinite, values)) or max(values) > 1e-3):
                raise MalformedMessage(f"{name}: expected finite log-probabilities <= 0")

    @property
    def end(self) -> int:
        """The offset after its last token."""
        return self.offset + len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def versions(self) -> tuple[Version, ...]:
        """The version that sampled each token."""
        return tuple(span.version for span in self.version_spans for _ in range(span.count))

    @property
    def oldest_version(self) -> Version | None:
        """The oldest version that sampled one of its tokens; None without tokens."""
        return min((span.version for span in self.version_spans), default=None)


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
    """One prompt to be completed `rollout_count` times: everything that a worker needs to know about it. `consume_step`: the
    learner's estimate of the step that will train on it; a worker whose version is older than `consume_step - S` should not
    begin it. `exact_version`: the only version that may sample it; None for training."""

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
    """Index of the first of `token_ids`, from `begin` on, that completes a stop string; None if none does. A match may start in
    tokens before `begin`."""
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
    """What a lease carries of a token's `text` that can be part of a stop string (tasks/chat_format finds those tokens)."""
    for string in strings:
        if string in text:
            return string
    longest = max(map(len, strings))
    return text if len(text) <= 2 * longest else text[:longest] + b"\0" + text[-longest:]


# What a training client sends: sequences with targets and numbers for each target, the loss over them, and the update's settings.
#
# Shapes: N tokens of an example, K targets of each token.


@dataclass(frozen=True, slots=True)
class Example:
    """`token_ids_N`: int64 inputs. `targets_NK`: int64, the tokens scored after each input. `columns`: float32 (N, K), a number
    for each target under the names that the loss reads."""

    token_ids_N: np.ndarray
    targets_NK: np.ndarray
    columns: Mapping[str, np.ndarray]


LOSS_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("logprobs", "advantages")),
}
"""The losses of Tinker's API that are computed here, and the columns that each reads."""


@dataclass(frozen=True, slots=True)
class ClientLoss:
    """`name`: of `LOSS_COLUMNS`. `clip_low`, `clip_high`: bounds of the ratio. `beta`: weight of dro's quadratic term. The defaults
    are those of Tinker's API."""

    name: str
    clip_low: float = 0.8
    clip_high: float = 1.2
    beta: float = 0.05

    def __post_init__(self) -> None:
        if self.name not in LOSS_COLUMNS:
            raise ConfigError(f"loss_fn: expected one of {', '.join(LOSS_COLUMNS)}, got {self.name!r:.80}")
        if not 0 <= self.clip_low <= 1 <= self.clip_high < math.inf or not 0 <= self.beta < math.inf:
            raise ConfigError(
                f"loss_fn_config: expected 0 <= clip_low_threshold <= 1 <= clip_high_threshold and beta of 0 or more, got {self}"
            )


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Settings of one update by AdamW. `grad_clip`: largest norm of the gradient; 0: any."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float = 0.0
    grad_clip: float = 0.0

    def __post_init__(self) -> None:
        is_sound = 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon >= 0 and math.isfinite(self.lr)
        if not is_sound or self.lr < 0 or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"adam_params: expected betas from 0 to below 1, the rest finite and 0 or more, got {self}"
            )


@dataclass(frozen=True, slots=True)
class Ticket:
    """One worker's right to produce one group, as the coordinator granted it."""

    lease_id: LeaseId
    group_id: GroupId
    worker_peer_id: PeerId
    attempt: int
    deadline_unix_s: float
    run_id: RunId
