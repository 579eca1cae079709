"""The bytes of tokens, of the kinds of tokenizers that families have."""

from __future__ import annotations

import pytest

from echo2.base.errors import ConfigError
from echo2.base.rollout import SamplingParams
from echo2.tasks.runtime.token_text import StopStrings, token_texts
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


def test_stop_strings_beyond_the_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at most 16 strings of 1 to 64 bytes"):
        StopStrings(tokenizer_of("qwen3")).pieces_of(["x" * 65])
