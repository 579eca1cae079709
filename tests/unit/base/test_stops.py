"""Stop strings over tokens: what a lease carries is enough to find the very token that completes one."""

from __future__ import annotations

import random

import pytest

from echo2.base.errors import MalformedMessage
from echo2.base.rollout import SamplingParams
from echo2.base.stops import STOP_PIECES_MAX, piece_of, stop_place

LETTERS = "ab<>/"


def test_the_first_token_that_completes_a_stop_string_is_found_wherever_looking_begins() -> None:
    rng = random.Random(3)
    for _ in range(400):
        texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 5))).encode() for _ in range(20)]
        strings = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))).encode() for _ in range(rng.randint(1, 3))]
        pieces = {number: piece for number, text in enumerate(texts) if (piece := piece_of(text, strings))}
        tokens = [rng.randrange(20) for _ in range(30)]
        whole = [b"".join(texts[token] for token in tokens[: n + 1]) for n in range(30)]
        expected = next((n for n in range(30) if any(string in whole[n] for string in strings)), None)
        ids, parts = tuple(pieces), tuple(pieces.values())
        assert stop_place(strings, ids, parts, tokens, 0) == expected
        begin = rng.randint(0, expected if expected is not None else 29)
        assert stop_place(strings, ids, parts, tokens, begin) == expected


def test_limits_of_stop_strings_are_held() -> None:
    good = SamplingParams(stop_strings=(b"</a>",), stop_piece_ids=(5,), stop_pieces=(b"</a>",))
    assert good.string_stop([4, 5]) == 1 and good.without_seed().stop_strings == ()
    for strings, ids, pieces in (
        ((b"",), (), ()),
        ((b"x" * 65,), (), ()),
        ((b"x",) * 17, (), ()),
        ((b"x",), (1, 2), (b"x",)),
        ((), (1,), (b"x",)),
        ((b"x",), (1,), (b"",)),
        ((b"x",), (1,) * (STOP_PIECES_MAX + 1), (b"x",) * (STOP_PIECES_MAX + 1)),
    ):
        with pytest.raises(MalformedMessage, match="stop"):
            SamplingParams(stop_strings=strings, stop_piece_ids=ids, stop_pieces=pieces)
