"""The registry: built-in names, a user's class, and errors that say what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.registry import is_environment, make_environment_source, make_task
from echo2.tasks.task import TaskSpec

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec("chess"), "expected one of sort_digits, .* or a class of yours as module:Class, got 'chess'"),
        (TaskSpec("calculator"), "expected a task of one completion, got an environment of several turns"),
        (TaskSpec("sort_digits", {"digits": 3}), "expected arguments among digit_count; got digits"),
        (TaskSpec("math"), "expected the argument path"),
        (TaskSpec("reasoning_gym"), "expected the argument dataset"),
        (TaskSpec("no.such.module:Task"), "expected an importable module no.such.module, got No module named 'no'"),
        (
            TaskSpec("no_such:Task"),
            "got No module named 'no_such'; a module is looked for beside the run file and among",
        ),
        (TaskSpec("unfinished:Task"), r"module unfinished, got SyntaxError: .*\(unfinished.py, line 2\)$"),
        (
            TaskSpec("undefined:Task"),
            r"module undefined, got NameError: name 'no' is not defined \(undefined.py, line 1\)$",
        ),
        (TaskSpec("tests.unit.tasks.naughty:Absent"), "expected a function or class Absent"),
        (TaskSpec("tests.unit.tasks.naughty:Naughty", {"colour": 1}), r"expected a constructor \(seed, \*\*args\)"),
    ],
)
def test_a_wrong_specification_is_a_configuration_error(
    spec: TaskSpec, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfinished.py").write_text("class Task:\n    size = (")
    (tmp_path / "undefined.py").write_text("size = no")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_task(spec)


def test_a_class_that_is_no_task_is_told_what_it_lacks() -> None:
    with pytest.raises(TaskError, match="missing size, is_cheap, sample, score"):
        make_task(TaskSpec("tests.unit.tasks.naughty:NotATask"))


def test_environments_are_made_by_name_and_told_apart_from_tasks() -> None:
    spec = TaskSpec("calculator", {"turns_max": 2}, seed=3)
    assert is_environment(spec) and not is_environment(TaskSpec("sort_digits"))
    assert not is_environment(TaskSpec("tests.unit.tasks.naughty:Naughty"))
    users_own = TaskSpec("echo2.tasks.tools:CalculatorEnvironments", {"turns_max": 2}, seed=3)
    assert is_environment(users_own)
    assert make_environment_source(spec) == make_environment_source(users_own)
    with pytest.raises(ConfigError, match="expected one of sort_digits, .*calculator"):
        make_environment_source(TaskSpec("maze"))
    with pytest.raises(ConfigError, match="arguments among turns_max; got turns"):
        make_environment_source(TaskSpec("calculator", {"turns": 2}))


def test_the_example_of_a_users_task_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    task = make_task(TaskSpec("palindromes:Palindromes", {"letters": 3}, seed=1))
    instance = task.sample(4)
    beginning = instance.answer
    assert task.sample(4) == instance and len(beginning) == 3
    assert task.score(instance, beginning + beginning[::-1]).value == 1.0
    assert task.score(instance, "x" + beginning).value == 0.0
