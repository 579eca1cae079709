"""The list of planted defects stays true: each stands on a line that the product has, once, and names tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.fields import dropped_fields
from tests.mutants.planted import MUTANTS, Mutant
from tests.tidy.test_layout import PACKAGE, ROOT


@pytest.mark.parametrize("mutant", (*MUTANTS, *dropped_fields()), ids=lambda mutant: mutant.name)
def test_a_planted_defect_changes_one_line_of_the_product(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    ast.parse(text.replace(mutant.old, mutant.new))
    assert all((ROOT / path.partition("::")[0]).exists() for path in mutant.tests)


def test_there_are_forty_and_names_are_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_every_message_that_is_made_by_keywords_has_a_dropped_field() -> None:
    names = [mutant.name.split()[0] for mutant in dropped_fields()]
    assert len(names) == len(set(names)) >= 70
