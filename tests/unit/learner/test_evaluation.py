"""The evaluation by the fleet: it ends with all answers of one version, or with a reason. Random sequences are in test_pool."""

from __future__ import annotations

import pytest

from echo2.base.ids import Version
from echo2.base.rollout import Verdict
from echo2.learner.rollouts.admission import GroupRules
from echo2.learner.rollouts.evaluation import MOVES_MAX, OPEN_MAX, QuestionSet, SetResult
from echo2.learner.rollouts.groups import evaluated_version
from tests.unit.learner.stage import ALICE, BOB, PATIENCE_S, STOP, Stage, piece

SETS = (QuestionSet("held_out", 3, 1), QuestionSet("hard", 2, 4))
V0 = Version(0)


def begun(version: int = 0, sets: tuple[QuestionSet, ...] = SETS) -> Stage:
    stage = Stage(GroupRules(4, 4, 2, 50), sets)
    stage.tell(stage.pool.evaluate, Version(version), False)
    return stage


def publish(stage: Stage, *versions: int) -> None:
    for version in versions:
        stage.tell(stage.pool.on_published, Version(version))


def tick(stage: Stage, now: float) -> None:
    stage.tell(stage.pool.tick, now)


def versions(stage: Stage) -> set[Version | None]:
    return {evaluated_version(group_id) for group_id in stage.questions}


def test_it_is_answered_by_its_version_alone_and_no_batch_is_drawn_of_it() -> None:
    stage = begun()
    first, *_ = stage.questions
    assert len(stage.questions) == 5
    publish(stage, 1)
    assert stage.report(piece(first, 0, [9, STOP], version=1)) == [Verdict.REFUSED], "a token of another version"
    for number, group_id in enumerate(stage.questions):
        stage.answer(group_id, float(number % 2))
    (result,) = stage.evaluations.results
    assert [each.rewards for each in result.sets] == [((0.0,), (1.0,), (0.0,)), ((1.0,) * 4, (0.0,) * 4)]
    assert result.rollouts == 11 and result.tokens == 22 and len(stage.answered) == 5
    assert stage.next_batch() is None and not stage.questions
    groups = stage.pool.groups
    assert groups.ledger.histogram() == {} and groups.counts.admitted == 0 and not groups.evaluation
    row = result.row(2.0)
    assert row["eval/hard/pass@4"] == 0.5 and row["eval/hard/exact"] == 0.5 and row["eval/reward"] == pytest.approx(0.4)


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    result = SetResult("s", ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)), {})
    assert result.ks == (1, 2, 4)
    assert [result.pass_at(k) for k in result.ks] == pytest.approx([(0.25 + 0.5) / 2, (0.5 + 5 / 6) / 2, 1.0])


def test_a_killed_learner_goes_on_with_the_answers_that_it_acknowledged() -> None:
    stage = begun()
    first, second, *others = stage.questions
    stage.answer(first)
    stage.report(piece(second, 0, [9, STOP]))
    stage.take_checkpoint()
    cursor = stage.pool.cursor
    stage.start(kept=0)
    assert {second, first}.isdisjoint(stage.questions), "what is sampled is not sampled again"
    assert stage.pool.cursor == cursor, "questions do not count as prompts"
    assert len(stage.prompts.due) == 2, "it is scored again"
    stage.reward(1.0)
    stage.reward(1.0)
    for group_id in others:
        stage.answer(group_id)
    assert [result.reward for result in stage.evaluations.results] == [1.0]
    stage.start()
    assert not stage.questions, "it is over"


def test_a_fleet_that_is_gone_does_not_hold_the_end_up() -> None:
    stage = begun()
    tick(stage, 0.0)
    assert "0 of 5 prompts answered" in stage.pool.evaluation_waits_for
    stage.answer(stage.questions[0])
    for now in (PATIENCE_S - 1, 2 * PATIENCE_S - 2):
        tick(stage, now)
    assert not stage.evaluations.results
    tick(stage, 2 * PATIENCE_S)
    (result,) = stage.evaluations.results
    assert not result.sets and "no answer to the evaluation of version 0 came" in result.reason
    assert not stage.pool.evaluation_waits_for and not stage.questions
    stage.loop.run_until_complete(stage.pool.evaluations_ended())


def test_one_that_nobody_began_moves_to_a_newer_version_at_once_and_a_begun_one_when_it_stands_still() -> None:
    stage = begun()
    publish(stage, 1, 2)
    tick(stage, 0.0)
    assert versions(stage) == {Version(2)}
    now = 0.0
    for version in range(3, 3 + MOVES_MAX + 1):
        (newest,) = versions(stage)
        assert newest is not None
        stage.report(piece(stage.questions[0], 0, [9], version=newest))
        publish(stage, version)
        tick(stage, now)
        now += PATIENCE_S
        tick(stage, now)
    assert [bool(result.sets) for result in stage.evaluations.results] == [False], "moved a few times, then given up"


@pytest.mark.parametrize(("newer", "waits_s"), [(1, PATIENCE_S), (2, 0.1 * PATIENCE_S)])
def test_a_begun_one_whose_version_the_fleet_has_left_moves_without_the_whole_patience(
    newer: int, waits_s: float
) -> None:
    stage = begun(6)
    stage.report(piece(stage.questions[0], 0, [9], version=6))
    tick(stage, 0.0)
    publish(stage, *range(7, 7 + newer))
    tick(stage, waits_s - 0.1)
    assert versions(stage) == {Version(6)}
    tick(stage, waits_s)
    assert versions(stage) == {Version(6 + newer)}


