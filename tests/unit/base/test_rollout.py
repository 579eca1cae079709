"""What is one rollout, and where it stops."""

import math
import random

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import (
    STOP_PIECES_MAX,
    FinishReason,
    Rollout,
    SamplingParams,
    VersionSpan,
    joined_spans,
    piece_of_part,
    spans_of,
    stop_place,
)
from echo2.tasks.chat_format import TokenIndex

VERSIONS = st.lists(st.integers(0, 3).map(Version), max_size=30)


def expanded(spans: tuple[VersionSpan, ...]) -> list[Version]:
    return [span.version for span in spans for _ in range(span.count)]


@given(first=VERSIONS, second=VERSIONS)
def test_spans_keep_every_version_and_join_like_lists(first: list[Version], second: list[Version]) -> None:
    assert expanded(spans_of(first)) == first
    assert joined_spans(spans_of(first), spans_of(second)) == spans_of([*first, *second])


def rollout(**changes: object) -> Rollout:
    fields: dict[str, object] = {
        "group_id": GroupId("g"),
        "index": 0,
        "token_ids": (1, 2),
        "logprobs": (-0.5, -0.1),
        "raw_logprobs": (-0.5, -0.1),
        "version_spans": (VersionSpan(Version(3), 1), VersionSpan(Version(4), 1)),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": (-0.5,)}, "expected 2 log-probabilities"),
        ({"version_spans": (VersionSpan(Version(3), 1),)}, "spans that cover 2 tokens"),
        ({"logprobs": (-0.5, float("nan"))}, "finite"),
        ({"raw_logprobs": (-0.5, 0.5)}, "finite"),
    ],
)
def test_inconsistent_rollout_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        rollout(**changes)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": -1},
        {"max_new_tokens": 0},
    ],
)
def test_sampling_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(MalformedMessage, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


LETTERS = "ab<>/"


def test_the_first_token_that_completes_a_stop_string_is_found_wherever_looking_begins() -> None:
    rng = random.Random(3)
    for _ in range(400):
        texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 5))).encode() for _ in range(20)]
        strings = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))).encode() for _ in range(rng.randint(1, 3))]
        pieces = {n: piece_of_part(texts[n], strings) for n in TokenIndex(texts).parts_of(strings, 20)}
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
