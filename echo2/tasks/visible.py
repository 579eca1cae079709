"""What the contained rewards of a user's own task must see of this machine: its modules and the files among its arguments.

Guarantees: modules are found by reading source, so that imports inside functions count; nothing is executed but what importing
`spec.name` has already executed.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from echo2.contain.box import module_paths, package_folders
from echo2.tasks.task import TaskSpec, texts_in

FILES_MAX = 2_000  # source files read at most for one task; modules found after that need `task.readable`
_MODULE_MISSING = re.compile(r"No module named '([\w.]+)'")  # Python's text of ModuleNotFoundError
# Python's texts of what the filter of system calls and a view without network refuse.
_KEPT_OUT = re.compile(r"Operation not permitted|can't start new|name resolution|Name or service not known")
_NO_VARIABLE = re.compile(r"KeyError: '(\w+)'")
# Python's texts of FileNotFoundError and PermissionError.
_FILE_MISSING = re.compile(r"(?:No such file or directory|Permission denied)[^']*'([^']+)'")


def own_modules(name: str) -> list[str]:
    """Top-level modules that `module:Class` needs and that are not installed in this Python: its own first."""
    first = name.partition(":")[0]
    top = first.partition(".")[0]
    modules, waiting, read = {top: None}, [first], set[Path]()
    while waiting and len(read) < FILES_MAX:
        module = waiting.pop()
        if module.partition(".")[0] != top and _is_installed(module.partition(".")[0]):
            continue
        file = _source_of(module)
        if file is None or file in read:
            continue
        read.add(file)
        modules[module.partition(".")[0]] = None
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        waiting.extend(_imports(file, package))
    return list(modules)


def own_files(spec: TaskSpec) -> list[str]:
    """Files and folders that the arguments of a user's own task name."""
    return [text for text in texts_in(spec.args) if _names_a_path(text)]


def remedy(message: str) -> str:
    """What to do about a reward's failure, if it lacks something that this machine has; else empty."""
    path: Path | None = None
    if _KEPT_OUT.search(message):
        return "; contained rewards start no threads or programs and reach no network: task.trusted_rewards = true lets them"
    if (missing := _NO_VARIABLE.search(message)) is not None and missing[1] in os.environ:
        return "; contained rewards do not see variables of the environment: give it to the task with task.args"
    if (missing := _MODULE_MISSING.search(message)) is not None:
        path = _source_of(missing[1].partition(".")[0])
        path = path.parent if path is not None and path.name == "__init__.py" else path
    elif (missing := _FILE_MISSING.search(message)) is not None:
        path = Path(missing[1]).absolute()
        path = path.resolve() if path.is_symlink() else path  # a link is shown already, where it leads is not
    if path is None or not path.exists():
        return ""
    return f'; it is on this machine, but contained rewards do not see it: add task.readable = ["{path}"]'


def _names_a_path(text: str) -> bool:
    """Whether the text names a file, or a folder with a separator in it: a mere word may also be the name of a folder here, and
    what holds the whole home folder, as "/" does, is not shown."""
    try:
        path = Path(text).expanduser()
        is_shown = "/" in text and path.is_dir() and not Path.home().resolve().is_relative_to(path.resolve())
        return bool(text) and (path.is_file() or is_shown)
    except (OSError, ValueError, RuntimeError):  # too long, or not a path at all
        return False


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    """Folders of the standard library and of installed packages."""
    paths = [sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(path).resolve() for path in (*paths, *package_folders())})


def _is_installed(top: str) -> bool:
    if top in sys.stdlib_module_names or top == "echo2":
        return True
    return any(Path(path).resolve().is_relative_to(folder) for path in module_paths(top) for folder in _installed())


def _source_of(module: str) -> Path | None:
    """The source file of a dotted module name, found without importing anything."""
    top, *rest = module.split(".")
    for location in map(Path, module_paths(top)):
        path = location.joinpath(*rest)
        candidates = (path,) if location.is_file() else (path.with_name(path.name + ".py"), path / "__init__.py")
        file = next((candidate for candidate in candidates if candidate.is_file() and candidate.suffix == ".py"), None)
        if file is not None:
            return file
    return None


def _imports(file: Path, package: str) -> Iterator[str]:
    """Dotted names of all modules that the file imports, and of the packages around them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever imports it gets to know
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))
