"""Mathematics: equal as mathematics is right, whatever it looks like; a bad reference is an error."""

import json
from pathlib import Path

import pytest

from echo2.base.errors import TaskError
from echo2.tasks.mathematics import MathRow, MathTask, is_equal_answer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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
