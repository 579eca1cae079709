"""The bytes of each token of a Hugging Face tokenizer, and which tokens can be part of a stop string.

Guarantees: a completion decodes to its tokens' bytes, concatenated; its named special tokens have no bytes. Leaves to others: where
a completion stops (base/rollout).
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.rollout import STOP_PIECES_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, piece_of_part

_SPACE = "▁"  # how SentencePiece writes a space


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's table: the byte that each character of a byte-level token stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def named_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that a tokenizer has names for, which begin, end or pad a text and are no part of it."""
    names = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return frozenset(int(token) for token in ids if token is not None)


def token_texts(tokenizer: Any) -> list[bytes]:
    """Returns each token's bytes, indexed by ID; empty for the tokenizer's named special tokens and unused ids."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = named_ids(tokenizer)
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


class _PrefixIndex:
    def __init__(self, texts: Sequence[bytes], numbers: Sequence[int]) -> None:
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts = [texts[place] for place in order]
        self._numbers = [numbers[place] for place in order]

    def beginning_with(self, start: bytes) -> Sequence[int]:
        """Returns the numbers of the texts that begin with `start`, which must not consist of 0xFF bytes only."""
        first = bisect_left(self._texts, start)
        return self._numbers[first : bisect_left(self._texts, _behind(start), first)]


class TokenIndex:
    """Finds the tokens that can be part of a stop string, without scanning a vocabulary of 150,000 tokens or more."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        numbers = [number for number, text in enumerate(texts) if text]
        known = [texts[number] for number in numbers]
        self._forward = _PrefixIndex(known, numbers)
        self._backward = _PrefixIndex([text[::-1] for text in known], numbers)
        self._same: dict[bytes, list[int]] = {}
        for number in numbers:
            self._same.setdefault(texts[number], []).append(number)
        self._numbers = numbers
        self._starts = list(itertools.accumulate((len(text) + 1 for text in known), initial=0))
        self._joined = b"\xff".join(known)  # 0xFF occurs in no UTF-8 text

    def parts_of(self, strings: Sequence[bytes], most: int) -> set[int]:
        """Returns the ids of all tokens that contain one of `strings`, lie within one, end with its beginning or begin with its
        end. Stops early once there are more than `most`."""
        found: set[int] = set()
        for string in strings:
            for numbers in self._parts_of(string):
                found.update(numbers[: most + 1])
                if len(found) > most:
                    return found
        return found

    def _parts_of(self, string: bytes) -> Iterator[Sequence[int]]:
        length = len(string)
        for size in range(1, length + 1):
            yield self._backward.beginning_with(string[:size][::-1])
            yield self._forward.beginning_with(string[-size:])
        inner = {string[a:b] for a in range(length) for b in range(a + 1, length + 1)}
        yield [number for text in inner for number in self._same.get(text, ())]
        at = self._joined.find(string)
        while at >= 0:
            place = bisect_right(self._starts, at) - 1
            yield self._numbers[place : place + 1]
            at = self._joined.find(string, self._starts[place + 1])


def _behind(start: bytes) -> bytes:
    """Returns the smallest byte string greater than all that begin with `start`."""
    kept = start.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,))


class StopStrings:
    """Computes what a lease carries for stop strings, for one tokenizer. Caches up to 64 sets of strings."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], tuple[bytes, ...]]] = {}

    @cached_property
    def index(self) -> TokenIndex:
        """Built at first use: some tenths of a second for a large vocabulary."""
        return TokenIndex(token_texts(self._tokenizer))

    @property
    def longest_bytes(self) -> int:
        return max(map(len, self.index.texts), default=1)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's part of the text; empty for end tokens, and for ids of a padded vocabulary."""
        texts = self.index.texts
        return texts[token_id] if token_id < len(texts) else b""

    def pieces_of(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Returns ids and pieces of all tokens that can be part of one of `strings`. Raises `ConfigError` if there are too many
        tokens or strings, or a string is too long."""
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
        found = sorted(self.index.parts_of(wanted, STOP_PIECES_MAX))
        if len(found) > STOP_PIECES_MAX:
            raise ConfigError(
                f"stop: expected strings that at most {STOP_PIECES_MAX} tokens are part of, got {strings} with more"
            )
        return tuple(found), tuple(piece_of_part(self.index.texts[number], wanted) for number in found)
