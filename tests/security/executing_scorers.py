"""Reads the code of reasoning-gym: which data sets' scorers execute text, directly or through what they call.

Guarantees: follows, by the names in their bytecode, methods of the class and of its bases, and functions and classes of
reasoning-gym wherever they are imported from; every other name is looked up among what executes text. Nothing is run. What it
cannot resolve, such as a function taken out of a table, counts as called if it is named in what was followed.
"""

import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

EXECUTING_NAMES = {"eval", "exec", "compile", "__import__"}
EXECUTING_MODULES = {
    "sympy", "subprocess", "pickle", "marshal", "importlib", "runpy", "code", "latex2sympy2_extended", "math_verify",
}  # fmt: skip
EXECUTING_ATTRIBUTES = {"os.system", "os.popen", "numexpr.evaluate", "pandas.eval"}
PACKAGE = "reasoning_gym"


def executing_data_sets() -> dict[str, list[str]]:
    """Data sets by name, with what their scorers reach that executes text."""
    from reasoning_gym.factory import DATASETS

    found = {name: sorted(set(_of_member(cls, "score_answer", set()))) for name, (cls, _) in DATASETS.items()}
    return {name: reached for name, reached in found.items() if reached}


def _of_member(cls: type | None, name: str, seen: set[object]) -> Iterator[str]:
    found = inspect.getattr_static(cls, name, None)
    yield from _of_object(getattr(found, "__func__", getattr(found, "fget", found)), cls, seen)


def _of_object(found: object, cls: type | None, seen: set[object]) -> Iterator[str]:
    """`cls`: whose method it is."""
    found = inspect.unwrap(found) if callable(found) else found
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    top = home.partition(".")[0] if isinstance(home, str) else ""
    if top in EXECUTING_MODULES:
        yield home if isinstance(found, ModuleType) else f"{home}.{getattr(found, '__name__', found)}"
    if top == PACKAGE and isinstance(found, FunctionType | type) and found not in seen:
        seen.add(found)
        if isinstance(found, type):
            for name in vars(found):
                yield from _of_member(found, name, seen)
        else:
            yield from _of_function(found, cls, seen)


def _of_function(function: FunctionType, cls: type | None, seen: set[object]) -> Iterator[str]:
    names = _names(function.__code__)
    modules = [importlib.import_module(name) for name in names if name.partition(".")[0] == PACKAGE]
    yield from (name for name in names if name.partition(".")[0] in EXECUTING_MODULES)
    yield from (name for name in EXECUTING_ATTRIBUTES if names.issuperset(name.split(".")))
    for name in names:
        if name in function.__globals__:
            yield from _of_object(function.__globals__[name], None, seen)
        elif name in EXECUTING_NAMES:
            yield name
        for module in modules:
            yield from _of_object(getattr(module, name, None), None, seen)
        yield from _of_member(cls, name, seen)


def _names(code: CodeType) -> set[str]:
    """All that a function and those within it load, import or look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
