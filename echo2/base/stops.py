"""Stop strings: finds the token at which a completion ends because its text contains one of them.

Guarantees: learner and worker find the same token without a tokenizer: a lease carries the text of every token that can be part
of a stop string; any other token breaks a partial match. Leaves to others: the texts of tokens (tasks/runtime/token_text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from echo2.base.errors import MalformedMessage

STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 64
STOP_PIECES_MAX = 16_384
"""The most tokens that may be part of a stop string; a string in more tokens than this is refused as too common."""
STOP_PIECE_BYTES_MAX = 2 * STOP_STRING_BYTES_MAX + 1


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


def piece_of(text: bytes, strings: Sequence[bytes]) -> bytes:
    """The piece of a token's `text` that a lease must carry; empty if the token can be part of no stop string. For many tokens
    there is an index with the same results (tasks/runtime/token_text)."""
    if not text or not any(string in text or _may_be_part(text, string) for string in strings):
        return b""
    return piece_of_part(text, strings)


def piece_of_part(text: bytes, strings: Sequence[bytes]) -> bytes:
    """`piece_of` for a token that is known to be part of a stop string."""
    for string in strings:
        if string in text:
            return string
    longest = max(map(len, strings))
    return text if len(text) <= 2 * longest else text[:longest] + b"\0" + text[-longest:]


def _may_be_part(text: bytes, string: bytes) -> bool:
    if text in string:
        return True
    ends = range(1, min(len(text), len(string)))
    return any(text.endswith(string[:n]) or text.startswith(string[-n:]) for n in range(1, len(ends) + 2))
