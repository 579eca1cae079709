"""Messages made up from the protocol's own descriptors: missing, repeated, contradictory, extreme, or just within bounds.

`Grammar.message` makes one of any kind; what it is told of the run (ids, signed tickets, keys of artifacts) it mixes in, so
that messages get past the first checks. `is_wild`: some fields are beyond their bounds or no values at all.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from echo2.wire.bounds import Data, Listed, Number, Text, bound_of
from echo2.wire.gen.echo2.v1 import rollout_pb2

MESSAGE_BYTES_MAX = 96 << 10
"""Larger ones are for the clients that flood; here many count."""
_INTEGERS = {FieldDescriptor.TYPE_UINT32: (1 << 32) - 1, FieldDescriptor.TYPE_UINT64: (1 << 64) - 1}
_REALS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


@dataclass
class Grammar:
    """`words`: ids of the run; `keys`: of artifacts; `tickets`: such as the coordinator signs."""

    rng: random.Random
    words: list[str] = field(default_factory=lambda: ["g00000000", "l-1"])
    keys: list[bytes] = field(default_factory=lambda: [bytes(16)])
    tickets: list[rollout_pb2.LeaseTicket] = field(default_factory=list)

    def message(self, kind: Any, is_wild: bool, depth: int = 0) -> Message:
        made: Message = GetMessageClass(kind)()
        if kind.name == "LeaseTicket" and self.tickets and self.rng.random() < 0.8:
            made.CopyFrom(self.rng.choice(self.tickets))
            return made
        for one in kind.oneofs:
            self._set(made, self.rng.choice(one.fields), is_wild, depth)
        for each in kind.fields:
            if each.containing_oneof is None and self.rng.random() < 0.75:
                self._set(made, each, is_wild and self.rng.random() < 0.3, depth)
        return made

    def _set(self, message: Message, each: FieldDescriptor, is_wild: bool, depth: int) -> None:
        bound = bound_of(each)
        if isinstance(bound, Listed):
            count = self.rng.choice((1, 2, 3, 40, min(bound.count_max + is_wild, 3000)))
            values = getattr(message, each.name)
            if each.message_type is not None:
                for _ in range(min(count, 40 if depth else 200)):
                    values.add().CopyFrom(self.message(each.message_type, is_wild, depth + 1))
            else:
                value = self._value(each, bound.each, is_wild)
                value = value if self.rng.random() < 0.7 else self._value(each, bound.each, False)
                values.extend([value] * count)
        elif each.message_type is not None:
            if depth < 4:
                getattr(message, each.name).CopyFrom(self.message(each.message_type, is_wild, depth + 1))
        elif each.enum_type is not None:
            known = [value.number for value in each.enum_type.values]
            setattr(message, each.name, self.rng.choice([*known, 99] if is_wild else known))
        elif each.type == FieldDescriptor.TYPE_BOOL:
            setattr(message, each.name, self.rng.random() < 0.5)
        else:
            setattr(message, each.name, self._value(each, bound, is_wild))

    def _value(self, each: FieldDescriptor, bound: Any, is_wild: bool) -> Any:
        rng = self.rng
        match bound:
            case Number(high, low) if each.type in _REALS:
                within = (0.0, 1e-9, 1.0, rng.random(), min(high, 1e300), low)
                return rng.choice((*within, math.nan, math.inf, -math.inf, -1.0, 1e308) if is_wild else within)
            case Number(high, _):
                top = _INTEGERS[each.type]
                within = (0, 1, 2, rng.randrange(100), min(int(high), top), min(int(high), top) // 2)
                return rng.choice((*within, top, min(int(high) + 1, top), top // 2 + 1) if is_wild else within)
            case Text(chars_max):
                within = ("", rng.choice(self.words), "x" * min(chars_max, 500))
                return rng.choice((*within, "x" * (chars_max + 1), "a\x00b\x1b[2J", "é" * 200) if is_wild else within)
            case Data(bytes_max):
                shorter = rng.randbytes(64)[: min(bytes_max, 64)], b"\xff" * min(bytes_max, 9000)
                known = [data for data in (rng.choice(self.keys), b"", *shorter) if len(data) <= bytes_max]
                return rng.choice((*known, b"x" * min(bytes_max + 1, MESSAGE_BYTES_MAX)) if is_wild else known)
        raise AssertionError(f"{each.full_name} has no bound")
