"""House limits: imports point one way, core code does no IO, files and functions stay small."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo2"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
PARAMETERS_MAX = 8

# What each room may import of echo2. The order of design: base < {outside, config} < {cost_model, staleness, trust, weights,
# contain, scoring} < broadcast < {coordinator, learner, worker, tasks} < {wire, sim} < {trust, contain}.runtime < broadcast.runtime
# < control.runtime < {role}.runtime < cli.
_BASE = {"base"}
_OUTSIDE = {"base", "outside"}  # what only shells are handed
_PURE = _BASE | {"config", "cost_model", "staleness", "trust", "weights", "control", "broadcast", "scoring"}
_ROLES = {"coordinator", "learner", "worker", "tasks"}
ALLOWED: dict[str, set[str]] = {
    "base": _BASE,
    "outside": _OUTSIDE,
    "config": _BASE | {"config"},
    "cost_model": _BASE | {"config", "cost_model"},
    "staleness": _BASE | {"config", "staleness"},
    "trust": _BASE | {"trust"},
    "weights": _BASE | {"weights"},
    "scoring": _BASE | {"scoring"},
    "control": _BASE | {"control"},
    "control.runtime": _OUTSIDE | {"control", "control.runtime", "trust", "trust.runtime", "wire"},
    "contain": _BASE | {"contain"},
    "contain.runtime": _BASE | {"contain", "contain.runtime"},
    "broadcast": _PURE,
    "coordinator": _PURE | {"coordinator"},
    "learner": _PURE | {"learner"},
    "worker": _PURE | {"worker"},
    "tasks": _PURE | {"tasks"},
    "gateway": _BASE | {"gateway"},
    "gateway.runtime": _OUTSIDE | {"gateway", "gateway.runtime", "tasks", "tasks.runtime", "trust.runtime"},
    "wire": _PURE | _ROLES | {"wire"},
    "sim": _PURE
    | _ROLES
    | _OUTSIDE
    | {"sim", "wire"}
    | {f"{role}.runtime" for role in ("trust", "control", "broadcast", *_ROLES)},
    "trust.runtime": _OUTSIDE | {"trust", "wire", "trust.runtime"},
    "broadcast.runtime": _PURE | {"wire", "trust.runtime", "broadcast.runtime"},
    "coordinator.runtime": _PURE | {"wire", "trust.runtime", "broadcast.runtime", "coordinator", "coordinator.runtime"},
    "learner.runtime": _PURE | {"wire", "trust.runtime", "broadcast.runtime", "learner", "learner.runtime", "tasks"},
    "worker.runtime": _PURE | {"wire", "trust.runtime", "broadcast.runtime", "worker", "worker.runtime"},
    "tasks.runtime": _PURE | {"contain", "contain.runtime", "tasks", "tasks.runtime"},
}
ALLOWED["learner.runtime"] |= {"tasks.runtime", "gateway", "gateway.runtime"}
for _room in ("broadcast.runtime", "coordinator.runtime", "learner.runtime", "worker.runtime"):
    ALLOWED[_room] |= _OUTSIDE
for _room in ("learner.runtime", "worker.runtime"):
    ALLOWED[_room] |= {"control.runtime"}

IO_MODULES = {"socket", "asyncio", "threading", "subprocess", "grpc", "trio", "sqlalchemy", "sqlite3", "requests"}
TORCH_ALLOWED_IN_CORE = {
    "echo2/learner/loss.py", "echo2/learner/objectives.py", "echo2/learner/advantage.py", "echo2/learner/correction.py",
}  # fmt: skip
TORCH_ALLOWED_PREFIXES = ("echo2/weights/", "echo2/scoring/columns.py", "echo2/scoring/routers.py")


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "gen" not in p.relative_to(PACKAGE).parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file; each file is read and walked once for all tests."""
    return tuple(ast.walk(tree_of(path)))


def room_of(module: str) -> str | None:
    """`echo2.learner.runtime.daemon` -> `learner.runtime`; None for cli and the top package."""
    parts = module.split(".")[1:]
    if not parts or parts[0] == "cli":
        return None
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1] == "runtime" else parts[0]


@cache
def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(module_of(path))
    if room is None:
        return
    for name in imports_of(path):
        if not name.startswith("echo2.") or name.startswith("echo2.__version__"):
            continue
        target = room_of(name)
        assert target in ALLOWED[room], f"{module_of(path)} ({room}) may not import {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_core_code_does_no_io_and_reads_no_clock(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    room = room_of(module_of(path))
    if room is None or room.endswith(".runtime") or room in {"base", "outside", "sim", "wire"}:
        return
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & IO_MODULES, f"{relative} is core code and imports {roots & IO_MODULES}"
    assert "time" not in roots, f"{relative} is core code: take `now` as an argument"
    if relative not in TORCH_ALLOWED_IN_CORE and not relative.startswith(TORCH_ALLOWED_PREFIXES):
        assert not roots & {"torch", "transformers"}, f"{relative} is core code and imports torch"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX, f"{path.name} is over {FILE_LINES_MAX} lines"
    for node in nodes_of(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= FUNCTION_LINES_MAX, f"{path.name}:{node.lineno} {node.name} has {lines} lines"
        arguments = node.args
        named = [
            a for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if a.arg not in {"self", "cls"}
        ]
        assert len(named) <= PARAMETERS_MAX, f"{path.name}:{node.lineno} {node.name} has {len(named)} parameters"


def test_there_is_no_utils() -> None:
    banned = {"utils", "util", "common", "helpers", "misc"}
    assert not [p for p in sources() if p.stem in banned or banned & set(p.parts)]


TO_A_CHILD_OF_ITS_OWN = "echo2/coordinator/runtime/aside.py"


def test_nothing_on_the_wire_is_pickled() -> None:
    for path in sources():
        if str(path).endswith(TO_A_CHILD_OF_ITS_OWN):  # over pipes that nobody else has
            continue
        names = {name.split(".")[0] for name in imports_of(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{path} imports a pickler"


# They time real hardware or real subprocesses on threads of their own, or keep real sockets that no simulation opens.
READS_THE_MACHINE = (
    "echo2/outside/", "echo2/cli/", "echo2/sim/", "echo2/tasks/runtime/rewards.py", "echo2/worker/runtime/engines/",
    "echo2/learner/runtime/trainer.py", "echo2/broadcast/runtime/p2p/", "echo2/broadcast/runtime/probing.py",
    "echo2/coordinator/runtime/web/", "echo2/coordinator/runtime/probe.py", "echo2/contain/runtime/",
)  # fmt: skip
MACHINE_CALLS = {"time", "monotonic", "perf_counter", "urandom", "token_bytes", "token_hex", "token_urlsafe", "fsync"}
MACHINE_MODULES = {"time", "os", "secrets", "random"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_daemons_ask_their_outside_for_time_randomness_and_syncs(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(READS_THE_MACHINE):
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MACHINE_MODULES:
            assert node.attr not in MACHINE_CALLS, f"{path.name}:{node.lineno}: ask `here()` of echo2.outside"
