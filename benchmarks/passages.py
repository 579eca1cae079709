"""Writes what a benchmark found into a page, between the marks that it keeps there."""

from __future__ import annotations

import re
from pathlib import Path


def write_passage(page: Path, place: re.Pattern[str], text: str) -> None:
    """Replaces the one `place` of the page. Raises SystemExit, with the page's name, if there is none or more than one."""
    written, count = place.subn(lambda _: text, page.read_text())
    if count != 1:
        raise SystemExit(f"{page}: expected one place for the passage, found {count}")
    page.write_text(written)
