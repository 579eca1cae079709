"""Mathematics with a verified answer: rows of a data set, scored by math-verify.

Guarantees: an answer is right if it equals the reference as mathematics (1/2 and 0.5, {1,2} and {2,1}), judged from
the last boxed expression or, failing that, what math-verify finds. Leaves to others: reading files (runtime/
data_files), limits: a hostile expression can keep a computer-algebra system busy, so this is never called cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import TaskError
from echo2.tasks.task import Prompt, Reward, TaskInstance, checked_index

TEXT_CHARS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class MathRow:
    """One problem: prompt, reference answer and origin."""

    prompt: Prompt
    answer: str
    data_source: str = ""


class MathTask:
    """Problems of `rows`. `name` names the data set in messages and metrics."""

    def __init__(self, rows: Sequence[MathRow], name: str):
        if not rows:
            raise TaskError(f"math data set {name}: expected at least one row, got none")
        self._rows = rows
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return len(self._rows)

    @property
    def is_cheap(self) -> bool:
        return False

    def sample(self, index: int) -> TaskInstance:
        row = self._rows[checked_index(index, self.size, self._name)]
        return TaskInstance(index, row.prompt, row.answer, {"data_source": row.data_source})

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        if len(completion_text) > TEXT_CHARS_MAX:
            raise TaskError(f"{self._name}: expected at most {TEXT_CHARS_MAX} characters, got {len(completion_text)}")
        right = float(is_equal_answer(instance.answer, completion_text))
        return Reward(right, {"accuracy": right})


def is_equal_answer(reference: str, completion_text: str) -> bool:
    """Whether the completion's final answer equals the reference as mathematics."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise TaskError(f"math: the package math-verify is not installed ({error})") from error
    # math-verify's own time limits use SIGALRM, which only a main thread has; the reward pool has its own.
    gold = parse(_as_latex(reference), parsing_timeout=None)
    if not gold:
        raise TaskError(f"math: expected a reference answer that can be parsed, got {reference[:80]!r}")
    found = parse(_final(completion_text), parsing_timeout=None)
    return bool(found) and bool(verify(gold, found, timeout_seconds=None))


def _final(completion_text: str) -> str:
    """Drops the text before the last box: the parser would take all boxes together, so a completion could list many answers."""
    start = completion_text.rfind("\\boxed")
    return completion_text[start:] if start >= 0 else completion_text


def _as_latex(reference: str) -> str:
    """Wraps a bare reference (`\\frac{1}{2}`) in $ signs, as the parser needs; data sets have both forms."""
    return reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
