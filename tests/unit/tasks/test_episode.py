"""Episodes in tokens: only sampled tokens are trained on, each prompt is exactly what came before, limits end it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import TaskError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.tasks.environment import Observation
from echo2.tasks.episode import Episode, EpisodeLimits
from echo2.tasks.task import ChatMessage, Reward


class Letters:
    """Token ids are code points."""

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(token) for token in token_ids)

    def tokens_between(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)


CODEC = Letters()


def turn(text: str, version: int, finish: FinishReason = FinishReason.STOP) -> Rollout:
    token_ids = tuple(ord(letter) for letter in text)
    logprobs = tuple(-0.5 - i for i in range(len(text)))
    spans = (VersionSpan(Version(version), len(text)),) if text else ()
    return Rollout(GroupId("g"), 0, token_ids, logprobs, logprobs, spans, finish)


def said(text: str) -> Observation:
    return Observation((ChatMessage("tool", text),))


def test_the_world_is_masked_out_and_the_model_keeps_its_log_probabilities_and_versions() -> None:
    episode = Episode((1, 2)).after_completion(turn("ab", 4), CODEC).after_observation(said("xyz"), CODEC)
    assert episode.turn_prompt == (1, 2, *map(ord, "abxyz"))
    episode = episode.after_completion(turn("c", 6), CODEC)
    assert episode.mask == (True, True, False, False, False, True)
    assert episode.logprobs == (-0.5, -1.5, 0.0, 0.0, 0.0, -0.5)
    assert episode.version_spans == (VersionSpan(Version(4), 2), VersionSpan(Version(6), 1))
    assert episode.completions == ("ab", "c")
    assert episode.after_observation(Observation((), Reward(1.0)), CODEC) == episode


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.text("xyz", min_size=1, max_size=4)), max_size=5))
def test_lengths_agree_and_spans_cover_the_sampled_tokens(turns: list[tuple[str, str]]) -> None:
    episode = Episode((9,))
    for number, (text, answer) in enumerate(turns):
        before = episode.turn_prompt
        episode = episode.after_completion(turn(text, number), CODEC).after_observation(said(answer), CODEC)
        assert episode.turn_prompt[: len(before)] == before
    assert len(episode.token_ids) == len(episode.mask) == len(episode.logprobs)
    assert sum(span.count for span in episode.version_spans) == sum(episode.mask)


def test_limits_end_an_episode_and_an_unfinished_turn_is_refused() -> None:
    episode = Episode((1,)).after_completion(turn("ab", 0), CODEC)
    assert episode.has_room(EpisodeLimits(turns_max=2, tokens_max=4))
    assert not episode.has_room(EpisodeLimits(turns_max=1, tokens_max=4))
    assert not episode.has_room(EpisodeLimits(turns_max=2, tokens_max=3))
    with pytest.raises(TaskError, match="finished turn"):
        episode.after_completion(turn("a", 0, FinishReason.UNFINISHED), CODEC)
    with pytest.raises(TaskError, match="expected messages"):
        Observation(())
