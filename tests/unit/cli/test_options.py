from __future__ import annotations

import pytest

from echo2.cli.main import main
from echo2.cli.options import with_values


def test_the_value_of_an_option_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--preset", "wan", "--learner.lr", "2e-6", "--plain"]) == 0
    assert "lr = 2e-06" in capsys.readouterr().out
    assert with_values(["--a.b", "1", "x", "--a.c", "-2", "--a.d", "--e", "f"]) == [
        "--a.b=1", "x", "--a.c=-2", "--a.d", "--e", "f",
    ]  # fmt: skip
