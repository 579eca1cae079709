"""The constraints that a clone installs from: `python -m tests.lock` or `make lock` prints what is installed here, a pin a line.

A release that asks for a newer Python than echo2 does is pinned for that Python alone, so that an older one finds another.
"""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# What makes the environment, and echo2 itself.
UNPINNED = {"pip", "setuptools", "wheel", "uv", "echo2"}
HEAD = (
    "# Versions that `make` installs and CI tests, so that a new release of a library cannot break a clone. "
    "`make lock` makes it anew."
)


def oldest_python() -> str:
    """The oldest Python that echo2 runs on, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["requires-python"]).removeprefix(">=")


def pin(name: str, version: str, requires_python: str | None) -> str:
    """The pin of a release, without a local part (torch's `+cpu`): the other build of the release is as good."""
    plain = f"{name}=={version.partition('+')[0]}"
    if not requires_python or SpecifierSet(requires_python).contains(f"{oldest_python()}.0"):
        return plain
    marks = (f'python_full_version {spec.operator} "{spec.version}"' for spec in SpecifierSet(requires_python))
    return f"{plain} ; {' and '.join(sorted(marks))}"


def main() -> None:
    """Prints the constraints."""
    print(HEAD)
    pins = {
        pin(found.metadata["Name"], found.version, found.metadata["Requires-Python"])
        for found in metadata.distributions()
        if canonicalize_name(found.metadata["Name"]) not in UNPINNED
    }
    print(*sorted(pins, key=str.lower), sep="\n")


if __name__ == "__main__":
    main()
