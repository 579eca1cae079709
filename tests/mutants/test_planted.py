"""The list of planted defects stays true: each stands on a line that the product has, once, and names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.mutants.fields import dropped_fields
from tests.mutants.planted import MUTANTS, Mutant
from tests.tidy.test_layout import PACKAGE, ROOT, SHELL_FILES

SHELLS = sorted(
    ROOT / name
    for name in SHELL_FILES
    if name.split("/")[1] in ("learner", "worker", "coordinator", "control", "trust")
)
DECIDES = re.compile(
    r"raise (NotAllowed|TrustError|RunFinished|Dismissed)\b|verify_ticket\("
    r"|\.commit\(\)|flush_now\(\)|\.is_barred\b|check_allowed\("
)


@pytest.mark.parametrize("mutant", (*MUTANTS, *dropped_fields()), ids=lambda mutant: mutant.name)
def test_a_planted_defect_changes_one_line_of_the_product(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    ast.parse(text.replace(mutant.old, mutant.new))
    for path, _, function in (test.partition("::") for test in mutant.tests):
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), function


def test_there_are_forty_and_names_are_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_every_message_of_the_protocol_and_of_the_journal_loses_a_field_somewhere() -> None:
    kinds = {
        kind.group(1)
        for path in (ROOT / "proto").rglob("*.proto")
        for kind in re.finditer(r"^message (\w+) \{$", path.read_text(), re.MULTILINE)  # `{}`: it has no field
    }
    lost = {mutant.name.split()[0] for mutant in (*dropped_fields(), *MUTANTS) if mutant.name.split()[1] == "loses"}
    assert len(kinds) >= 85 and not kinds - lost


@pytest.mark.parametrize("path", SHELLS, ids=str)
def test_every_part_of_the_shells_that_refuses_or_keeps_has_a_planted_defect(path: Path) -> None:
    """Whatever of them lets somebody in, keeps him out, or has something on the disk before it goes on."""
    name = str(path.relative_to(PACKAGE))
    decides = DECIDES.search(path.read_text()) is not None
    assert not decides or name in {mutant.file for mutant in MUTANTS}, name


def test_every_message_that_is_made_by_keywords_has_a_dropped_field() -> None:
    names = [mutant.name.split()[0] for mutant in dropped_fields()]
    assert len(names) == len(set(names)) >= 70
