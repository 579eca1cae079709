"""Several tasks in one run: prompts by weight, answers by their own task, an evaluation set and a curve for each."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import Version
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.evaluation import Evaluations
from echo2.learner.rollouts.prompts import Prompts
from echo2.tasks.registry import make_task
from echo2.tasks.split import MixedSplit, TaskSplit
from echo2.tasks.task import TaskSpec
from tests.unit.learner.fleet import options_for
from tests.unit.learner.test_daemon import Run, crash_image, evaluations_of, go, rows_of
from tests.unit.learner.tiny import make_tiny_model

Mixture = dict[str, dict[str, object]]
TWO: Mixture = {
    "share": {"task": "tests.unit.learner.worlds:DigitShare", "weight": 2.0, "eval_prompts": 3},
    "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def mixed(folder: Path, model: Path, mixture: Mixture = TWO, **task: object) -> LearnerOptions:
    return options_for(folder, model, task={"name": "sort_digits", "mixture": mixture, **task})


def test_prompts_come_by_weight_and_are_answered_by_their_own_task(tmp_path: Path, model: Path) -> None:
    mixture: Mixture = {
        "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "weight": 3.0, "eval_prompts": 0},
        "sums": {"task": "sums", "eval_prompts": 0},
    }
    options = mixed(tmp_path, model, mixture)
    prompts = Prompts(options, 100, [1])
    alone = {
        name: make_task(TaskSpec(entry.task, entry.args, prompts.seed))
        for name, entry in options.config.task.mixture.items()
    }
    assert Counter(prompts.task_of(cursor) for cursor in range(40)) == {"digits": 30, "sums": 10}
    seen = Counter[str]()
    for cursor in range(12):
        name = prompts.task_of(cursor)
        instance = prompts.world.instance(prompts.split.train_index(cursor))
        task = alone[name]
        own = task.sample(TaskSplit(task.size, 0, prompts.seed).train_index(seen[name]))
        seen[name] += 1
        assert (instance.prompt, instance.answer) == (own.prompt, own.answer)
        right = tuple(prompts.tokenizer.encode(own.answer))
        scored = asyncio.run(prompts.answer(cursor, [right], 10)).scored
        assert scored is not None and scored.reward is not None
        assert scored.reward.value == task.score(own, prompts.text_of(right)).value
    prompts.close()


def test_one_task_alone_is_called_nothing(tmp_path: Path, model: Path) -> None:
    prompts = Prompts(options_for(tmp_path, model), 100, [1])
    assert prompts.task_of(3) == "" and prompts.held_out_counts == (("", 4),)
    prompts.close()


def test_each_task_has_its_set_of_held_out_prompts(tmp_path: Path, model: Path) -> None:
    options = mixed(tmp_path, model)
    prompts = Prompts(options, 100, [1])
    evaluations = Evaluations(tmp_path, options.config, prompts, 60.0)
    assert [(one.name, one.questions) for one in evaluations.rules.sets] == [("share", 3), ("digits", 2)]
    split = prompts.split
    assert isinstance(split, MixedSplit)
    asked = [evaluations.draw(Version(0), number).prompt_token_ids for number in range(5)]
    held_out = [prompts.tokens_of(prompts.held_out(place)) for place in range(5)]
    assert asked == held_out
    assert [split.held_out_index(place) % 2 for place in range(5)] == [0, 0, 0, 1, 1]
    trained = {split.train_index(cursor) for cursor in range(200)}
    assert not trained & {split.held_out_index(place) for place in range(5)}
    evaluations.close()
    prompts.close()


def test_a_further_set_may_not_have_the_name_of_a_task_of_the_mixture(tmp_path: Path, model: Path) -> None:
    options = mixed(tmp_path, model, eval_sets={"share": {"task": "sort_digits", "prompts": 4}})
    prompts = Prompts(options, 100, [1])
    with pytest.raises(ConfigError, match="names that differ, none called held_out or as a task of the mixture"):
        Evaluations(tmp_path, options.config, prompts, 60.0)
    prompts.close()


def test_a_run_tells_how_each_task_fares_and_a_killed_one_goes_on_with_the_same_prompts(
    model: Path, tmp_path: Path
) -> None:
    run = Run(mixed(tmp_path / "run", model))
    run.at_step[3] = lambda: crash_image(run, tmp_path / "crashed")
    go(run.finish())
    rows = rows_of(tmp_path / "run")[1:]
    assert all({"task/share/groups", "task/digits/groups"} & row.keys() for row in rows), "whichever the batch has"
    assert all(
        f"task/{name}/reward" in row for row in rows for name in ("share", "digits") if f"task/{name}/groups" in row
    )
    groups = Counter[str]()
    for row in rows:
        for name in ("share", "digits"):
            groups[name] += row.get(f"task/{name}/groups", 0)
    assert sum(groups.values()) == sum(row["groups"] for row in rows) and groups["share"] > 0
    for row in evaluations_of(tmp_path / "run"):
        assert row["eval/rollouts"] == 5 and {"eval/share/reward", "eval/digits/reward"} <= row.keys()
    again = Run(mixed(tmp_path / "crashed", model))
    summary = go(again.finish())
    assert summary.is_finished
    opened = {number: spec.prompt_token_ids for number, spec in run.coordinator.groups.items()}
    shared = opened.keys() & again.coordinator.groups.keys()
    assert shared and all(again.coordinator.groups[number].prompt_token_ids == opened[number] for number in shared)
    changed = TWO | {"digits": TWO["digits"] | {"weight": 5.0}}
    with pytest.raises(StateError, match="mixture"):
        go(Run(mixed(tmp_path / "crashed", model, changed)).finish())
