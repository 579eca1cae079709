"""The counts of `make size`."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.size import ROOT, constants


def test_a_constant_has_a_reason_where_a_comment_stands_beside_it() -> None:
    source = "A = 1\n# Why.\nB = 1\nC_MAX: int = 3  # why\nD = (  # why\n 4,\n)\nlower = 5\n_G = {\n 1: 2,\n}\n"
    assert constants(source) == (5, 2, 2)
    assert constants(
        'A, B = 1, 2 << 3\n"""Why."""\nNAMES = ("a", "b")\nT = TypeVar("T")\nC = MINUTE * 2\nD = -1\n'
    ) == (5, 3, 1)


def test_the_command_prints_what_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.size", "--json"], cwd=ROOT, capture_output=True, check=True)
    figures = json.loads(done.stdout)
    options = (ROOT / "tests" / "unit" / "config" / "options.txt").read_text().split()
    assert figures["options"] == len(options)
    assert 0 < figures["product files"] < figures["product lines"]
    assert figures["module constants without a reason"] <= figures["module constants"]
