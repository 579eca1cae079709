"""The soak's record: sums by part and commit, nothing forgotten, and the page that is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.soak_record import BEGIN, END, PAGE, RECORD, Entry, add, entries, page_of, write_page


def test_what_is_added_is_summed_by_part_and_commit(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    for seeds, failed in ((3, []), (2, ["make sim SEED=9: invariant 6"])):
        counts = Counter({"fault: bit rot": seeds, "virtual seconds": 3600})
        add(record, Entry("sim", "abc", 60.0, seeds, counts, list(failed)))
    add(record, Entry("sim", "def", 60.0, 4))
    add(record, Entry("chaos", "abc", 60.0, 1, Counter({"kill -9 learner": 7})))
    watched = Counter({"watched: bf16": 9, "watched: a liar": 4, "accused: a liar": 3})
    add(record, Entry("audit", "abc", 60.0, 13, watched, ["a liar, number 3: not accused"]))
    kept = entries(record)
    assert [(one.part, one.commit, one.units) for one in kept] == [
        ("sim", "abc", 5),
        ("sim", "def", 4),
        ("chaos", "abc", 1),
        ("audit", "abc", 13),
    ]
    assert kept[0].counts["fault: bit rot"] == 5 and kept[0].failed == ["make sim SEED=9: invariant 6"]
    page = page_of(kept)
    assert "| seeds of the virtual world | 2 | 3 | 9 | 1 |" in page and "2.0 hours, 0 optimiser steps" in page
    assert "| workers watched by the audit | 1 | 1 | 13 | 1 |" in page


def test_the_page_shows_what_is_on_record(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    page.write_text(PAGE.read_text())
    write_page(entries(RECORD), page)
    made, shown = (text.split(BEGIN)[1].split(END)[0] for text in (page.read_text(), PAGE.read_text()))
    body = [line for line in made.splitlines() if line.startswith(("|", "- "))]
    assert body == [line for line in shown.splitlines() if line.startswith(("|", "- "))], "run `make soak SOAK_S=0`"
