"""Expert routing of a rollout in a mixture of experts: which experts computed each token. Packed, optional, bounded.

Guarantees: `unpacked(packed(x))` is x; a `Routing` matches the number of its rollout's tokens; it is dropped entirely unless
known for every token. Leaves to others: recording and replaying it (weights/routers), whether its sender may be
believed: a learner that replays it still weighs the experts with its own router.

A row holds each router's chosen experts for one position, `bits_of(experts)` bits each. The row of a sampled token is the row of
the position that predicts it: for the first token, the prompt's last position. `prompt` holds the positions before that.

Shapes: N rows, L routers, K experts chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo2.base.errors import MalformedMessage

CONFIG_KEY = "echo2_routing"
"""Key in the learner's model config that asks workers to record routing."""
ROW_BYTES_MAX = 1 << 11
"""Limit per row; 48 routers that choose 8 of 128 experts take 336 bytes."""
PROMPT_ROUTING_BYTES_MAX = 2 << 20
"""The rows of a longer prompt are not sent: the trainer's own router chooses there."""
REPORT_ROUTING_BYTES_MAX = 3 << 20
"""Limit for the tokens of one report; together with a prompt's rows it fits into one message."""
ROLLOUT_ROUTING_BYTES_MAX = 16 << 20
"""Limit for the tokens of one rollout; a longer one is trained on without routing."""


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """A model's number of `routers`, each of which chooses `chosen` of `experts`."""

    routers: int
    chosen: int
    experts: int

    @property
    def bits(self) -> int:
        """Bits of one expert's index."""
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

    def check(self, count: int, whose: str) -> None:
        """MalformedMessage unless it fits `count` tokens."""
        if not self.tokens:
            if self.prompt:
                raise MalformedMessage(f"routing of {whose}: expected that of its tokens with that of its prompt")
            return
        if count < 1 or len(self.tokens) % count or len(self.tokens) // count > ROW_BYTES_MAX:
            raise MalformedMessage(
                f"routing of {whose}: expected rows of one size, up to {ROW_BYTES_MAX} bytes, for {count} tokens, got "
                f"{len(self.tokens)} bytes"
            )
        if len(self.prompt) % (len(self.tokens) // count) or len(self.prompt) > PROMPT_ROUTING_BYTES_MAX:
            raise MalformedMessage(
                f"routing of {whose}: expected a prompt's rows of {len(self.tokens) // count} bytes, up to "
                f"{PROMPT_ROUTING_BYTES_MAX} bytes, got {len(self.prompt)} bytes"
            )

    def after(self, skipped: int, count: int) -> Routing:
        """The routing of the tokens after the first `skipped` of `count`."""
        if not skipped or not self.tokens:
            return self
        return Routing(b"", self.tokens[skipped * (len(self.tokens) // count) :])

    def up_to(self, kept: int, count: int) -> Routing:
        """The routing of the prompt and of the first `kept` of `count` tokens."""
        return Routing(self.prompt, self.tokens[: kept * (len(self.tokens) // count)]) if self.tokens else self


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
    found: npt.NDArray[np.int16] = numbers.reshape(count, shape.routers, shape.chosen).astype(np.int16)
    if count and int(found.max()) >= shape.experts:
        raise MalformedMessage(f"routing: expected experts below {shape.experts}, got {int(found.max())}")
    return found
