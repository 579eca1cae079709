"""The learner's view of the data plane: what is trained on is the task's reward, less the punishment for length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.learner.runtime.options import TaskOptions
from echo2.learner.runtime.prompts import SKIPS_MAX, Prompts
from echo2.tasks.sort_digits import SortDigits
from echo2.tasks.task import TaskInstance
from tests.unit.learner.fleet import options_for
from tests.unit.learner.tiny import make_tiny_model


@pytest.mark.parametrize(("buffer_tokens", "expected"), [(0, 1.0), (4, 0.75)])
def test_overlong_completions_lose_reward_in_training_only(tmp_path: Path, buffer_tokens: int, expected: float) -> None:
    task = TaskOptions("sort_digits", {"digit_count": 3})
    model = make_tiny_model(tmp_path / "model")
    options = options_for(tmp_path, model, overlong_buffer_tokens=buffer_tokens, task=task)
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    instance = prompts.world.instance(prompts.split.train_index(0))
    token_ids = prompts.tokenizer.encode(instance.answer)
    assert len(token_ids) == 3, "one over the four tokens before the limit of six begin"
    trained = asyncio.run(prompts.answer(0, [token_ids], 10)).scored
    assert trained is not None and trained.reward is not None and trained.reward.value == pytest.approx(expected)
    judged = asyncio.run(prompts.answer_instance(instance.index, [token_ids], 10)).scored
    assert judged is not None and judged.reward is not None and judged.reward.value == 1.0
    prompts.close()


def test_the_curriculum_passes_over_mastered_prompts_within_a_bound(tmp_path: Path) -> None:
    task = TaskOptions("sort_digits", {"digit_count": 1}, "success_band")
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"), task=task)
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    assert [prompts.next_wanted(cursor) for cursor in range(6)] == list(range(6))
    for cursor in range(6):
        prompts.fared(cursor, [1.0, 1.0])
    taken = [prompts.next_wanted(cursor) for cursor in range(100)]
    assert all(cursor <= found <= cursor + SKIPS_MAX for cursor, found in enumerate(taken))
    assert sum(found > cursor for cursor, found in enumerate(taken)) > 50
    prompts.close()


def test_prompts_beyond_the_limit_are_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = TaskOptions("tests.unit.learner.test_prompts:OddOnesAreLong")
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"), task=task, prompt_tokens_max=9)
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    long = [cursor for cursor in range(20) if prompts.split.train_index(cursor) % 2]
    with caplog.at_level("WARNING", logger="echo2.learner"):
        taken = {prompts.next_wanted(cursor) for cursor in range(20)}
    assert len(long) >= 5 and not taken & set(long)
    assert "passed over: 12 tokens, above sampling.max_prompt_tokens of 9" in caplog.text
    assert len(prompts.draw(min(taken)).prompt_token_ids) == 3
    with pytest.raises(ConfigError, match=r"expected at most 9 tokens, got 12; a larger sampling.max_prompt_tokens"):
        prompts.draw(long[0])
    prompts.close()


class OddOnesAreLong(SortDigits):
    """Every other prompt has twelve digits and not three."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "123" * (4 if index % 2 else 1), "123")


def test_a_tokenizer_of_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"tokenizer of at most 40 tokens \(the model's embedding\), got \d+"):
        Prompts(options, vocabulary_size=40, stop_token_ids=[1])
    with pytest.raises(ConfigError, match="expected a tokenizer beside the model"):
        Prompts(options_for(tmp_path, tmp_path / "nowhere"), vocabulary_size=40, stop_token_ids=[1])


def test_prompts_whose_ids_the_model_lacks_are_refused(tmp_path: Path) -> None:
    prompts = Prompts(
        options_for(tmp_path, make_tiny_model(tmp_path / "model")), vocabulary_size=100, stop_token_ids=[1]
    )
    prompts.vocabulary_size = 5
    with pytest.raises(ConfigError, match="token ids below 5.* wrong tokenizer for this model"):
        prompts.draw(0)
    prompts.close()
