"""Task types: rewards are finite, specifications survive JSON."""

from __future__ import annotations

import math

import pytest

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.task import ChatMessage, Reward, TaskSpec, prompt_text, spec_from_json


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(TaskError, match="value: expected a finite number, got nan"):
        Reward(math.nan)
    with pytest.raises(TaskError, match="format"):
        Reward(1.0, {"format": math.inf})


def test_a_specification_survives_json_and_refuses_what_json_cannot_carry() -> None:
    spec = TaskSpec("reasoning_gym", {"dataset": "countdown", "options": {"min_numbers": 3}}, seed=7)
    assert spec_from_json(spec.to_json()) == spec
    with pytest.raises(ConfigError, match="JSON"):
        TaskSpec("x", {"a": object()}).to_json()
    with pytest.raises(ConfigError, match="JSON object"):
        spec_from_json("[]")


def test_a_chat_without_a_template_becomes_its_contents() -> None:
    assert prompt_text((ChatMessage("system", "Be brief."), ChatMessage("user", "1+1?"))) == "Be brief.\n1+1?"
    assert prompt_text("1+1?") == "1+1?"
