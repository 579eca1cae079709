"""Lists the scorers that execute text: reasoning-gym data sets that `eval` their input or parse it as a program.

Guarantees: the list matches an analysis of reasoning-gym's sources through everything that its scorers call
(`tests/security/test_no_foreign_code.py` compares the two). A few of them execute only the problem's own text; they are listed too.
Leaves to others: containment, which covers every data set (runtime/rewards).
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


PLAIN_TASKS = frozenset({"sort_digits", "sums"})
"""Tasks that echo2 scores by plain comparison, in the learner's process."""


def text_executing_scorer(task_name: str, args: Mapping[str, object]) -> str:
    """Returns the name of the task's scorer if it is known to execute text, else an empty string."""
    data_set = args.get("dataset")
    if task_name == "reasoning_gym" and data_set in EXECUTING_DATA_SETS:
        return f"reasoning_gym/{data_set}"
    return ""


def trusted_text(task_name: str, args: Mapping[str, object]) -> str:
    """Returns the warning about trusting this task's rewards."""
    executing = text_executing_scorer(task_name, args)
    return (
        "task.trusted_rewards is on: rewards are not contained, and what a completion makes them do is done with the "
        "learner's rights" + (f"; {executing} EXECUTES text of completions" if executing else "")
    )
