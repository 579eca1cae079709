"""Agents' calls: leased like any other group, joined into chains token for token, trained on once, played again after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from echo2.base.ids import GroupId, Version
from echo2.base.rng import rollout_seed, turn_seed, uniforms
from echo2.base.rollout import Verdict, Work
from echo2.learner.audit import _uniforms_of
from echo2.learner.rollouts.admission import GroupRules
from echo2.learner.rollouts.evaluation import QuestionSet
from echo2.learner.rollouts.groups import Batch, evaluated_version
from echo2.learner.rollouts.journal import EpisodeScored
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from tests.unit.learner.stage import ALICE, GREEDY, SAMPLING, STOP, Stage, piece
from tests.unit.learner.test_trainer import new_trainer

ROOT = GroupId("a00000000")
RUN = replace(SAMPLING, temperature=1.0, top_p=0.9, seed=7)
SETS = (QuestionSet("held_out", 2, 1), QuestionSet("hard", 1, 3))


def new_stage(sets: tuple[QuestionSet, ...] = ()) -> Stage:
    return Stage(GroupRules(2, 2, 2, 100, is_driven=True), sets)


def call(
    stage: Stage, root: GroupId, chain: int | None, prompt: tuple[int, ...], temperature: float | None = None
) -> GroupId:
    group_id = stage.tell(stage.pool.open_call, root, chain, prompt, RUN, temperature)
    assert stage.offered[group_id].prompt_token_ids == prompt
    return GroupId(group_id)


def sample(stage: Stage, group_id: GroupId, *tokens: int, version: int = 0) -> None:
    assert stage.report(piece(group_id, 0, tokens, version=version), attempt=1) == [Verdict.ADMITTED]
    assert stage.sampled[-1].token_ids == tokens and not stage.prompts.due, "the agent or its task gives the reward"


def end(stage: Stage, root: GroupId, chains: dict[int, int], reward: float | None, *, is_final: bool = True) -> None:
    parts = {"steps": 2.0} if reward is not None else {}
    stage.tell(stage.pool.end_episode, root, chains, reward, parts, is_final=is_final)


def play(stage: Stage, root: GroupId, version: int = 0, calls: int = 2) -> int:
    """The calls of one episode, one behind the other; returns its chain."""
    chain: int | None = None
    prompt = (5, 6)
    for _ in range(calls):
        group_id = call(stage, root, chain, prompt)
        chain = int(group_id.split(".")[1])
        sample(stage, group_id, 9, STOP, version=version)
        prompt = (*prompt, 9, STOP, 7)
    assert chain is not None
    return chain


def played() -> Stage:
    """Two seats: the first with two turns and a branch, the second lost once and then whole."""
    stage = new_stage()
    sample(stage, call(stage, ROOT, None, (5, 6, 7)), 10, 11, 1)
    sample(stage, call(stage, ROOT, 0, (5, 6, 7, 10, 11, 1, 8)), 12, 1)
    sample(stage, call(stage, ROOT, None, (5, 6, 9)), 13, 1)
    sample(stage, call(stage, ROOT, None, (5, 6, 4)), 20, 1)
    end(stage, ROOT, {2: 1}, None, is_final=False)
    sample(stage, call(stage, ROOT, None, (5, 6, 4)), 21, 1)
    abandoned = call(stage, ROOT, 3, (5, 6, 4, 21, 1, 30))
    end(stage, ROOT, {0: 2, 1: 1}, 1.0)
    assert stage.next_batch() is None
    end(stage, ROOT, {3: 1}, 0.0)
    assert (abandoned, "unused") in stage.closed
    return stage


def batch_of(stage: Stage) -> Batch:
    batch = stage.next_batch()
    assert batch is not None
    return batch


def test_calls_become_chains_that_are_trained_on_token_for_token() -> None:
    (group,) = batch_of(played()).groups
    assert group.spec.prompt_token_ids == (5, 6), "what all chains begin with"
    assert [r.index for r in group.rollouts] == [0, 1, 3] and group.rewards == (1.0, 1.0, 0.0)
    assert [r.token_ids for r in group.rollouts] == [(10, 11, 1, 12, 1), (13, 1), (21, 1)]
    texts = [group.text_of(index) for index in range(3)]
    assert texts[0] == ([7, 10, 11, 1, 8, 12, 1], [1, 2, 3, 5, 6])
    assert texts[1] == ([9, 13, 1], [1, 2]) and texts[2] == ([4, 21, 1], [1, 2])
    assert all(r.group_id == ROOT for r in group.rollouts) and group.senders[0][0].peer_id == ALICE


def test_a_call_that_goes_on_is_told_as_it_grows() -> None:
    stage = new_stage()
    group_id = call(stage, ROOT, None, (5, 6))
    for offset, tokens in ((0, (10,)), (1, (11, 12)), (3, (1,))):
        stage.report(piece(group_id, 0, tokens, offset))
    assert [rollout.token_ids for rollout in stage.grown] == [(10,), (10, 11, 12)]
    assert [rollout.token_ids for rollout in stage.sampled] == [(10, 11, 12, 1)]


def test_audits_know_the_random_numbers_of_every_call() -> None:
    (group,) = batch_of(played()).groups
    seed = group.spec.sampling.seed
    seeds = [rollout_seed(turn_seed(seed, 0, depth), 0) for depth in (1, 2)]
    found = _uniforms_of(group.rollouts[0], seed, group.insertions[0])
    assert found.tolist() == [*uniforms(seeds[0], 3).tolist(), *uniforms(seeds[1], 2).tolist()]


def test_a_journal_gives_the_same_batch_again_and_unfinished_episodes_are_drawn_again() -> None:
    stage = played()
    stage.start()  # whole episodes wait with their rewards
    before, _ = stage.restored()
    batch = batch_of(stage)
    (group,) = batch.groups
    assert before.draw_batch() == batch and stage.restored()[0].next_step == 1
    assert batch_from_bytes(batch_to_bytes(batch)).groups[0].insertions == group.insertions
    stage = played()
    ends = [number for number, (_, record) in enumerate(stage.journal.records) if isinstance(record, EpisodeScored)]
    del stage.journal.records[ends[-1]]
    stage.start()
    assert ROOT not in stage.pool.groups.groups and f"{ROOT}r1" in stage.driven


def test_chains_without_a_common_beginning_train(model_path: Path) -> None:
    stage = new_stage()
    for number in range(2):
        sample(stage, call(stage, ROOT, None, (5 + number, 6, 7)), 10 + number, 11, 1)
        end(stage, ROOT, {number: 1}, float(number))
    batch = batch_of(stage)
    assert batch.groups[0].spec.prompt_token_ids == ()
    trainer = new_trainer(model_path)
    whole = torch.tensor([[6, 6, 7, 11, 11, 1]])
    with torch.no_grad():
        logits = trainer.model.hf_model(input_ids=whole).logits[0].log_softmax(-1)
    expected = torch.stack([logits[at - 1, whole[0, at]] for at in (3, 4, 5)])
    assert torch.allclose(trainer.logprobs(batch.groups)[1], expected, atol=1e-4)
    assert trainer.step(batch).sampled_tokens == 6


# ---- evaluations: held-out problems played by the same agents, of one version, lost episodes left out


def evaluated() -> Stage:
    stage = new_stage(SETS)
    stage.tell(stage.pool.evaluate, Version(0), False)
    return stage


def problems(stage: Stage) -> list[GroupId]:
    return [name for name in stage.driven if evaluated_version(name) is not None]


def test_held_out_problems_are_played_by_one_version_and_none_is_trained_on() -> None:
    stage = evaluated()
    one, two, hard = problems(stage)
    assert [stage.driven[name].rollout_count for name in (one, two, hard)] == [1, 1, 3]
    group_id = call(stage, one, None, (5, 6), 0.7)
    leased, run = stage.offered[group_id], stage.offered[call(stage, ROOT, None, (5, 6), 0.7)].sampling
    assert (leased.work, leased.exact_version) == (Work.EVALUATE, Version(0)), "workers at that very version alone"
    assert (leased.sampling.temperature, leased.sampling.top_p) == (0.7, GREEDY.top_p), "the agent may choose the first"
    assert leased.sampling.max_new_tokens == RUN.max_new_tokens and leased.sampling.seed != RUN.seed
    assert run.temperature == SAMPLING.temperature, "in training not even that"
    assert stage.offered[call(stage, two, None, (5, 6))].sampling.temperature == 0.0, "else as evaluations sample"
    stage.tell(stage.pool.on_published, Version(1))
    assert stage.report(piece(group_id, 0, [9, STOP], version=1)) == [Verdict.REFUSED]
    sample(stage, group_id, 9, STOP)
    end(stage, one, {0: 1}, 1.0)
    end(stage, two, {0: 0, play(stage, two): 2}, 0.0)
    for reward in (1.0, 0.0, 1.0):
        end(stage, hard, {play(stage, hard): 2}, reward)
    (result,) = stage.evaluations.results
    assert [each.rewards for each in result.sets] == [((1.0,), (0.0,)), ((1.0, 0.0, 1.0),)]
    row = result.row(1.0)
    assert row["eval/rollouts"] == 5 and row["eval/lost_episodes"] == 0 and row["eval/hard/steps"] == 2.0
    assert not problems(stage) and stage.pool.groups.ledger.histogram() == {} and stage.pool.groups.counts.admitted == 0


def test_a_lost_episode_is_left_out_and_not_worth_nothing_and_two_chains_of_one_count_once() -> None:
    stage = evaluated()
    one, two, hard = problems(stage)
    end(stage, one, {play(stage, one): 2}, None, is_final=False)  # broke, and is begun anew
    end(stage, one, {play(stage, one): 2, play(stage, one): 2}, 1.0)
    end(stage, two, {play(stage, two): 2}, None)  # lost for good
    for reward in (1.0, None, 0.0):
        end(stage, hard, {play(stage, hard): 2}, reward)
    (result,) = stage.evaluations.results
    assert [(each.name, each.rewards) for each in result.sets] == [("held_out", ((1.0,),)), ("hard", ((1.0, 0.0),))]
    assert result.lost == 2 and result.row(1.0)["eval/lost_episodes"] == 2


def test_an_evaluation_whose_episodes_are_all_lost_is_given_up_and_says_why() -> None:
    stage = evaluated()
    for root in problems(stage):
        for _ in range(stage.driven[root].rollout_count):
            end(stage, root, {}, None)
    (result,) = stage.evaluations.results
    assert not result.sets and result.reason == "all 5 episodes of agents were lost"


def test_agents_play_again_after_a_restart_under_other_names() -> None:
    """A worker that still samples for an episode of before cannot add to one of now."""
    stage = evaluated()
    before = problems(stage)
    end(stage, before[0], {play(stage, before[0]): 2}, 1.0)
    open_call = play(stage, before[1], calls=1)
    stage.start()
    assert len(problems(stage)) == 3 and not set(problems(stage)) & set(before)
    assert stage.report(piece(f"{before[1]}.{open_call}.1", 0, [9, STOP])) == [Verdict.CLOSED]
    for root in problems(stage):
        for _ in range(stage.driven[root].rollout_count):
            end(stage, root, {play(stage, root): 2}, 0.5)
    assert stage.evaluations.results[-1].reward == 0.5


def test_what_a_barred_worker_sampled_is_played_again() -> None:
    stage = evaluated()
    before = problems(stage)
    end(stage, before[0], {play(stage, before[0]): 2}, 1.0)
    play(stage, before[1])
    stage.tell(stage.pool.accuse, ALICE, "planted", is_certain=True)
    assert len(problems(stage)) == 3 and len(set(problems(stage)) - set(before)) == 2
