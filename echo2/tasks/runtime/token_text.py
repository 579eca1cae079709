"""The bytes of each token of a Hugging Face tokenizer, and which of them can be part of a stop string.

Guarantees: what the tokens of a completion decode to is their bytes one behind the other, but for special tokens, which have none.
Leaves to others: where a completion stops (base/stops).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.stops import STOP_PIECES_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, piece_of

_SPACE = "▁"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's: which byte a character of a byte-level token stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def token_texts(tokenizer: Any) -> list[bytes]:
    """By id. Empty: a special token, or none."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    added = {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False) if backend is not None else ""
    is_byte_level, is_spaced = "ByteLevel" in decoder, _SPACE in decoder or "Metaspace" in decoder
    texts = []
    for number, name in enumerate(names):
        if name is None or number in special:
            texts.append(b"")
        elif number in added:
            texts.append(added[number].encode())
        elif is_byte_level:
            table = _byte_of_character()
            texts.append(bytes(table[c] for c in name) if all(c in table for c in name) else name.encode())
        elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            texts.append(bytes.fromhex(name[3:5]))
        else:
            texts.append((name.replace(_SPACE, " ") if is_spaced else name).encode())
    return texts


class StopStrings:
    """What a lease carries of stop strings, by the texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: list[bytes] | None = None
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], tuple[bytes, ...]]] = {}

    @property
    def longest_bytes(self) -> int:
        """Of all tokens."""
        if self._texts is None:
            self._texts = token_texts(self._tokenizer)
        return max(map(len, self._texts), default=1)

    def pieces_of(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Ids and texts of all tokens that can be part of one of `strings`. Raises `ConfigError` if there are too many."""
        key = tuple(strings)
        if key not in self._known:
            if len(self._known) >= 64:
                self._known.clear()
            self._known[key] = self._looked_up(key)
        return self._known[key]

    def _looked_up(self, strings: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        wanted = [text.encode() for text in strings]
        if len(wanted) > STOP_STRINGS_MAX or not all(1 <= len(text) <= STOP_STRING_BYTES_MAX for text in wanted):
            raise ConfigError(
                f"stop: expected at most {STOP_STRINGS_MAX} strings of 1 to {STOP_STRING_BYTES_MAX} bytes, got {strings}"
            )
        if not wanted:
            return (), ()
        if self._texts is None:
            self._texts = token_texts(self._tokenizer)
        found = [
            (number, piece) for number, text in enumerate(self._texts) if text and (piece := piece_of(text, wanted))
        ]
        if len(found) > STOP_PIECES_MAX:
            raise ConfigError(
                f"stop: expected strings that at most {STOP_PIECES_MAX} tokens are part of, got {strings} with {len(found)}"
            )
        return tuple(number for number, _ in found), tuple(piece for _, piece in found)
