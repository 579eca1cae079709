"""The counts of `make size`."""

from __future__ import annotations

from tests.size import constants


def test_a_constant_has_a_reason_where_a_comment_stands_beside_it() -> None:
    source = "A = 1\n# Why.\nB = 1\nC_MAX: int = 3  # why\nD = (  # why\n 4,\n)\nlower = 5\n_G = {\n 1: 2,\n}\n"
    assert constants(source) == (5, 2, 2)
    assert constants(
        'A, B = 1, 2 << 3\n"""Why."""\nNAMES = ("a", "b")\nT = TypeVar("T")\nC = MINUTE * 2\nD = -1\n'
    ) == (5, 3, 1)
