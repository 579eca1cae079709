"""Makes tasks and environments from their specifications: the built-in ones by name, a user's own as `module:Class`.

Guarantees: the same specification makes the same task in every process; wrong names and arguments are `ConfigError`s that list
what was expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from echo2.base.errors import ConfigError, EchoError, TaskError
from echo2.base.units import described, imported
from echo2.tasks.built_in import DEFAULT_SIZE, OpenEnvTask, ReasoningGym, SortDigits, Sums
from echo2.tasks.data_files import ColumnChoice, local_data_set, read_math_rows
from echo2.tasks.mathematics import MathTask
from echo2.tasks.task import EnvironmentSource, Task, TaskInstance, TaskSpec
from echo2.tasks.tools import CalculatorEnvironments
from echo2.tasks.verifiers_task import SIZE_MAX, VerifiersTask

_TASK_MEMBERS = ("name", "size", "is_cheap", "sample", "score")  # what a class of a user must have to be a Task
_SOURCE_MEMBERS = ("name", "size", "open")  # what it must have to be an EnvironmentSource


def make_task(spec: TaskSpec) -> Task:
    """Makes the task that `spec` describes. Raises `ConfigError` for an unknown name or argument."""
    if is_environment(spec):
        raise ConfigError(f"task {spec.name}: expected a task of one completion, got an environment of several turns")
    return cast(Task, _make(spec, _BUILT_IN, _TASK_MEMBERS))


def make_environment_source(spec: TaskSpec) -> EnvironmentSource:
    """Makes the source of environments that `spec` describes. Raises `ConfigError` for an unknown name or argument."""
    if not is_environment(spec):
        raise ConfigError(f"task {spec.name}: expected an environment of several turns, got a task of one completion")
    return cast(EnvironmentSource, _make(spec, _BUILT_IN_ENVIRONMENTS, _SOURCE_MEMBERS))


def _make(spec: TaskSpec, built_in: Mapping[str, Callable[..., Any]], members: Sequence[str]) -> object:
    instance = _users_own(spec, members) if is_users_own(spec) else _built_in(spec, built_in[spec.name])
    if not (instance.size is None or (isinstance(instance.size, Integral) and int(instance.size) > 0)):
        raise TaskError(
            f"task {spec.name}: expected size to be a number of prompts above 0, or None for no end, got {instance.size!r:.80}"
        )
    return instance


def _built_in(spec: TaskSpec, maker: Callable[..., Any]) -> Any:
    parameters = inspect.signature(maker).parameters
    known = [name for name in parameters if name != "seed"]
    unknown = sorted(set(spec.args) - set(known))
    if unknown:
        raise ConfigError(
            f"task {spec.name}: expected arguments among {', '.join(known) or 'none'}; got {', '.join(unknown)}"
        )
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and not spec.args.get(name):
            raise ConfigError(f"task {spec.name}: expected the argument {name}, {_NEEDED[name]}")
    try:
        return maker(seed=spec.seed, **spec.args)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"task {spec.name}: expected other kinds of arguments, got {dict(spec.args)}: {error}"
        ) from error


def is_environment(spec: TaskSpec) -> bool:
    """Whether `spec` names environments (several turns) and not a task (one completion). `ConfigError` if it names none."""
    if is_users_own(spec):
        return hasattr(imported(spec.name, "task.name"), "open")
    names = (*_BUILT_IN, *_BUILT_IN_ENVIRONMENTS)
    if spec.name not in names:
        raise ConfigError(
            f"task.name: expected one of {', '.join(names)} or a class of yours as module:Class, got {spec.name!r}"
        )
    return spec.name in _BUILT_IN_ENVIRONMENTS


def turns_of(spec: TaskSpec) -> int:
    """Returns the most completions of one episode: the argument `turns_max`, or its default; 1 for a task."""
    if not is_environment(spec):
        return 1
    maker = imported(spec.name, "task.name") if is_users_own(spec) else _BUILT_IN_ENVIRONMENTS[spec.name]
    default = inspect.signature(maker).parameters.get("turns_max")
    turns = spec.args.get("turns_max", default.default if default is not None else 1)
    if isinstance(turns, int) and turns >= 1:
        return turns
    if "turns_max" in spec.args:
        raise ConfigError(f"task {spec.name}: expected turns_max to be a whole number of at least 1, got {turns!r:.80}")
    return 1


def is_users_own(spec: TaskSpec) -> bool:
    """Whether `spec` names a user's own class, not a built-in one."""
    return ":" in spec.name


def _math(
    seed: int, path: str, split: str = "train", prompt_column: str = "", answer_column: str = "", subset: str = ""
) -> Task:
    rows = read_math_rows(local_data_set(path), split, ColumnChoice(prompt_column, answer_column), subset)
    return MathTask(rows, f"math/{Path(path).name}")


# Name in the run file, and what makes the task of its arguments.
_BUILT_IN: Mapping[str, Callable[..., Task]] = {
    "sort_digits": lambda seed, digit_count=5: SortDigits(digit_count),
    "sums": lambda seed, numbers=10: Sums(numbers),
    "reasoning_gym": lambda seed, dataset, size=DEFAULT_SIZE, options=None: ReasoningGym(dataset, seed, size, options),
    "math": _math,
    "verifiers": lambda seed, taskset, options=None, size=SIZE_MAX, agent=None: VerifiersTask(
        taskset, options or {}, size, agent
    ),
    "openenv": lambda seed, url, instructions="", size=SIZE_MAX, turns=16, reset=None: OpenEnvTask(
        url, instructions, size, turns, reset or {}
    ),
}
# What is told of an argument that a task cannot do without.
_NEEDED = {
    "dataset": "such as dataset=number_sorting",
    "path": "a .jsonl or .parquet file, a data set's folder or hub id",
    "url": "of a running OpenEnv server, such as ws://127.0.0.1:8000",
    "taskset": "the name of an installed taskset",
}


# As _BUILT_IN, for several turns.
_BUILT_IN_ENVIRONMENTS: Mapping[str, Callable[..., EnvironmentSource]] = {"calculator": CalculatorEnvironments}


def _users_own(spec: TaskSpec, members: Sequence[str]) -> Any:
    maker = imported(spec.name, "task.name")
    try:
        instance = maker(seed=spec.seed, **spec.args)
    except (EchoError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = described(error)
        raise ConfigError(
            f"task {spec.name}: expected a constructor (seed, **args) that takes task.args, got {what}"
        ) from error
    missing = [member for member in members if not hasattr(instance, member)]
    if missing:
        raise TaskError(f"task {spec.name}: expected the members {', '.join(members)}, missing {', '.join(missing)}")
    return instance


def drawn(task: str, call: Callable[[int], TaskInstance], index: int) -> TaskInstance:
    """The instance that `call` makes. Raises `TaskError` for whatever else a user's own code does."""
    name = getattr(call, "__name__", "sample")
    expected = f"task {task}: expected an instance from {name}({index})"
    try:
        instance = call(index)
    except (EchoError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskError(f"{expected}, got {described(error)}") from error
    if not isinstance(instance, TaskInstance):
        raise TaskError(f"{expected}, got {instance!r:.80}")
    return instance
