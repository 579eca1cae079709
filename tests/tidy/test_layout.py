"""House limits: imports point one way, core code does no IO, files and functions stay small."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo2"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
PARAMETERS_MAX = 8

# What each room may import of echo2; `learner.shell` is those files of `learner` that `SHELL_FILES` lists. The order of design:
# base < {outside, config} < {cost_model, staleness, trust, weights, contain} < broadcast < {coordinator, learner, worker, tasks}
# < {wire, sim} < trust.shell < {broadcast, control}.shell < {role}.shell < cli.
_BASE = {"base"}
_OUTSIDE = {"base", "outside"}  # what only shells are handed
_PURE = _BASE | {"config", "cost_model", "staleness", "trust", "weights", "control", "broadcast"}
_ROLES = {"coordinator", "learner", "worker", "tasks"}
ALLOWED: dict[str, set[str]] = {
    "base": _BASE,
    "outside": _OUTSIDE,
    "config": _BASE | {"config"},
    "cost_model": _BASE | {"config", "cost_model"},
    "staleness": _BASE | {"config", "staleness"},
    "trust": _BASE | {"trust"},
    "weights": _BASE | {"weights"},
    "control": _BASE | {"control"},
    "control.shell": _OUTSIDE | {"control", "control.shell", "trust", "trust.shell", "wire"},
    "contain": _BASE | {"contain"},
    "broadcast": _PURE,
    "coordinator": _PURE | {"coordinator", "wire.gen"},  # it keeps and shows messages as they came
    "learner": _PURE | {"learner", "wire.gen"},  # as the coordinator
    "worker": _PURE | {"worker"},
    "tasks": _PURE | {"contain", "tasks"},
    "gateway": _OUTSIDE | {"gateway", "tasks", "trust.shell"},
    "wire": _PURE | _ROLES | {"wire"},
    "sim": _PURE
    | _ROLES
    | _OUTSIDE
    | {"sim", "wire"}
    | {f"{role}.shell" for role in ("trust", "control", "broadcast", "coordinator", "learner", "worker")},
    "trust.shell": _OUTSIDE | {"trust", "wire", "trust.shell"},
    "broadcast.shell": _PURE | {"wire", "trust.shell", "broadcast.shell"},
    "coordinator.shell": _PURE | {"wire", "trust.shell", "broadcast.shell", "coordinator", "coordinator.shell"},
    "learner.shell": _PURE | {"wire", "trust.shell", "broadcast.shell", "learner", "learner.shell", "tasks"},
    "worker.shell": _PURE | {"wire", "trust.shell", "broadcast.shell", "worker", "worker.shell"},
}
ALLOWED["learner.shell"] |= {"gateway"}
for _rooms in ALLOWED.values():
    _rooms |= {"wire.gen"} if "wire" in _rooms else set()  # the generated types of messages
for _room in ("broadcast.shell", "coordinator.shell", "learner.shell", "worker.shell"):
    ALLOWED[_room] |= _OUTSIDE
for _room in ("learner.shell", "worker.shell"):
    ALLOWED[_room] |= {"control.shell"}

# Pure part and shell of a package lie side by side, and these files are the shell.
SHELL_FILES = {
    f"echo2/gateway/{name}.py"
    for name in (
        "app",
        "episodes",
        "generate",
        "harness",
        "openenv_agent",
        "operations",
        "runtime",
        "tinker",
        "verifiers_agent",
    )
}
SHELL_FILES |= {f"echo2/contain/{name}.py" for name in ("box", "inside", "pool", "program_inside", "sandbox")}
SHELL_FILES |= {
    f"echo2/tasks/{name}.py"
    for name in ("data_files", "registry", "rendering", "rewards", "runtime", "scorer", "verifiers_task", "visible")
}
SHELL_FILES |= {f"echo2/trust/{name}.py" for name in ("calls", "enrolment", "http_port", "ports", "tls")}
SHELL_FILES.add("echo2/control/session.py")
SHELL_FILES |= {
    f"echo2/broadcast/{name}.py"
    for name in (
        "catch_up", "connection", "connections", "exchange", "library", "link", "node", "store", "stripes", "transport", "uplink",
        "nat/access", "nat/host", "nat/libp2p", "nat/pipes", "nat/reach", "nat/relay",
    )
}  # fmt: skip
SHELL_FILES |= {
    f"echo2/learner/{name}.py"
    for name in (
        "audit", "driven", "learner", "loop", "metrics", "options", "own_trainer", "recent", "runtime", "serve",
        "startup",
        *(f"rollouts/{shell}" for shell in (
            "agents", "evaluation", "ingest", "journal", "pool", "prompts", "request_pool",
        )),
        "training/loading", "training/model", "training/model_files", "training/optimiser",
        "training/packing", "training/ranks", "training/scoring", "training/shards", "training/team", "training/trainer",
        "publishing/checkpoint", "publishing/publisher",
    )
}  # fmt: skip
SHELL_FILES |= {
    f"echo2/coordinator/{name}.py"
    for name in (
        "coordinator", "hub", "learner", "operator",
        "store", "streams", "fleet/enrolment", "money/market",
        "money/costs", "money/provisioner", "money/providers/command", "money/providers/fetch_wheel",
        "money/providers/machine_setup", "money/providers/skypilot",
         "planning/pool_plan", "planning/service",
        "web/page", "web/state",
    )
}  # fmt: skip
SHELL_FILES |= {
    f"echo2/worker/{name}.py"
    for name in (
        "base_checkpoint", "control", "generation", "heartbeat", "links", "machine", "weights",
        "worker", "engines/adapter", "engines/making", "engines/outbox",
        *(f"engines/embedded/{name}" for name in ("embedded_engine", "forward", "general", "kernels", "live_weights", "loop")),
        *(f"engines/vllm/{name}" for name in ("experts", "extension", "vllm_engine", "vllm_weights", "weight_map")),
    )
}  # fmt: skip
IO_MODULES = {"socket", "asyncio", "threading", "subprocess", "grpc", "trio", "sqlalchemy", "sqlite3", "requests"}
TORCH_ALLOWED_IN_CORE = {f"echo2/learner/training/{name}.py" for name in ("loss", "advantage")}
TORCH_ALLOWED_PREFIXES = ("echo2/weights/",)


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
    """`echo2.learner.learner` -> `learner.shell`; None for cli and the top package."""
    parts = module.split(".")[1:]
    if parts[:2] == ["wire", "gen"]:
        return "wire.gen"
    if not parts or parts[0] == "cli":
        return None
    # The shell file itself, or a name in it.
    if {"/".join(["echo2", *parts[:end]]) + ".py" for end in range(2, len(parts) + 1)} & SHELL_FILES:
        return f"{parts[0]}.shell" if f"{parts[0]}.shell" in ALLOWED else parts[0]
    return parts[0]


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
    if room is None or room.endswith(".shell") or room in {"base", "outside", "sim", "wire"}:
        return
    if relative in SHELL_FILES:
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


def test_nothing_on_the_wire_is_pickled() -> None:
    for path in sources():
        names = {name.split(".")[0] for name in imports_of(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{path} imports a pickler"


# They time real hardware or real subprocesses on threads of their own, or keep real sockets that no simulation opens.
READS_THE_MACHINE = (
    "echo2/outside/", "echo2/cli/", "echo2/sim/", "echo2/tasks/rewards.py", "echo2/worker/engines/",
    "echo2/learner/training/trainer.py", "echo2/broadcast/nat/reach.py", "echo2/broadcast/nat/relay.py",
    "echo2/coordinator/web/", "echo2/coordinator/fleet/enrolment.py", "echo2/contain/",
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
