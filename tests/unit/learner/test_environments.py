"""Rollouts of several turns, from the world to the weights."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, RolloutSegment, SamplingParams, Verdict, VersionSpan
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Draw, Insertion, SentTokens, TrainGroup, TurnOf, root_of, turn_of
from echo2.learner.rollouts.prompts import Prompts
from echo2.learner.rollouts.selection import GroupRules
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.staleness.ledger import Ledger
from echo2.tasks.chat_format import ChatFormat
from echo2.tasks.rewards import RewardFailure
from tests.unit.learner.fleet import options_for
from tests.unit.learner.test_daemon import Run, crash_image, evaluations_of, go, prepared_from, rows_of
from tests.unit.learner.test_trainer import new_trainer
from tests.unit.learner.tiny import make_tiny_model

ECHOES = {"name": "tests.unit.learner.worlds:Echoes"}
ALICE, BOB = PeerId("alice"), PeerId("bob")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def new_groups(bound: int = 2) -> OpenGroups:
    return OpenGroups(GroupRules(bound, 2, 2, 100), Ledger(bound))


def finished(group_id: GroupId, index: int, tokens: tuple[int, ...], version: int = 0) -> RolloutSegment:
    logprobs = (-1.0,) * len(tokens)
    spans = (VersionSpan(Version(version), len(tokens)),)
    return RolloutSegment(group_id, index, 0, tokens, logprobs, logprobs, spans, FinishReason.STOP)


def opened(groups: OpenGroups) -> GroupId:
    return groups.open_group(Draw(0, 0, (5, 6), SamplingParams(max_new_tokens=8))).group_id


def test_turns_become_one_rollout_with_what_the_world_said_in_between() -> None:
    groups = new_groups()
    root = opened(groups)
    groups.receive(finished(root, 0, (10, 11)), 1, ALICE)
    groups.receive(finished(root, 1, (20,)), 1, ALICE)
    spec = groups.open_turn(TurnOf(root, 1, 0), (30, 31))
    assert spec is not None and spec.prompt_token_ids == (5, 6, 20, 30, 31) and spec.rollout_count == 1
    assert (root_of(spec.group_id), turn_of(spec.group_id, 0)) == (root, TurnOf(root, 1, 1))
    assert groups.in_flight_groups == 1 and groups.open_rollouts == 1 and groups.buffered_rollouts == 1
    assert [s.group_id for s in groups.incomplete_specs()] == [spec.group_id]
    assert groups.receive(finished(spec.group_id, 0, (21, 22)), 1, BOB).verdict is Verdict.ADMITTED
    groups.reward(root, 0, 1.0)
    assert not groups.is_batch_ready
    groups.reward(root, 1, 0.0)
    batch = groups.draw_batch()
    assert batch is not None and not groups.groups
    (group,) = batch.groups
    assert [r.token_ids for r in group.rollouts] == [(10, 11), (20, 21, 22)]
    assert group.insertions == ((), (Insertion(1, (30, 31)),)) and group.tokens_of(1) == 5
    assert group.senders == ((SentTokens(ALICE, 2),), (SentTokens(ALICE, 1), SentTokens(BOB, 2)))
    assert groups.counts.trained == 2 and groups.counts.trained_tokens == 5
    assert groups.receive(finished(spec.group_id, 0, (21, 22)), 1).verdict is Verdict.DUPLICATE


def test_a_stale_turn_closes_the_whole_group() -> None:
    groups = new_groups(bound=1)
    root = opened(groups)
    for index in range(2):
        groups.receive(finished(root, index, (10,)), 1)
    spec = groups.open_turn(TurnOf(root, 0, 0), (30,))
    assert spec is not None
    groups.next_step = Step(2)
    groups.publish(Version(1))
    assert groups.receive(finished(spec.group_id, 0, (9,), version=0), 1).verdict is Verdict.STALE
    assert not groups.groups and groups.open_turn(TurnOf(root, 1, 0), (30,)) is None
    closures = {c.group_id: c for c in groups.take_closures()}
    assert set(closures) == {root, spec.group_id} and closures[root].retry is not None
    assert closures[spec.group_id].retry is None


def test_the_worlds_tokens_are_read_and_not_trained_on(model_path: Path) -> None:
    group_id, spans = GroupId("g0"), (VersionSpan(Version(0), 5),)
    logprobs = (-4.0,) * 5
    rollouts = tuple(
        Rollout(group_id, i, tuple(range(10 + i, 15 + i)), logprobs, logprobs, spans, FinishReason.STOP)
        for i in range(2)
    )
    said = ((Insertion(2, (40, 41, 42)), Insertion(4, (43,))), ())
    spec = GroupSpec(group_id, (5, 6, 7), 2, SamplingParams(max_new_tokens=16), 0)
    group = TrainGroup(spec, 0, rollouts, (1.0, 0.0), said)
    trainer = new_trainer(model_path)
    whole = torch.tensor([[5, 6, 7, 10, 11, 40, 41, 42, 12, 13, 43, 14]])
    with torch.no_grad():
        logits = trainer.model.hf_model(input_ids=whole).logits[0].log_softmax(-1)
    expected = [logits[at - 1, whole[0, at]] for at in (3, 4, 8, 9, 11)]
    found = trainer.logprobs((group,))[0]
    assert torch.allclose(found, torch.stack(expected), atol=1e-4)
    result = trainer.step(Batch(Step(0), (group,)))
    assert result.sampled_tokens == 10 and result.metrics.token_count == 10
    again = batch_from_bytes(batch_to_bytes(Batch(Step(0), (group,))))
    assert again.groups[0].insertions == said


def test_a_chat_template_says_what_stands_between_two_turns(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    answer = tokenizer.encode("hi")
    said = [{"role": "tool", "content": "42"}]
    plain = ChatFormat(tokenizer).between(said, answer)
    assert tokenizer.decode(plain).replace(" ", "") == "\n42\n"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ended = ChatFormat(tokenizer).between(said, [*answer, tokenizer.eos_token_id])
    cut = ChatFormat(tokenizer).between(said, answer)
    assert cut[0] == tokenizer.eos_token_id and cut[1:] == ended
    assert tokenizer.decode(ended).replace(" ", "") == "[tool]42<eos>[assistant]"


def test_an_environment_trains_through_the_daemon(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, task=ECHOES))
    summary = go(run.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8 and summary.over_stale_tokens == 0
    rows = rows_of(tmp_path / "run")
    assert evaluations_of(tmp_path / "run")[-1]["eval/turns"] > 1
    assert any(row["reward/mean"] > 0 for row in rows[1:])
    turns = [turn_of(group_id, 0).turn for group_id in run.coordinator.offered]
    assert max(turns) == 2, "a third turn was leased"
    for group_id, spec in run.coordinator.groups.items():
        if turn_of(group_id, 0).turn:
            assert spec.rollout_count == 1 and len(spec.prompt_token_ids) > 8
    closed = {group_id for group_id, reason in run.coordinator.closed if reason == "complete"}
    assert any(turn_of(group_id, 0).turn for group_id in closed)


@pytest.mark.parametrize("at", [1, 3])
def test_after_a_kill_episodes_go_on_and_weights_are_bit_identical(model_path: Path, tmp_path: Path, at: int) -> None:
    def options(name: str) -> Any:
        return options_for(tmp_path / name, model_path, task=ECHOES, staleness={"bound": 4, "kappa": 2})

    run = Run(options("run"))
    image: dict[str, Any] = {}
    run.at_step[at] = lambda: image.update(crash_image(run, tmp_path / "crashed"))
    go(run.finish())
    shutil.copytree(tmp_path / "crashed", tmp_path / "again")
    again = prepared_from(options("crashed"))
    assert again.trainer.step_count == at
    for ours, theirs in zip(again.model.masters, image["masters"], strict=True):
        assert torch.equal(ours, theirs)
    second = Run(options("again"))
    summary = go(second.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8
    assert f"{second.follower.host.fingerprint():016x}" == summary.fingerprint


def test_an_episode_without_room_for_another_turn_is_worth_nothing(model_path: Path, tmp_path: Path) -> None:
    options = options_for(tmp_path, model_path, task={"name": "tests.unit.learner.worlds:Endless"})
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    prompts.context_tokens = 256
    try:
        going_on = asyncio.run(prompts.answer(0, [(10, 11)], 20))
        assert going_on.scored is None and len(going_on.said) > 12
        cut = asyncio.run(prompts.answer(0, [(10, 11)], 240)).scored
        assert cut is not None and cut.reward is not None and cut.reward.value == 0.0 and cut.reward.parts["cut"] == 1
    finally:
        prompts.close()


def test_what_an_environment_says_and_no_tokenizer_takes_costs_the_rollout_alone(
    model_path: Path, tmp_path: Path
) -> None:
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    model = Path(shutil.copytree(model_path, tmp_path / "model"))
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:1|11)+$"), behavior="isolated")
    core.save(str(model / "tokenizer.json"))
    options = options_for(tmp_path, model, task={"name": "tests.unit.learner.worlds:LongWords"})
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    try:
        scored = asyncio.run(prompts.answer(0, [(10, 11)], 20)).scored
        assert scored is not None and scored.reward is None and scored.failure is RewardFailure.RAISED
        assert "tokenizer: expected one that takes this text" in scored.message
    finally:
        prompts.close()
