"""One dropped field for every message of the protocol: generated from the product's own lines that make it.

Of each message the last field is left out of one place that makes it: where core types become messages (`wire`), else where
a daemon says it. Guarantees: a message that is made by keywords somewhere has its defect without anybody listing it.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, journal_pb2, rollout_pb2
from tests.mutants.planted import Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echo2"
SAID = frozenset((ROOT / "tests/unit/sim/said.txt").read_text().split())
WORLD = ("tests/unit/sim/test_said.py",)
MODULES = (broadcast_pb2, coordinator_pb2, ingest_pb2, journal_pb2, rollout_pb2)
NOT_PLAIN = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM}
TESTS: dict[str, tuple[str, ...]] = {  # by the beginning of the path, the most special first
    "wire/rollout.py": ("tests/unit/wire/test_messages.py",),
    "wire/": ("tests/unit/wire/test_messages.py",),
    "learner/rollouts/journal.py": (
        "tests/unit/learner/test_journal.py",
        "tests/unit/learner/test_replay.py",
        "tests/unit/learner/test_agents.py",
    ),
    "learner/rollouts/ingest.py": ("tests/unit/learner/test_ingest.py",),
    "learner/recent.py": ("tests/unit/learner/test_metrics.py",),
    "learner/": ("tests/unit/learner/test_daemon.py",),
    "coordinator/operator.py": (
        "tests/unit/coordinator/test_web.py",
        "tests/unit/cli/test_operator.py",
        "tests/unit/coordinator/test_daemon.py",
        "tests/unit/coordinator/test_actions.py",
    ),
    "coordinator/hub.py": (
        "tests/unit/coordinator/test_daemon.py",
        "tests/unit/coordinator/test_actions.py",
        "tests/redteam/test_bans.py",
    ),
    "coordinator/learner.py": (
        "tests/unit/coordinator/test_probe.py",
        "tests/redteam/test_bans.py",
        "tests/unit/coordinator/test_actions.py",
        "tests/unit/coordinator/test_daemon.py",
        "tests/unit/coordinator/test_web.py",
    ),
    "coordinator/fleet/enrolment.py": (
        "tests/unit/coordinator/test_enrolment.py",
        "tests/unit/coordinator/test_probe.py",
        "tests/unit/coordinator/test_daemon.py",
    ),
    "coordinator/money/providers/machine_setup.py": ("tests/unit/coordinator/test_enrolment.py",),
    "coordinator/planning/": ("tests/unit/coordinator/test_web.py", "tests/unit/coordinator/test_shown.py"),
    "coordinator/web/": ("tests/unit/coordinator/test_shown.py", "tests/unit/coordinator/test_daemon.py"),
    "coordinator/": ("tests/unit/coordinator/test_daemon.py",),
    "broadcast/nat/reach.py": ("tests/unit/coordinator/test_probe.py",),
    "trust/": ("tests/unit/coordinator/test_daemon.py",),
    "worker/": ("tests/unit/worker/test_reports.py",),
    "cli/": ("tests/unit/cli/test_operator.py", "tests/unit/coordinator/test_actions.py"),
}


@functools.cache
def dropped_fields() -> tuple[Mutant, ...]:
    """In the order of their messages' names."""
    chosen: dict[str, Mutant] = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent.name != "wire", str(path))):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("sim/", "wire/gen/")):
            continue
        for kind, mutant in _of_file(name, path.read_text()):
            chosen.setdefault(kind, mutant)
    return tuple(chosen[kind] for kind in sorted(chosen))


def _of_file(name: str, text: str) -> Iterator[tuple[str, Mutant]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message_of":
            yield from _by_name(name, text, node)
            continue
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not _is_proto(node.func.value):
            continue
        kind, call = node.func.attr, ast.get_source_segment(text, node)
        named = [keyword for keyword in node.keywords if keyword.arg is not None]
        if not kind[0].isupper() or not named or call is None or text.count(call) != 1:
            continue
        dropped = next((one for one in reversed(named) if f"{kind}.{one.arg}" in SAID), named[-1])
        kept = [ast.unparse(argument) for argument in node.args]
        kept += [f"{one.arg}={ast.unparse(one.value)}" if one.arg else f"**{ast.unparse(one.value)}"
                 for one in node.keywords if one is not dropped]  # fmt: skip
        tests = next(tests for start, tests in TESTS.items() if name.startswith(start))
        if f"{kind}.{dropped.arg}" in SAID and not name.startswith("wire/"):
            tests = (*WORLD, *tests)
        yield (
            kind,
            Mutant(f"{kind} loses {dropped.arg}", name, call, f"{ast.unparse(node.func)}({', '.join(kept)})", tests),
        )


def _by_name(name: str, text: str, node: ast.Call) -> Iterator[tuple[str, Mutant]]:
    """A message that is made by name: its last plain field is given as if it were not there. Signatures are filled in later."""
    made, call = node.args[1], ast.get_source_segment(text, node)
    if not isinstance(made, ast.Attribute) or not _is_proto(made.value) or call is None or text.count(call) != 1:
        return
    said = {keyword.arg for keyword in node.keywords}
    plain = [
        one
        for one in _descriptor(made.attr).fields
        if one.name not in said | {"signature"} and one.type not in NOT_PLAIN
    ]
    dropped = plain[-1]
    nothing = "()" if dropped.is_repeated else repr(dropped.default_value)
    tests = next(tests for start, tests in TESTS.items() if name.startswith(start))
    arguments = [ast.unparse(one) for one in node.args] + [
        f"{one.arg}={ast.unparse(one.value)}" for one in node.keywords
    ]
    lost = f"message_of({', '.join(arguments)}, {dropped.name}={nothing})"
    yield made.attr, Mutant(f"{made.attr} loses {dropped.name}", name, call, lost, tests)


def _descriptor(kind: str) -> Descriptor:
    found = [getattr(module, kind).DESCRIPTOR for module in MODULES if kind in module.DESCRIPTOR.message_types_by_name]
    assert len(found) == 1, f"{kind}: expected one message of that name, got {len(found)}"
    return cast(Descriptor, found[0])


def _is_proto(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and (value.id == "pb" or value.id.endswith("_pb2"))
