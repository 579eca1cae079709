"""Rollouts of several turns, and several tasks in one run, from the world to the weights."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.rollouts.evaluation import Evaluations
from echo2.learner.rollouts.groups import Batch, Insertion, TrainGroup, turn_of
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.tasks.registry import make_task
from echo2.tasks.rewards import RewardFailure
from echo2.tasks.split import TaskSplit
from echo2.tasks.task import TaskSpec
from tests.unit.learner.fleet import (
    Run,
    crash_image,
    evaluations_of,
    go,
    options_for,
    prepared_from,
    prompts_for,
    rows_of,
)
from tests.unit.learner.test_trainer import new_trainer

WORLDS = "tests.unit.learner.worlds:"
MIXTURE: dict[str, dict[str, Any]] = {
    "echoes": {"task": f"{WORLDS}Echoes", "weight": 2.0, "eval_prompts": 3},
    "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 2},
}


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
    assert torch.allclose(trainer.logprobs((group,))[0], torch.stack(expected), atol=1e-4)
    result = trainer.step(Batch(Step(0), (group,)))
    assert result.sampled_tokens == 10 and sum(result.left_out) == 0
    again = batch_from_bytes(batch_to_bytes(Batch(Step(0), (group,))))
    assert again.groups[0].insertions == said


def test_an_episode_without_room_for_another_turn_is_worth_nothing(model_path: Path, tmp_path: Path) -> None:
    prompts = prompts_for(options_for(tmp_path, model_path, task={"name": f"{WORLDS}Endless"}))
    prompts.context_tokens = 256
    going_on = asyncio.run(prompts.answer(0, [(10, 11)], 20))
    assert going_on.scored is None and len(going_on.said) > 12
    assert prompts.sampling.max_new_tokens == 6, "the room that the next turn needs"
    cut = asyncio.run(prompts.answer(0, [(10, 11)], 256 - 6 - len(going_on.said))).scored
    assert cut is not None and cut.reward is not None and cut.reward.value == 0.0 and cut.reward.parts["cut"] == 1
    prompts.close()


def test_what_an_environment_says_and_no_tokenizer_takes_costs_the_rollout_alone(
    model_path: Path, tmp_path: Path
) -> None:
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    model = Path(shutil.copytree(model_path, tmp_path / "model"))
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:1|11)+$"), behavior="isolated")
    core.save(str(model / "tokenizer.json"))
    prompts = prompts_for(options_for(tmp_path, model, task={"name": f"{WORLDS}LongWords"}))
    scored = asyncio.run(prompts.answer(0, [(10, 11)], 20)).scored
    assert scored is not None and scored.reward is None and scored.failure is RewardFailure.RAISED
    assert "tokenizer: expected one that takes this text" in scored.message
    prompts.close()


# ---- mixtures


def mixed(folder: Path, model: Path, mixture: dict[str, dict[str, Any]] | None = None, **task: object) -> Any:
    task = {"name": "sort_digits", "mixture": MIXTURE if mixture is None else mixture, **task}
    return options_for(folder, model, task=task, staleness={"bound": 4, "kappa": 2}, turns_max=3)


def test_prompts_come_by_weight_and_are_answered_by_their_own_task(tmp_path: Path, model_path: Path) -> None:
    mixture: dict[str, dict[str, Any]] = {
        "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "weight": 3.0, "eval_prompts": 0},
        "sums": {"task": "sums", "eval_prompts": 0},
    }
    options = mixed(tmp_path, model_path, mixture)
    prompts = prompts_for(options)
    alone = {
        name: make_task(TaskSpec(entry.task, entry.args, prompts.seed))
        for name, entry in options.config.task.mixture.items()
    }
    assert Counter(prompts.task_of(cursor) for cursor in range(40)) == {"digits": 30, "sums": 10}
    seen = Counter[str]()
    for cursor in range(12):
        name = prompts.task_of(cursor)
        instance = prompts.instance(prompts.split.train_index(cursor))
        task = alone[name]
        own = task.sample(TaskSplit(task.size, 0, prompts.seed).train_index(seen[name]))
        seen[name] += 1
        assert (instance.prompt, instance.answer) == (own.prompt, own.answer)
        right = tuple(prompts.tokenizer.encode(own.answer))
        scored = asyncio.run(prompts.answer(cursor, [right], 10)).scored
        assert scored is not None and scored.reward is not None
        assert scored.reward.value == task.score(own, prompts.text_of(right)).value
    prompts.close()


def test_each_task_has_its_set_of_held_out_prompts_under_a_name_of_its_own(tmp_path: Path, model_path: Path) -> None:
    options = mixed(tmp_path, model_path)
    prompts = prompts_for(options)
    evaluations = Evaluations(tmp_path, options.config, prompts, 60.0)
    assert [(one.name, one.questions) for one in evaluations.rules.sets] == [("echoes", 3), ("digits", 2)]
    asked = [evaluations.draw(Version(0), number).prompt_token_ids for number in range(5)]
    assert asked == [prompts.tokens_of(prompts.held_out(place)) for place in range(5)]
    held_out = [prompts.split.held_out_index(place) for place in range(5)]
    assert [index % 2 for index in held_out] == [0, 0, 0, 1, 1]
    assert not set(held_out) & {prompts.split.train_index(cursor) for cursor in range(200)}
    evaluations.close()
    same_name = mixed(tmp_path, model_path, eval_sets={"echoes": {"task": "sort_digits", "prompts": 4}})
    with pytest.raises(ConfigError, match="names that differ, none called held_out or as a task of the mixture"):
        Evaluations(tmp_path, same_name.config, prompts, 60.0)
    prompts.close()


def test_a_mixture_with_an_environment_trains_and_a_killed_run_goes_on_with_the_same_prompts_and_episodes(
    model_path: Path, tmp_path: Path
) -> None:
    run = Run(mixed(tmp_path / "run", model_path))
    image: dict[str, Any] = {}
    run.at_step[3] = lambda: image.update(crash_image(run, tmp_path / "crashed"))
    summary = go(run.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8 and summary.over_stale_tokens == 0
    groups = Counter[str]()
    for row in rows_of(tmp_path / "run")[1:]:
        told = [name for name in MIXTURE if f"task/{name}/groups" in row]
        assert told and all(f"task/{name}/reward" in row for name in told)
        groups.update({name: row[f"task/{name}/groups"] for name in told})
        groups["all"] += row["groups"]
    assert groups["echoes"] + groups["digits"] == groups["all"] and groups["echoes"] > 0
    for row in evaluations_of(tmp_path / "run"):
        assert {"eval/echoes/reward", "eval/echoes/turns", "eval/digits/reward"} <= row.keys()
    offered = run.coordinator.groups
    later = {name: spec for name, spec in offered.items() if turn_of(name, 0).turn}
    assert max(turn_of(name, 0).turn for name in later) == 2, "a third turn was leased"
    assert all(spec.rollout_count == 1 and len(spec.prompt_token_ids) > 8 for spec in later.values())
    assert later.keys() & {name for name, reason in run.coordinator.closed if reason == "complete"}

    shutil.copytree(tmp_path / "crashed", tmp_path / "again")
    prepared = prepared_from(mixed(tmp_path / "crashed", model_path))
    assert prepared.trainer.step_count == 3
    for ours, theirs in zip(prepared.model.masters, image["masters"], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(ours, theirs)
    second = Run(mixed(tmp_path / "again", model_path))
    summary = go(second.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8
    assert f"{second.follower.host.fingerprint():016x}" == summary.fingerprint
    shared = {name for name in offered.keys() & second.coordinator.groups.keys() if name not in later}
    assert shared and all(
        second.coordinator.groups[name].prompt_token_ids == offered[name].prompt_token_ids for name in shared
    )
    changed = MIXTURE | {"digits": MIXTURE["digits"] | {"weight": 5.0}}
    with pytest.raises(StateError, match="mixture"):
        prepared_from(mixed(tmp_path / "again", model_path, changed))
