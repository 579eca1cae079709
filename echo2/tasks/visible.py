"""What the contained rewards of a user's own task must see of this machine: its modules and the files among its arguments.

Guarantees: modules are found by reading source, so that imports inside functions count; nothing is executed but what importing
`spec.name` has already executed. Leaves to others: showing them (contain/box).
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import sysconfig
from modulefinder import ModuleFinder
from pathlib import Path

from echo2.contain.box import package_folders
from echo2.tasks.task import TaskSpec, texts_in

_MODULE_MISSING = re.compile(r"No module named '([\w.]+)'")  # Python's text of ModuleNotFoundError
# Python's texts of FileNotFoundError and PermissionError.
_FILE_MISSING = re.compile(r"(?:No such file or directory|Permission denied)[^']*'([^']+)'")


def own_modules(name: str) -> list[str]:
    """Top-level modules that `module:Class` needs and that are not installed in this Python: its own first."""
    first = name.partition(":")[0]
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {Path(path).resolve() for path in (*map(sysconfig.get_path, kinds), *package_folders())}
    own_folders = [
        path or "." for path in sys.path if not any(Path(path).resolve().is_relative_to(folder) for folder in installed)
    ]
    finder = ModuleFinder(own_folders, excludes=["echo2"])
    with contextlib.suppress(ImportError, SyntaxError):  # it is installed, or whoever imports it gets to know
        finder.import_hook(first)
    return list(dict.fromkeys(module.partition(".")[0] for module in (first, *finder.modules)))


def own_files(spec: TaskSpec) -> list[str]:
    """Files and folders that the arguments of a user's own task name."""
    return [text for text in texts_in(spec.args) if _names_a_path(text)]


def remedy(message: str) -> str:
    """What to do about a reward's failure, if it lacks something that this machine has; else empty."""
    path: Path | None = None
    if (missing := _MODULE_MISSING.search(message)) is not None:
        spec = importlib.util.find_spec(missing[1].partition(".")[0])
        path = Path(spec.origin) if spec is not None and spec.origin else None
        path = path.parent if path is not None and path.name == "__init__.py" else path
    elif (missing := _FILE_MISSING.search(message)) is not None:
        path = Path(missing[1]).absolute()
    if path is None or not path.exists():
        return ""
    return f'; it is on this machine, but contained rewards do not see it: add task.readable = ["{path}"]'


def _names_a_path(text: str) -> bool:
    """Whether the text names a file, or a folder with a separator in it: a mere word may also be the name of a folder here."""
    try:
        path = Path(text).expanduser()
        return bool(text) and (path.is_file() or ("/" in text and path.is_dir()))
    except (OSError, ValueError, RuntimeError):  # too long, or not a path at all
        return False
