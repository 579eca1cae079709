from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, SamplingParams, VersionSpan, joined_spans, spans_of

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


def test_oldest_version_is_the_smallest() -> None:
    assert rollout().oldest_version == 3
    assert rollout(token_ids=(), logprobs=(), raw_logprobs=(), version_spans=()).oldest_version is None


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


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}])
def test_sampling_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(MalformedMessage, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
