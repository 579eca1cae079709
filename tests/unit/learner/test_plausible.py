"""What is refused at intake because no honest worker sends it: one test a lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, RolloutSegment, SamplingParams, VersionSpan
from echo2.learner.plausible import problem_of_end, problem_of_segment

STOP = 1
SPEC = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,)), 0)
FILTERED = replace(SPEC, sampling=replace(SPEC.sampling, top_p=0.9))
COLD = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.7))
PUBLISHED = (Version(0), Version(2))


def segment(logprobs: tuple[float, ...], raw: tuple[float, ...]) -> RolloutSegment:
    spans = (VersionSpan(Version(2), len(logprobs)),)
    return RolloutSegment(GroupId("g"), 0, 0, (7,) * len(raw), logprobs, raw, spans, FinishReason.UNFINISHED)


def rollout(tokens: tuple[int, ...], reason: FinishReason) -> Rollout:
    numbers = (-1.0,) * len(tokens)
    return Rollout(GroupId("g"), 0, tokens, numbers, numbers, (VersionSpan(Version(2), len(tokens)),), reason)


@pytest.mark.parametrize(
    ("spec", "logprobs", "raw", "is_refused"),
    [
        (SPEC, (-1.0, -2.0), (-1.0, -2.0 - 1e-6), False),
        (SPEC, (-1.0, -2.0), (-1.0, -18.0), True),  # honest where it was looked at, forged where it is trained on
        (SPEC, (-1.0, -2.0), (-1.0, 0.0), True),
        (FILTERED, (-1.0, -2.0), (-1.1, -2.4), False),  # a filter makes its tokens likelier
        (FILTERED, (-1.0, -2.0), (-1.1, -1.9), True),
        (COLD, (-1.0, -2.0), (-1.4, -1.7), False),  # at another temperature only one of the two is used
    ],
)
def test_the_two_numbers_of_a_token_stand_in_the_relation_that_its_sampling_says(
    spec: GroupSpec, logprobs: tuple[float, ...], raw: tuple[float, ...], is_refused: bool
) -> None:
    problem = problem_of_segment(segment(logprobs, raw), spec, 50, PUBLISHED)
    assert (problem is not None) == is_refused
    assert problem is None or "token 1" in problem


def test_what_training_uses_is_the_raw_number_at_temperature_1_and_the_other_elsewhere() -> None:
    assert (
        SPEC.sampling.trained_logprobs((-1.0,), (-2.0,))
        == FILTERED.sampling.trained_logprobs((-1.0,), (-2.0,))
        == (-2.0,)
    )
    assert COLD.sampling.trained_logprobs((-1.0,), (-2.0,)) == (-1.0,)


@pytest.mark.parametrize(
    ("tokens", "reason", "text"),
    [
        ((7,), FinishReason.LENGTH, "expected 6 tokens where it ends for its length, got 1"),
        ((7,) * 6, FinishReason.LENGTH, None),
        ((7,) * 7, FinishReason.LENGTH, "at most 6"),
        ((7, 8), FinishReason.STOP, "a stop token at its end"),
        ((7, STOP), FinishReason.STOP, None),
        ((7, STOP, 8), FinishReason.UNFINISHED, "its first stop token"),
        ((7, STOP, STOP), FinishReason.STOP, "its first stop token"),
        ((7, 8), FinishReason.UNFINISHED, None),
    ],
)
def test_a_rollout_ends_where_its_lease_says_and_nowhere_else(
    tokens: tuple[int, ...], reason: FinishReason, text: str | None
) -> None:
    problem = problem_of_end(rollout(tokens, reason), 0, SPEC)
    assert (problem is None) == (text is None) and (text or "") in (problem or "")


def test_a_stop_token_that_was_held_already_ends_the_rollout_too() -> None:
    assert problem_of_end(rollout((7, STOP, 8), FinishReason.UNFINISHED), 2, SPEC) is not None
