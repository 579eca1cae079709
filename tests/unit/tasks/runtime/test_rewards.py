"""Rewards: both scorers keep one contract, and a reward that misbehaves costs only itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from echo2.base.errors import LimitExceeded, TaskError
from echo2.tasks.runtime.registry import make_task
from echo2.tasks.runtime.rewards import (
    InProcessScorer,
    RewardFailure,
    RewardLimits,
    RewardPool,
    Scorer,
    make_scorer,
)
from echo2.tasks.task import TaskSpec

SPEC = TaskSpec("tests.unit.tasks.naughty:Naughty", {}, seed=3)
CHEAP_SPEC = TaskSpec("tests.unit.tasks.naughty:Naughty", {"is_cheap": True}, seed=3)
LIMITS = RewardLimits(timeout_s=3.0, memory_bytes=2 << 30, process_count=2)
WAIT_S = 120.0


@contextmanager
def opened(spec: TaskSpec, limits: RewardLimits = LIMITS) -> Iterator[Scorer]:
    scorer = make_scorer(make_task(spec), spec, limits)
    try:
        yield scorer
    finally:
        scorer.close()


@pytest.mark.parametrize("spec", [SPEC, CHEAP_SPEC], ids=["pool", "in process"])
def test_rewards_come_with_their_parts_and_a_raising_one_costs_only_itself(spec: TaskSpec) -> None:
    with opened(spec) as scorer:
        futures = [scorer.submit(index, text) for index, text in enumerate(["fine", "raise", "nan", "chatter", "fine"])]
        results = [future.result(WAIT_S) for future in futures]
        assert [r.reward.value if r.reward else None for r in results] == [1.0, None, None, 4.0, 5.0]
        assert results[0].reward is not None and results[0].reward.parts == {"seed": 3.0}
        assert [r.failure for r in results[1:3]] == [RewardFailure.RAISED, RewardFailure.RAISED]
        assert results[1].message == "ValueError: no such answer"
        assert (scorer.counts().scored, scorer.counts().raised) == (3, 2)


def test_rewards_that_hang_eat_memory_or_kill_their_process_are_counted_and_the_pool_goes_on() -> None:
    with opened(SPEC) as scorer:
        texts = ["hang", "eat", "die", "fine", "hang", "fine"]
        futures = [scorer.submit(index, text) for index, text in enumerate(texts)]
        results = [future.result(WAIT_S) for future in futures]
        assert [r.failure for r in results] == [
            RewardFailure.TIMED_OUT,
            RewardFailure.OUT_OF_MEMORY,
            RewardFailure.DIED,
            None,
            RewardFailure.TIMED_OUT,
            None,
        ]
        counts = scorer.counts()
        assert (counts.scored, counts.timed_out, counts.out_of_memory, counts.died) == (2, 2, 1, 1)


def test_a_task_that_cannot_be_made_in_the_child_is_reported_with_its_reason() -> None:
    pool = RewardPool(TaskSpec("no.such:Task"), LIMITS)
    try:
        result = pool.submit(0, "x").result(WAIT_S)
        assert result.failure is RewardFailure.DIED
        assert "expected an importable module no.such" in result.message
    finally:
        pool.close()


def test_the_queue_is_bounded_and_a_closed_pool_refuses_and_cancels() -> None:
    pool = RewardPool(SPEC, RewardLimits(timeout_s=0.5, process_count=1, queue_max=2))
    futures = []
    with pytest.raises(LimitExceeded, match="at most 2 rewards waiting"):
        for _ in range(10):
            futures.append(pool.submit(0, "hang"))
    pool.close()
    assert futures[-1].cancelled()
    with pytest.raises(TaskError, match="closed"):
        pool.submit(0, "fine")


def test_a_completion_over_the_limit_costs_only_itself() -> None:
    with opened(SPEC) as scorer:
        assert scorer.submit(0, "x" * (17 << 20)).result(WAIT_S).failure is RewardFailure.TOO_LARGE
        assert scorer.submit(0, "fine").result(WAIT_S).failure is None


def test_cheap_tasks_stay_in_this_process_and_others_do_not() -> None:
    with opened(CHEAP_SPEC) as cheap, opened(SPEC) as dear:
        assert isinstance(cheap, InProcessScorer)
        assert isinstance(dear, RewardPool)


def test_environments_are_stepped_in_the_pool_whichever_process_answers() -> None:
    pool = RewardPool(TaskSpec("calculator", {"turns_max": 3}, seed=1), LIMITS)
    try:
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        steps = [pool.submit_step(index, [call]) for index in range(4)]
        for step in steps:
            observation = step.result(WAIT_S).observation
            assert observation is not None
            assert observation.messages[0].content == "42"
        ends = [pool.submit_step(index, [call, "I give up"]) for index in range(4)]
        for end in ends:
            observation = end.result(WAIT_S).observation
            assert observation is not None and observation.reward is not None
            assert observation.reward.value == 0.0
        late = pool.submit_step(0, [call, "I give up", "again"]).result(WAIT_S)
        assert late.failure is RewardFailure.RAISED and "no completion after its end" in late.message
    finally:
        pool.close()


def test_real_scorers_fit_within_the_default_limits() -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sums.jsonl"
        path.write_text(json.dumps({"prompt": "1/4+1/4?", "answer": "0.5"}) + "\n")
        specs = [TaskSpec("math", {"path": str(path)}), TaskSpec("reasoning_gym", {"dataset": "spell_backward"})]
        answers = ["\\boxed{\\frac{1}{2}}", make_task(specs[1]).sample(0).answer]
        for spec, answer in zip(specs, answers, strict=True):
            with opened(spec, RewardLimits()) as scorer:
                for text, expected in ((answer, 1.0), ("no idea", 0.0)):
                    result = scorer.submit(0, text).result(WAIT_S)
                    assert result.reward is not None, result.message
                    assert result.reward.value == pytest.approx(expected, abs=0.3)
