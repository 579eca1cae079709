"""Recent rollouts: what is kept of them, and what an operator is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.recent import RecentRollouts, answer, plain
from echo2.learner.rollouts.groups import Batch, Insertion, SentTokens, TrainGroup
from echo2.wire.bounds import LENGTH_SHARES_MAX, ROLLOUTS_SHOWN_MAX, TOKENS_SHOWN_MAX, TURNS_SHOWN_MAX, check
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

PIECES = ["a", "\n", "\x1b[2J", "\u202e", "<b>"]


class Letters:
    """Tokens are PIECES, over and over."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(PIECES[token % len(PIECES)] for token in token_ids)

    def batch_decode(self, lists: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(one) for one in lists]


def group(name: str, tokens: int, count: int = 2) -> TrainGroup:
    sampling = SamplingParams(max_new_tokens=tokens)
    half = tokens // 2
    spans = (VersionSpan(Version(3), half), VersionSpan(Version(4), tokens - half))
    rollouts = tuple(
        Rollout(GroupId(name), index, tuple(range(tokens)), tuple(-0.5 * place for place in range(tokens)),
                tuple(-1.0 for _ in range(tokens)), spans, FinishReason.STOP)
        for index in range(count)
    )  # fmt: skip
    senders = tuple((SentTokens(PeerId("w1"), half), SentTokens(PeerId("w2"), tokens - half)) for _ in range(count))
    rewards = tuple(index / 2 for index in range(count))
    return TrainGroup(GroupSpec(GroupId(name), (0, 4), count, sampling, 0), 0, rollouts, rewards, (), senders)


def shown(recent: RecentRollouts, rollout_id: str = "", offset: int = 0) -> pb.RolloutsShown:
    found = answer(recent, Letters(), pb.RolloutsWanted(request=7, rollout_id=rollout_id, offset=offset))
    check(found, "the learner")
    assert found.request == 7
    return found


def test_the_list_is_newest_first_and_one_rollout_has_each_token_with_its_log_probability_and_version() -> None:
    recent = RecentRollouts()
    for step in (4, 4, 5):  # the first is trained again after a restart
        recent.add(Batch(Step(step), (group(f"g{step}", 10),)))
    rows = shown(recent).rollouts
    assert [row.rollout_id for row in rows] == ["g5/1", "g5/0", "g4/1", "g4/0"]
    first = rows[0]
    assert (first.step, first.reward, first.token_count, first.finish_reason) == (6, 0.5, 10, "stop")
    assert (first.oldest_version, first.newest_version, list(first.peer_ids)) == (3, 4, ["w1", "w2"])
    one = shown(recent, "g4/0", 3)
    assert [token.token_id for token in one.tokens] == list(range(3, 10))
    assert [token.logprob for token in one.tokens] == [-0.5 * place for place in range(3, 10)]
    assert [token.version for token in one.tokens] == [3, 3, 4, 4, 4, 4, 4]
    assert [one.rollouts[0].peer_ids[token.peer] for token in one.tokens] == ["w1", "w1", "w2", "w2", "w2", "w2", "w2"]
    assert one.prompt == "a<b>" and one.rollouts[0].turn_count == 1 and not one.turns
    assert not shown(recent, "g9/0").rollouts, "one that is not kept is not shown"
    assert not shown(recent, "g4/0", 10).tokens


def test_an_episode_shows_what_the_environment_said_before_each_turn_and_no_more_turns_than_fit() -> None:
    recent = RecentRollouts()
    every = tuple(Insertion(2 * turn, (0, 4)) for turn in range(1, 100))
    long = replace(group("g1", 200, count=1), insertions=(every,))
    agent = replace(group("a1", 4, count=1), insertions=((Insertion(0, (4,)), Insertion(2, ())),))
    recent.add(Batch(Step(1), (long, agent)))
    assert recent["g1/0"].size == 200 + 2 + 2 * len(every)
    begun, one = 0, shown(recent, "g1/0")
    assert one.rollouts[0].turn_count == 100
    seen = []
    while begun < 200:
        one = shown(recent, "g1/0", begun)
        assert len(one.turns) <= TURNS_SHOWN_MAX and all(
            begun <= turn.position < begun + len(one.tokens) for turn in one.turns
        )
        seen += [(turn.turn, turn.position, turn.text) for turn in one.turns]
        begun += len(one.tokens)
    assert seen == [(turn + 1, 2 * turn, "a<b>") for turn in range(1, 100)]
    calls = shown(recent, "a1/0")
    assert [(turn.turn, turn.position, turn.text) for turn in calls.turns] == [(1, 0, "<b>"), (2, 2, "")]


def test_hostile_texts_are_shown_as_escapes_and_cut() -> None:
    recent = RecentRollouts()
    recent.add(Batch(Step(4), (group("g1", 2000),)))
    one = shown(recent, "g1/0")
    assert len(one.tokens) == TOKENS_SHOWN_MAX
    assert [token.text for token in one.tokens[:5]] == ["a", "\n", "\\x1b[2J", "\\u202e", "<b>"]
    assert "\x1b" not in one.rollouts[0].completion and one.rollouts[0].completion.endswith("…")
    assert plain("x" * 5, 5) == "xxxxx" and plain("x" * 6, 5) == "xxxx…"


def test_what_is_kept_is_bounded_by_tokens_and_a_large_step_by_a_quarter_of_them() -> None:
    recent = RecentRollouts(tokens_max=4000)
    for step in range(50):
        recent.add(Batch(Step(step), tuple(group(f"g{step}-{index}", 100) for index in range(20))))
        kept = recent.newest(10_000)
        assert sum(one.size for one in kept) <= 4000
        newest = [one for one in kept if one.step == step + 1]
        assert 0 < sum(one.size for one in newest) <= 1000
    assert len(shown(RecentRollouts(), "").rollouts) == 0
    assert len(shown(recent).rollouts) <= ROLLOUTS_SHOWN_MAX
    assert len({one.rollout_id.partition("-")[0] for one in kept}) >= 3, "of several steps"
    recent.add(Batch(Step(50), (group("huge", 2000),)))
    assert not [one for one in recent.newest(10_000) if one.rollout_id.startswith("huge")]


def test_lengths_are_means_of_equal_shares_of_the_newest_rollouts() -> None:
    recent = RecentRollouts()
    recent.add(Batch(Step(1), (group("early", 50, count=LENGTH_SHARES_MAX - 1),)))
    assert recent.lengths() == [], "too few rollouts for so many shares"
    sizes = [10 + index % 200 for index in range(1000)]
    recent.add(Batch(Step(2), tuple(group(f"g{index}", size, count=1) for index, size in enumerate(sizes))))
    lengths = recent.lengths()
    assert len(lengths) == LENGTH_SHARES_MAX and lengths == sorted(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(sum(sizes) / len(sizes), rel=0.03)
    assert lengths[0] < 13 and lengths[-1] > 205
