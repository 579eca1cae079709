"""Reads the sources of reasoning-gym: which data sets' scorers execute text, directly or through what they call.

Guarantees: follows methods of the class and of its bases, functions and classes of reasoning-gym wherever they are imported
from, and names bound to them; every other call is looked up among what executes text. Nothing is run. What it cannot
resolve, such as a function taken out of a table, counts as called if it is named in what was followed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType

EXECUTING_NAMES = {"eval", "exec", "compile", "__import__"}
EXECUTING_MODULES = {
    "sympy", "subprocess", "pickle", "marshal", "importlib", "runpy", "code", "latex2sympy2_extended", "math_verify",
}  # fmt: skip
EXECUTING_ATTRIBUTES = {"os.system", "os.popen", "numexpr.evaluate", "pandas.eval"}
PACKAGE = "reasoning_gym"


def executing_data_sets() -> dict[str, list[str]]:
    """Data sets by name, with what their scorers reach that executes text."""
    from reasoning_gym.factory import DATASETS

    found = {}
    for name, (cls, _) in DATASETS.items():
        reached = sorted(set(_Follower(cls).reached()))
        if reached:
            found[name] = reached
    return found


class _Follower:
    def __init__(self, cls: type):
        self._cls = cls
        self._seen: set[object] = set()

    def reached(self) -> Iterator[str]:
        yield from self._of_function(_method(self._cls, "score_answer"))

    def _of_function(self, function: object) -> Iterator[str]:
        function = inspect.unwrap(function) if callable(function) else function  # type: ignore[arg-type]
        if not isinstance(function, FunctionType) or function in self._seen:
            return
        self._seen.add(function)
        module = inspect.getmodule(function)
        assert module is not None
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except OSError:  # made by dataclass or enum: no text of anyone's
            return
        imports = _imports_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                yield from self._of_name(node.id, module, imports)
            elif isinstance(node, ast.Attribute):
                yield from self._of_attribute(node, module, imports)

    def _of_name(self, name: str, module: ModuleType, imports: dict[str, object]) -> Iterator[str]:
        if name in imports or hasattr(module, name):
            yield from self._of_object(imports.get(name, getattr(module, name, None)))
        elif name in EXECUTING_NAMES:
            yield name

    def _of_attribute(self, node: ast.Attribute, module: ModuleType, imports: dict[str, object]) -> Iterator[str]:
        root = node.value
        if isinstance(root, ast.Name) and root.id in ("self", "cls"):
            yield from self._of_object(_method(self._cls, node.attr))
            return
        text = ast.unparse(node)
        if text in EXECUTING_ATTRIBUTES:
            yield text
        if isinstance(root, ast.Name):
            owner = imports.get(root.id, getattr(module, root.id, None))
            if isinstance(owner, ModuleType | type):
                yield from self._of_object(getattr(owner, node.attr, None))

    def _of_object(self, found: object) -> Iterator[str]:
        home = getattr(found, "__module__", None) or (found.__name__ if isinstance(found, ModuleType) else "")
        if not isinstance(home, str):
            return
        top = home.partition(".")[0]
        if top in EXECUTING_MODULES and not isinstance(found, ModuleType):
            yield f"{home}.{getattr(found, '__name__', found)}"
        elif top == PACKAGE and isinstance(found, FunctionType):
            yield from self._of_function(found)
        elif top == PACKAGE and isinstance(found, type) and found not in self._seen:
            self._seen.add(found)
            for member in vars(found).values():
                yield from self._of_class_member(found, getattr(member, "__func__", getattr(member, "fget", member)))

    def _of_class_member(self, cls: type, member: object) -> Iterator[str]:
        outer, self._cls = self._cls, cls
        yield from self._of_function(member)
        self._cls = outer


def _method(cls: type, name: str) -> object:
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return getattr(found, "__func__", getattr(found, "fget", found))
    return None


def _imports_in(tree: ast.AST) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            home = importlib.import_module(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(home, alias.name, None)
    return found
