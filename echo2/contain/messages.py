"""The byte format between a process and what it contains: frames, and a distrustful JSON parser.

Guarantees: a frame's length is checked before its bytes are read; foreign bytes become plain data of
bounded depth and size, or a `MalformedMessage`. Nothing is unpickled. Leaves to others: pipes and deadlines.

To the contained process: four bytes of length, then JSON. From it: length, ending, CPU seconds, length of the printed
bytes (big-endian), then the printed bytes, then the answer's body.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from echo2.base.errors import MalformedMessage
from echo2.contain.limits import Ending

HEAD = struct.Struct(">IBBdI")
LENGTH = struct.Struct(">I")
TEXT_CHARS_MAX = 500


def request_frame(message: Mapping[str, object]) -> bytes:
    payload = json.dumps(message).encode()
    return LENGTH.pack(len(payload)) + payload


def answer_frame(ending: Ending, is_last: bool, cpu_s: float, printed: bytes, body: bytes) -> bytes:
    """`is_last`: the process can answer no further request."""
    return HEAD.pack(len(printed) + len(body), ending, is_last, cpu_s, len(printed)) + printed + body


def foreign_object(body: bytes) -> dict[str, object]:
    """Parses a JSON object from bytes that hostile code may have written."""
    try:
        parsed = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"contained answer: expected JSON, got {error_text(error)}") from None
    if not isinstance(parsed, dict):
        raise MalformedMessage(f"contained answer: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def shown(text: object) -> str:
    """Foreign text made safe for a log: one line, printable, truncated."""
    cut = str(text)[:TEXT_CHARS_MAX]
    return "".join(letter if letter.isprintable() else " " for letter in cut).strip()


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {shown(error)}"


def _no_constant(name: str) -> float:
    raise ValueError(f"the number {name}")
