"""What a contained process sees of the machine, and the bubblewrap command that shows it that and nothing else.

Guarantees: no network, no process but its own, no /proc, nothing of the caller's environment; of the files only those
listed, read-only, and a temporary folder of bounded size; it ends with its parent. A pure function of the view. Leaves to
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
    """`readable`: absolute paths that exist, shown read-only where they are. `links`: symbolic links of the root, such as
    /lib to usr/lib. `hidden`: folders that are empty even where they lie within a readable one, but for readable paths
    within them. `folder`: where it starts, there but empty if nothing else shows it, so that relative paths mean the same.
    """

    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    folder: str = SCRATCH


def box_command(bwrap: str, view: View, scratch_bytes: int, command: Sequence[str]) -> list[str]:
    """`command` as bubblewrap is to run it."""
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
