from __future__ import annotations

import json

import pytest

from echo2.cost_model.comparison import compare_run


def test_rows_with_both_numbers_are_compared_and_others_counted() -> None:
    rows = [
        {"step": 1, "utilisation/predicted": 1.0, "utilisation": 0.5},
        {"step": 2, "utilisation/predicted": 0.9, "utilisation": 0.95},
        {"step": 3, "utilisation/predicted": 0.9, "utilisation": 0.85, "reward": "x"},
        {"step": 4},
    ]
    lines = [json.dumps(row) for row in rows] + ['{"step": 5, "predi']
    (found,) = compare_run(lines, skip_rows=1)
    assert (found.name, found.rows, found.rows_without) == ("utilisation", 2, 1)
    assert found.bias == pytest.approx(0.0)
    assert found.mean_absolute_error == pytest.approx(0.05)
    assert compare_run([]) == []
