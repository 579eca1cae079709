"""The learner's view of the data plane: what is trained on is the task's reward, less the punishment for length."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from echo2.base.errors import ConfigError
from echo2.learner.rollouts.prompts import SKIPS_MAX, Prompts
from echo2.learner.run_folder import RunFolder
from echo2.learner.startup import prepare
from echo2.tasks.built_in import SortDigits
from echo2.tasks.task import Reward, TaskInstance
from tests.unit.learner.fleet import options_for, prompts_for

THREE_DIGITS = {"name": "sort_digits", "args": {"digit_count": 3}}


@pytest.fixture
def model(model_path: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    return Path(shutil.copytree(model_path, tmp_path / "model"))


def reward_of(prompts: Prompts, *completions: list[int]) -> float:
    scored = asyncio.run(prompts.answer(0, completions, 10)).scored
    assert scored is not None and scored.reward is not None
    return scored.reward.value


@pytest.mark.parametrize(("buffer_tokens", "expected"), [(0, 1.0), (4, 0.75), (7, None)])
def test_overlong_completions_lose_reward_in_training_only(
    tmp_path: Path, model: Path, buffer_tokens: int, expected: float | None
) -> None:
    options = options_for(tmp_path, model, learner={"overlong_buffer_tokens": buffer_tokens}, task=THREE_DIGITS)
    if expected is None:
        with pytest.raises(ConfigError, match="expected at most sampling.max_new_tokens 6, got 7"):
            prompts_for(options)
        return
    prompts = prompts_for(options)
    instance = prompts.instance(prompts.split.train_index(0))
    token_ids = prompts.tokenizer.encode(instance.answer)
    assert len(token_ids) == 3, "one over the four tokens before the limit of six begin"
    assert reward_of(prompts, token_ids) == pytest.approx(expected)
    judged = asyncio.run(prompts.answer_instance(instance.index, [token_ids], 10)).scored
    assert judged is not None and judged.reward is not None and judged.reward.value == 1.0
    prompts.close()


class OddOnesAreLong(SortDigits):
    """Every other prompt has twelve digits and not three."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "123" * (4 if index % 2 else 1), "123")


def test_prompts_beyond_the_limit_are_passed_over_and_told_and_the_search_ends(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, limit = {"name": "tests.unit.learner.test_prompts:OddOnesAreLong"}, {"max_prompt_tokens": 9}
    prompts = prompts_for(options_for(tmp_path, model, task=task, sampling=limit))
    long = [cursor for cursor in range(20) if prompts.split.train_index(cursor) % 2]
    with caplog.at_level("WARNING", logger="echo2.learner"):
        taken = {prompts.next_wanted(cursor) for cursor in range(20)}
    assert len(long) >= 5 and not taken & set(long)
    assert "passed over: 12 tokens, above sampling.max_prompt_tokens of 9" in caplog.text
    assert len(prompts.draw(min(taken)).prompt_token_ids) == 3
    prompts.close()
    left_out = frozenset(prompts.split.train_index(cursor) for cursor in sorted(taken)[:2])
    fewer = prompts_for(replace(options_for(tmp_path, model, task=task, sampling=limit), left_out=left_out))
    assert {fewer.next_wanted(cursor) for cursor in range(20)} == taken - set(sorted(taken)[:2])
    fewer.close()
    all_long = {"name": "sort_digits", "args": {"digit_count": 12}}
    prompts = prompts_for(options_for(tmp_path, model, task=all_long, sampling=limit))
    assert prompts.next_wanted(5) == 5 + SKIPS_MAX
    with pytest.raises(ConfigError, match=r"expected at most 9 tokens, got 13; a larger sampling.max_prompt_tokens"):
        prompts.draw(5 + SKIPS_MAX)
    prompts.close()
    prompts = prompts_for(options_for(tmp_path, model, sampling={"max_new_tokens": 256}))
    with pytest.raises(ConfigError, match=r"within its context of 256 tokens, got up to 2\d\d"):
        prompts.draw(0)
    prompts.close()


def test_a_tokenizer_of_another_model_is_refused_with_both_numbers(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer of at most 40 tokens \(the model's embedding\), got \d+"):
        prompts_for(options_for(tmp_path, model), 40)
    with pytest.raises(ConfigError, match="expected a tokenizer beside the model"):
        prompts_for(options_for(tmp_path, tmp_path / "nowhere"))
    prompts = prompts_for(options_for(tmp_path, model))
    prompts.vocabulary_size = 5
    with pytest.raises(ConfigError, match="token ids below 5.* wrong tokenizer for this model"):
        prompts.draw(0)
    prompts.close()


class Ones(SortDigits):
    """Prompts that a pattern cannot match in any reasonable time."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "1" * 50_000 + "2", "1")


def test_a_prompt_on_which_the_tokenizer_breaks_is_named(tmp_path: Path, model: Path) -> None:
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:1|11)+$"), behavior="isolated")
    core.save(str(model / "tokenizer.json"))
    prompts = prompts_for(options_for(tmp_path, model, task={"name": "tests.unit.learner.test_prompts:Ones"}))
    with pytest.raises(
        ConfigError, match=r"prompt \d+ of task sort_digits: tokenizer: expected one that takes this text"
    ):
        prompts.next_wanted(0)
    prompts.close()


class Hinted(TaskInstance):
    """A user's own class, which cannot be made from its fields."""

    def __init__(self, index: int) -> None:
        TaskInstance.__init__(self, index, "3 1 2", "123")


class Tagged(SortDigits):
    """Pays for an answer between tags."""

    is_cheap = True

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return Hinted(index)

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return Reward(float("".join(completion_text.split()) == "<answer>4</answer>"))


@pytest.mark.parametrize("is_named_by", ["model", "template"])
def test_a_completion_ends_where_tokenizer_model_or_template_say_and_tags_stay_in_what_is_scored(
    tmp_path: Path, model: Path, is_named_by: str
) -> None:
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.add_special_tokens(["<answer>", "</answer>", "<turn_end>"])
    core.save(str(model / "tokenizer.json"))
    begin, close, end, four = (core.token_to_id(tag) for tag in ("<answer>", "</answer>", "<turn_end>", "4"))
    if is_named_by == "template":
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<turn_end>{% endfor %}")
    task = {"name": "tests.unit.learner.test_prompts:Tagged", "trusted_rewards": True}
    prompts = prompts_for(options_for(tmp_path, model, task=task), 100, (end,) if is_named_by == "model" else (1,))
    assert prompts.sampling.stop_token_ids == (1, end)
    assert reward_of(prompts, [begin, four, close, end]) == 1.0
    assert isinstance(prompts.instance(0), Hinted), "a single task's instances stay what it made"
    prompts.close()


def test_a_template_that_tells_the_date_tells_the_run_s_beginning_after_a_restart_too(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y%m%d%H%M%S') }}:{{ messages[0].content }}")
    drawn = []
    for now in (1.7e9, 1.8e9):
        monkeypatch.setattr("echo2.learner.run_folder.unix_now", lambda now=now: now)
        folder = RunFolder(tmp_path / "run")
        prepared = prepare(options_for(tmp_path / "run", model), folder)
        drawn.append(prepared.prompts.draw(0).prompt_token_ids)
        text = prepared.prompts.tokenizer.decode(drawn[-1]).replace(" ", "")
        assert text.startswith("20231114221320:")
        prepared.prompts.close()
        folder.release()
    assert drawn[0] == drawn[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["began"] == "2023-11-14T22:13:20+00:00"
