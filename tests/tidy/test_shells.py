"""Thin shells: an object is whole once it is made, and nobody hangs functions on another's object afterwards."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tests.tidy.test_layout import PACKAGE, nodes_of, sources, tree_of

OF_A_FOREIGN_BASE = {("HttpServer", "servers"), ("HttpServer", "started")}  # uvicorn's own attributes
ASKS_FOREIGN_CODE = {
    "trust/http_port.py", "tasks/registry.py", "worker/engines/embedded/forward.py",
    "worker/engines/vllm/extension.py", "worker/engines/vllm/weight_map.py", "worker/machine.py",
    "sim/memory_grpc.py", "cli/worker.py", "cli/demo/model.py", "cli/sizing.py", "learner/training/model.py",
    "control/session.py",
}  # fmt: skip
"""They ask the operating system, torch, vLLM, peft, gRPC, argparse, a user's class what it has; never an object of the product."""
NOT_HELD = ("sim/",)
"""The simulator's streams stand in for gRPC's, whose ends are tied together once both are there."""


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sources():
        yield str(path.relative_to(PACKAGE)), tree_of(path)


def walked() -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    for path in sources():
        yield str(path.relative_to(PACKAGE)), nodes_of(path)


def stored(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, str, int]]:
    """Object, attribute and line of each plain assignment to an attribute."""
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one.value, one.attr, one.lineno


def is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def made_late(tree: ast.Module) -> Iterator[str]:
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        made = {s.target.id for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
        made |= {t.id for s in cls.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
        methods = [one for one in cls.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        made |= {m.name for m in methods if any("setter" in ast.unparse(d) for d in m.decorator_list)}
        for method in methods:
            if method.name in {"__init__", "__post_init__", "__new__"}:
                made |= {name for value, name, _ in stored(ast.walk(method)) if is_self(value)}
        for method in methods:
            for value, name, line in stored(ast.walk(method)):
                if is_self(value) and name not in made and (cls.name, name) not in OF_A_FOREIGN_BASE:
                    yield f"{line}: {cls.name}.{method.name} makes {name}"


@pytest.mark.parametrize(("path", "tree"), list(parsed()), ids=lambda p: p if isinstance(p, str) else "")
def test_an_object_has_all_its_attributes_once_it_is_made(path: str, tree: ast.Module) -> None:
    assert not list(made_late(tree)), path


def test_the_test_sees_an_attribute_that_is_made_late() -> None:
    late = "class A:\n    def __init__(self):\n        self.a = 1\n    def run(self):\n        self.a = 2\n        self.b = 3\n"
    assert list(made_late(ast.parse(late))) == ["6: A.run makes b"]


def test_nothing_of_the_product_is_asked_whether_it_has_an_attribute() -> None:
    asks = {
        path
        for path, nodes in walked()
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    }
    assert asks <= ASKS_FOREIGN_CODE


def test_no_function_is_hung_on_an_object_after_it_was_made() -> None:
    held = [(path, nodes) for path, nodes in walked() if not path.startswith(NOT_HELD)]
    functions = {
        node.target.attr
        for _, nodes in held
        for node in nodes
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and "Callable[" in ast.unparse(node.annotation)
    }
    hung = [
        f"{path}:{line} {name}"
        for path, nodes in held
        for value, name, line in stored(nodes)
        if name in functions and not is_self(value)
    ]
    assert not hung


# ---- one name for one idea: no class of the product shares its name with another


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 500, "the classes of the product are read"
    assert not {name: where for name, where in places.items() if len(where) > 1}
