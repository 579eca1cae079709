"""The learner's view of the data plane: what is trained on is the task's reward, less the punishment for length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo2.learner.runtime.prompts import Prompts
from tests.unit.learner.fleet import options_for
from tests.unit.learner.tiny import make_tiny_model


@pytest.mark.parametrize(("buffer_tokens", "expected"), [(0, 1.0), (4, 0.75)])
def test_overlong_completions_lose_reward_in_training_only(tmp_path: Path, buffer_tokens: int, expected: float) -> None:
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"), overlong_buffer_tokens=buffer_tokens)
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    instance = prompts.task.sample(prompts.split.train_index(0))
    token_ids = prompts.tokenizer.encode(instance.answer)
    assert len(token_ids) == 3, "one over the four tokens before the limit of six begin"
    trained = asyncio.run(prompts.score(0, token_ids))
    assert trained.reward is not None and trained.reward.value == pytest.approx(expected)
    judged = asyncio.run(prompts.score_instance(instance.index, token_ids))
    assert judged.reward is not None and judged.reward.value == 1.0
    prompts.close()
