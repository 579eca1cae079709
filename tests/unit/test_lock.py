"""The constraints that a clone installs from."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.lock import ROOT, oldest_python, pin


def test_a_release_for_a_newer_python_is_pinned_for_that_python_alone() -> None:
    assert pin("soupsieve", "4.1.3", ">=3.11.5") == 'soupsieve==4.1.3 ; python_full_version >= "3.11.5"'
    assert pin("torch", "2.13.0+cpu", ">=3.10") == "torch==2.13.0"
    assert (
        pin("odd", "1", "!=3.11.0,>=3.9") == 'odd==1 ; python_full_version != "3.11.0" and python_full_version >= "3.9"'
    )


def test_the_oldest_python_can_install_what_is_pinned() -> None:
    """Debian 12 has Python 3.11.2: one pin for 3.11.5 stopped every installation there."""
    oldest = f"{oldest_python()}.0"
    wrong = []
    for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"python_full_version": oldest}):
            continue
        try:
            installed = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        asks = installed.metadata["Requires-Python"]
        if installed.version.partition("+")[0] in wanted.specifier and asks and oldest not in SpecifierSet(asks):
            wrong.append(line)
    assert not wrong