@pytest.mark.parametrize("is_out_at_the_restart", [True, False])
def test_one_that_nobody_began_does_not_wait_for_versions_after_the_last(is_out_at_the_restart: bool) -> None:
    """The workers that come now hold the last version alone."""
    stage = begun(6)
    publish(stage, *([7] if is_out_at_the_restart else ()))
    stage.take_checkpoint()
    stage.start()
    publish(stage, *(() if is_out_at_the_restart else [7]))
    stage.tell(stage.pool.evaluate, Version(7), True)
    tick(stage, 0.0)
    tick(stage, 0.1 * PATIENCE_S - 0.1)
    assert versions(stage) == {Version(6)}, "a worker that still holds it may come"
    tick(stage, 0.1 * PATIENCE_S)
    assert versions(stage) == {Version(7)}


@pytest.mark.parametrize("is_overtaken", [False, True])
@pytest.mark.parametrize("answered", [0, 3])
def test_a_token_now_and_then_does_not_hold_it_up(is_overtaken: bool, answered: int) -> None:
    """Once answers show how long one takes, only answers count; before the first, tokens count for a while."""
    stage = begun(6, (QuestionSet("held_out", 100, 1),))
    questions = stage.questions
    tick(stage, 0.0)
    for _ in range(answered):
        stage.answer(questions.pop())
    publish(stage, *((7, 8) if is_overtaken else ()))
    now, tokens = 0.0, 0
    while versions(stage) == {Version(6)}:
        stage.report(piece(questions[tokens // 7], 0, [9], tokens % 7, version=6), sender=BOB)
        now, tokens = now + 4.0, tokens + 1
        tick(stage, now)
    patience_s = PATIENCE_S * (0.1 if is_overtaken else 1.0) * (1 if answered else 4)
    assert now - 8.0 <= patience_s <= now
    assert bool(stage.evaluations.results) != is_overtaken, "it moves to the newest version, if there is one"


def test_one_whose_answers_take_long_gets_longer_than_the_patience() -> None:
    stage = begun(0, (QuestionSet("held_out", 8, 1),))
    tick(stage, 0.0)
    now, answer_s = 0.0, 0.9 * PATIENCE_S
    for group_id in stage.questions[:4]:
        stage.report(piece(group_id, 0, [9]))
        tick(stage, now)
        now += answer_s
        stage.report(piece(group_id, 0, [STOP], offset=1))
        stage.reward(1.0)
        tick(stage, now)
    tick(stage, now + 4 * answer_s - 1)
    assert not stage.evaluations.results
    tick(stage, now + 4 * answer_s + 1)
    assert len(stage.evaluations.results) == 1


def test_an_overtaken_one_whose_rewards_take_long_is_not_sampled_again() -> None:
    stage = begun(6)
    for group_id in stage.questions:
        for index in range(stage.offered[group_id].rollout_count):
            stage.report(piece(group_id, index, [9, STOP], version=6))
    tick(stage, 0.0)
    publish(stage, 7, 8)
    tick(stage, 0.9 * PATIENCE_S)
    assert "evaluation of version 6" in stage.pool.evaluation_waits_for
    tick(stage, PATIENCE_S)
    assert "evaluation of version 8" in stage.pool.evaluation_waits_for


def test_what_a_barred_worker_answered_is_answered_again_by_others_also_after_a_kill() -> None:
    stage = begun()
    first, second, *others = stage.questions
    stage.answer(first, 1.0, BOB)
    stage.answer(second, 0.0, ALICE)
    stage.tell(stage.pool.accuse, BOB, "planted", is_certain=True)
    assert set(stage.questions) == {f"{first}r1", *others}
    stage.start()
    assert len(stage.prompts.due) == 1 and set(stage.questions) == {f"{first}r1", *others}, (
        "only ALICE's is scored again"
    )
    stage.reward(0.0)
    for group_id in stage.questions:
        stage.answer(group_id, 0.0)
    assert [result.reward for result in stage.evaluations.results] == [0.0]


def test_questions_open_at_once_are_bounded_and_all_turns_of_one_are_closed_with_it() -> None:
    stage = begun(0, (QuestionSet("large", OPEN_MAX + 40, 1),))
    for version in (5, 9):  # the newest of those due is next
        stage.tell(stage.pool.evaluate, Version(version), False)
    most, (root, *_) = 0, stage.questions
    stage.report(piece(root, 0, [9, STOP]))
    stage.reward(None, said=(7,))
    (turn,) = [group_id for group_id in stage.questions if group_id.startswith(f"{root}.")]
    stage.report(piece(turn, 0, [9, STOP]))
    stage.reward(1.0)
    assert not {root, turn} & set(stage.questions)
    while versions(stage) == {Version(0)}:
        most = max(most, len(stage.questions))
        stage.answer(stage.questions[0])
    assert most == OPEN_MAX and len(stage.answered) == OPEN_MAX + 40 and versions(stage) == {Version(9)}
    assert [result.tokens for result in stage.evaluations.results] == [2 * (OPEN_MAX + 40) + 2]


def test_answers_keep_their_journal_segment_until_their_evaluation_is_over() -> None:
    """Else a restart would have lost rollouts that their workers were told are admitted, once no open group is as old."""
    stage = begun(0, (QuestionSet("large", OPEN_MAX + 1, 1),))
    early = stage.questions
    train_a_step(stage)
    for group_id in early:
        stage.answer(group_id)
    train_a_step(stage)
    (late,) = stage.questions
    stage.start(kept=0)
    assert stage.questions == [late] and len(stage.prompts.due) == len(early)
    for _ in early:
        stage.reward(0.5)
    stage.answer(late, 0.5)
    assert [result.reward for result in stage.evaluations.results] == [0.5]


def train_a_step(stage: Stage) -> None:
    for group_id in [name for name in stage.offered if name not in stage.questions]:
        stage.fill(group_id)
    while stage.next_batch() is not None:
        stage.take_checkpoint()
