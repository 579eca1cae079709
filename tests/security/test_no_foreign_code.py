"""Nothing that comes from a peer is ever executed: by reading the sources, and by trying."""

import ast
import contextlib
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from echo2.base.errors import ConfigError, EchoError
from echo2.tasks.built_in import EXECUTING_DATA_SETS, SortDigits
from echo2.tasks.rewards import Containment, make_scorer
from echo2.tasks.task import TaskSpec
from tests.fuzz_targets import TARGETS
from tests.security.executing_scorers import executing_data_sets

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
# The one place where a text from outside is executed: in a fork, under limits and a filter, within the containment.
EXECUTES = ROOT / "echo2" / "contain" / "program_inside.py"
# Dependencies that see completions, and in which of echo2's modules they may be imported.
# Runs a library's agents and rewards with the learner's rights; refused unless the operator says so (task.trusted_rewards).
TRUSTED_PLAYER = "echo2/gateway/verifiers_agent.py"
SEE_COMPLETIONS = {
    "reasoning_gym": {"echo2/tasks/built_in.py"},
    "math_verify": {"echo2/tasks/mathematics.py"},
    "verifiers": {"echo2/tasks/verifiers_task.py", TRUSTED_PLAYER},
    "sympy": set[str](),
    "latex2sympy2_extended": set[str](),
}


SOURCES = sorted((ROOT / "echo2").rglob("*.py"))
OURS = [path for path in SOURCES if "gen" not in path.parts]
"""Without the generated stubs."""


@cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def test_sources_load_no_code_from_data() -> None:
    assert len(OURS) > 200
    for path in SOURCES:
        for node in nodes_of(path) if path != EXECUTES else ():
            where = f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert not MODULES & {alias.name.split(".")[0] for alias in node.names}, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES, where
            elif isinstance(node.func, ast.Name):
                assert node.func.id not in CALLS, where
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                assert ast.unparse(node.func.value) not in ("torch", "np", "numpy", "yaml"), where


def test_programs_are_executed_in_one_module_that_nothing_imports() -> None:
    assert EXECUTES.exists()
    for path in OURS:
        assert not any(name.startswith("echo2.contain.program_inside") for name in imported(path)), path


@pytest.mark.parametrize("package", SEE_COMPLETIONS)
def test_dependencies_that_see_completions_are_used_where_they_are_contained(package: str) -> None:
    """They are imported by tasks alone, none of which says that it is cheap; such tasks are scored in the pool only."""
    using = [path for path in OURS if any(name.partition(".")[0] == package for name in imported(path))]
    users = {str(path.relative_to(ROOT)) for path in using}
    assert users == SEE_COMPLETIONS[package]
    for user in users - {TRUSTED_PLAYER}:
        names = {"reasoning_gym": "ReasoningGym"}.get(package, "")
        classes = [node for node in ast.walk(ast.parse((ROOT / user).read_text())) if isinstance(node, ast.ClassDef)]
        tasks = [node for node in classes if node.name.startswith(names)]
        texts = [ast.unparse(node) for task in tasks for node in task.body]
        assert [text for text in texts if "is_cheap" in text.split(" = ")[0]] == ["is_cheap = False"], user


def test_agents_of_verifiers_play_only_where_the_operator_trusts_them() -> None:
    task, spec = SortDigits(), TaskSpec("verifiers", {"taskset": "any", "agent": {}})
    with pytest.raises(ConfigError, match=r"expected task\.trusted_rewards = true"):
        make_scorer(task, spec)
    make_scorer(task, spec, containment=Containment(is_trusted=True)).close()


def test_only_the_contained_process_and_plain_comparisons_call_a_score() -> None:
    """A task's `score` is called within the containment (scorer), by tasks that wrap tasks, and where it is plain."""
    allowed = {"echo2/tasks/scorer.py", "echo2/tasks/tools.py", "echo2/tasks/verifiers_task.py"}
    for path in (ROOT / "echo2" / "tasks").rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "score":
                assert str(path.relative_to(ROOT)) in allowed, f"{path}:{node.lineno}"


def test_the_list_of_scorers_that_execute_text_is_what_the_sources_say() -> None:
    pytest.importorskip("reasoning_gym")
    found = executing_data_sets()
    assert set(found) == EXECUTING_DATA_SETS, found
    assert found["countdown"] == ["sympy.parsing.sympy_parser.parse_expr"] and found["n_queens"] == ["eval"]


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_pickle_sent_to_a_decoder_is_not_executed(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        with contextlib.suppress(EchoError, DecodeError):  # the second: gRPC refuses the message before we see it
            TARGETS[name].decode(pickle.dumps(Bomb(mark), protocol))
        assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works where it is unpickled"
