"""The bytes of tokens, of the kinds of tokenizers that families have."""

from __future__ import annotations

import random
import time

import pytest

from echo2.base.errors import ConfigError
from echo2.base.rollout import STOP_PIECES_MAX, SamplingParams, piece_of_part
from echo2.tasks.chat_format import StopStrings, TokenIndex, token_texts
from tests.unit.tasks.families import tokenizer_of


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_the_texts_of_tokens_are_what_they_decode_to(name: str) -> None:
    tokenizer = tokenizer_of(name)
    texts = token_texts(tokenizer)
    tokens = tokenizer.encode("the abc: é? 12", add_special_tokens=False)
    assert b"".join(texts[token] for token in tokens).decode().strip() == "the abc: é? 12"
    assert all(texts[number] == b"" for number in tokenizer.all_special_ids)


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_a_stop_string_is_found_however_the_model_writes_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, pieces = StopStrings(tokenizer).pieces_of(["the end", "?"])
    sampling = SamplingParams(stop_strings=(b"the end", b"?"), stop_piece_ids=ids, stop_pieces=pieces)
    for before in ("abc ", ""):
        by_letter = [token for c in f"{before}the end" for token in tokenizer.encode(c, add_special_tokens=False)[-1:]]
        merged = tokenizer.encode(f"{before}the end", add_special_tokens=False)
        assert sampling.string_stop(merged) == len(merged) - 1
        if name == "qwen3":
            assert sampling.string_stop([*by_letter, 5]) == len(by_letter) - 1
    assert sampling.string_stop(tokenizer.encode("abc then", add_special_tokens=False)) is None
    with pytest.raises(ConfigError, match="expected at most 16 strings of 1 to 64 bytes"):
        StopStrings(tokenizer).pieces_of(["x" * 65])


def may_be_part(text: bytes, string: bytes) -> bool:
    ends = range(1, min(len(text), len(string)) + 1)
    overlaps = any(text.endswith(string[:n]) or text.startswith(string[-n:]) for n in ends)
    return bool(text) and (string in text or text in string or overlaps)


def test_the_index_finds_the_tokens_that_a_look_at_each_finds() -> None:
    rng = random.Random(4)
    letters = [b"a", b"b", b" ", "é".encode(), b"\xc3", b"\xff", b"\x00"]
    for _ in range(200):
        texts = [b"".join(rng.choices(letters, k=rng.randrange(5))) for _ in range(60)]
        index = TokenIndex(texts)
        strings = ["".join(rng.choices("ab é\0", k=rng.randrange(1, 6))).encode() for _ in range(rng.randrange(1, 4))]
        expected = {number for number, text in enumerate(texts) if any(may_be_part(text, one) for one in strings)}
        found = index.parts_of(strings, 1000)
        assert found == expected and all(piece_of_part(texts[number], strings) for number in found)
        assert len(index.parts_of(strings, 3)) == len(expected) or len(index.parts_of(strings, 3)) > 3


def test_new_stop_strings_cost_milliseconds_whatever_the_vocabulary() -> None:
    rng = random.Random(5)
    letters = [bytes((letter,)) for letter in b"etaoinshrdlu bcdf"]
    texts = [b"".join(rng.choices(letters, k=rng.randrange(1, 12))) for _ in range(150_000)]
    index = TokenIndex(texts)
    for count, length, alphabet in ((1, 4, "XYZ"), (16, 64, "XYZ"), (16, 64, "etao"), (16, 1, " etaoinshrdlubcdf")):
        strings = ["".join(rng.choices(alphabet, k=length)).encode() for _ in range(count)]
        began = time.process_time()
        found = index.parts_of(strings, STOP_PIECES_MAX)
        if len(found) <= STOP_PIECES_MAX:
            assert [piece_of_part(texts[number], strings) for number in sorted(found)].count(b"") == 0
        assert time.process_time() - began < 0.25, (count, length, alphabet)
