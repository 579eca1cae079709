"""What a contained process sees of the machine, and the bubblewrap command that shows it exactly that.

Guarantees: no network, no processes but its own, no /proc, no environment variables of the caller; only the listed files,
read-only, and a temporary folder of bounded size; it ends with its parent. A pure function of the view. Leaves to
others: which paths there are (runtime/box), what it may do with what it sees (system_calls, limits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import ConfigError

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class View:
    """`readable`: existing absolute paths, mounted read-only in place. `links`: symbolic links at the root, such as
    /lib to usr/lib. `hidden`: folders that appear empty even inside a readable one, except for readable paths
    within them. `folder`: the working directory; created empty if nothing else shows it, so that relative paths keep their meaning.
    """

    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    folder: str = SCRATCH


def box_command(bwrap: str, view: View, scratch_bytes: int, command: Sequence[str]) -> list[str]:
    """The bubblewrap command line that runs `command` in the view."""
    for path in (*view.readable, *view.hidden, view.folder):
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"containment: expected absolute paths, got {path!r}")
    said = [bwrap, "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    said += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "contained", "--clearenv"]
    for name, value in view.environment:
        said += ["--setenv", name, value]
    masks = [path for path in view.hidden if any(_is_below(path, shown) for shown in view.readable)]
    for path in sorted({*view.readable, *masks}):  # a folder before what lies within it
        said += ["--size", "4096", "--tmpfs", path] if path in masks else ["--ro-bind", path, path]
    for name, target in view.links:
        said += ["--symlink", target, name]
    for path in DEVICES:
        said += ["--dev-bind", path, path]
    said += ["--size", str(scratch_bytes), "--tmpfs", SCRATCH, "--symlink", SCRATCH, "/dev/shm"]
    if not any(_is_below(path, "/tmp") or path == "/tmp" for path in (*view.readable, view.folder)):
        said += ["--symlink", SCRATCH, "/tmp"]
    said += ["--dir", view.folder, "--chdir", view.folder]
    for path in sorted(masks, reverse=True):
        said += ["--remount-ro", path]
    return [*said, "--remount-ro", "/", "--", *command]


def _is_below(path: str, folder: str) -> bool:
    return path != folder and Path(path).is_relative_to(folder)
