"""Mathematics: equal as mathematics is right, whatever it looks like; a bad reference is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.base.errors import TaskError
from echo2.tasks.mathematics import MathRow, MathTask, is_equal_answer

pytest.importorskip("math_verify")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    ("reference", "completion", "is_right"),
    [
        ("\\frac{1}{2}", "Therefore \\boxed{0.5}.", True),
        ("$\\frac{1}{2}$", "Therefore \\boxed{1/3}.", False),
        ("42", "The answer is 42.", True),
        ("42", "First \\boxed{41}, no: \\boxed{42}", True),
        ("42", "Perhaps \\boxed{42}, perhaps \\boxed{43}", False),
        ("42", "I do not know", False),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}", True),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", True),
        ("42", "", False),
        ("\\frac{1}{2^{99}}", "\\boxed{\\frac{1}{2^{98}}}", False),
        ("\\frac{1}{2^{99}}", "\\boxed{2^{-99}}", True),
        ("1.5 \\times 10^{-5}", "\\boxed{0.000015}", True),
        ("0.\\overline{3}", "\\boxed{\\frac{1}{3}}", True),
        ("0.1\\overline{6}", "\\boxed{1/6}", True),
        ("0.\\overline{3}", "\\boxed{0.3}", False),
        ("\\$18", "\\boxed{18}", True),
        ("\\$18", "\\boxed{19}", False),
        ("0.45", "\\boxed{45\\%}", True),
    ],
)
def test_answers_are_compared_as_mathematics(reference: str, completion: str, is_right: bool) -> None:
    assert is_equal_answer(reference, completion) is is_right


def test_a_row_becomes_an_instance_and_a_reference_that_means_nothing_is_an_error() -> None:
    task = MathTask([MathRow("1+1?", "2", "gsm8k"), MathRow("?", " ")], "math/x")
    instance = task.sample(0)
    assert (instance.prompt, instance.answer, instance.metadata["data_source"]) == ("1+1?", "2", "gsm8k")
    assert task.score(instance, "\\boxed{2}").value == 1.0
    with pytest.raises(TaskError, match="reference answer"):
        task.score(task.sample(1), "\\boxed{2}")
    with pytest.raises(TaskError, match="at least one row"):
        MathTask([], "math/empty")


def test_answers_as_models_and_data_sets_write_them() -> None:
    """Percent, fractions, intervals, units, signs, thousands, boxes, dates, digits of other scripts, repeating decimals."""
    pairs = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
    wrong = [pair for pair in pairs if is_equal_answer(pair["gold"], pair["said"]) is not pair["right"]]
    assert len(pairs) >= 150 and not wrong
