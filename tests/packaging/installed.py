"""Environments that hold the built wheel, and of the libraries only what chosen requirements pull in.

Real installations would fetch gigabytes; here each distribution that the requirements name, and all that these
require, is linked from the environment that runs the tests. What a plain install would not bring is
not there, so an import of it fails as it would for a user.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import WAIT_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment. `run` gives it an empty home and nothing of this process's Python settings."""

    folder: Path
    home: Path

    @property
    def scripts(self) -> Path:
        return self.folder / "bin"

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*/site-packages"))

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return kept | {"HOME": str(self.home), "PATH": f"{self.scripts}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        name, *rest = command
        return subprocess.run(
            [str(self.scripts / name), *rest],
            env=self.variables(), cwd=self.home, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip


def build(target: Path) -> tuple[Path, Path]:
    """Wheel and source distribution of this tree, by the project's own backend."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


def install(wheel: Path, folder: Path) -> Environment:
    """A new environment with the wheel and the closure of what it requires."""
    home = folder.with_name(folder.name + "-home")
    home.mkdir()
    venv.EnvBuilder().create(folder)  # a pip of its own takes seconds
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q"]
    done = subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    environment = Environment(folder, home)
    add_extras(environment, ())
    share_kernels(environment.site / "echo2")
    return environment


def add_extras(environment: Environment, extras: Iterable[str]) -> None:
    """What the installed wheel requires with `extras` chosen, and the closure of that."""
    metadata = next(environment.site.glob("echo2-*.dist-info"))
    link_libraries(Distribution.at(metadata).requires or [], extras, environment.site)


def share_kernels(installed: Path) -> None:
    """Gives an installed copy what this tree has compiled, a minute of work: numba knows a source by its folder, size and time."""
    for part in ("weights", "worker/engines/embedded"):
        source, target = ROOT / "echo2" / part, installed / part
        for file in source.glob("*.py"):
            os.utime(target / file.name, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        own, copied = (f"{source.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}" for folder in (source, target))
        for kept in (*source.glob("__pycache__/**/*.nb?"), *source.glob("__pycache__/*/all-compiled")):
            place = target / str(kept.relative_to(source)).replace(own, copied)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(kept, place)


def link_libraries(requirements: Iterable[str], extras: Iterable[str], site: Path) -> None:
    """Links into `site` what the requirements pull in with `extras` chosen, from the environment that runs the tests."""
    for found in _closure(_named(requirements, tuple(extras))):
        _link(found, site)


def _named(requirements: Iterable[str], extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras))


def _closure(wanted: Iterator[tuple[str, tuple[str, ...]]]) -> Iterator[Distribution]:
    pending, seen, given = list(wanted), set(), set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # a requirement of another platform, or of an extra that this environment lacks
        pending.extend(_named(found.requires or [], extras))
        if name not in given:
            given.add(name)
            yield found


def _link(found: Distribution, site: Path) -> None:
    """Whole top-level folders, bytecode and all, where no other distribution has a part in them; else file by file."""
    for file in found.files or ():
        top = file.parts[0]
        if top == ".." or file.suffix == ".pth":
            continue
        is_own = top.endswith(".dist-info") or len(set(_owners().get(top, ()))) == 1
        source = Path(str(found.locate_file(top if is_own else file)))
        target = site / (top if is_own else file)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.resolve())


@cache
def _owners() -> Mapping[str, list[str]]:
    """Distributions by the top-level names that they bring."""
    return packages_distributions()
