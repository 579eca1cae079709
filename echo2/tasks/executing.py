"""Which scorers execute text: the data sets of reasoning-gym that `eval` or parse, as a program, what they are given.

Guarantees: the list is what a reading of reasoning-gym's sources finds, through all that its scorers call
(`tests/security/test_no_foreign_code.py` compares them). A few of them execute the problem's own text alone; they are listed
all the same. Leaves to others: containing them, which is done for every data set (runtime/rewards).
"""

from __future__ import annotations

from collections.abc import Mapping

EXECUTING_DATA_SETS = frozenset({
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
})  # fmt: skip


PLAIN_TASKS = frozenset({"sort_digits"})
"""Tasks whose score is a plain comparison of echo2's own: scored in the learner's process."""


def text_executing_scorer(task_name: str, args: Mapping[str, object]) -> str:
    """The name of the task's scorer if it is known to execute text, else nothing."""
    data_set = args.get("dataset")
    if task_name == "reasoning_gym" and data_set in EXECUTING_DATA_SETS:
        return f"reasoning_gym/{data_set}"
    return ""


def trusted_text(task_name: str, args: Mapping[str, object]) -> str:
    """What it means to trust this task's rewards."""
    executing = text_executing_scorer(task_name, args)
    return (
        "task.trusted_rewards is on: rewards are not contained, and what a completion makes them do is done with the "
        "learner's rights" + (f"; {executing} EXECUTES text of completions" if executing else "")
    )
