"""The learner's view of the data plane: what is trained on is the task's reward, less the punishment for length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from echo2.base.errors import ConfigError
from echo2.learner.rollouts.prompts import SKIPS_MAX, Prompts
from echo2.learner.run_folder import RunFolder
from echo2.learner.startup import prepare
from echo2.tasks.built_in import SortDigits
from echo2.tasks.task import Reward, TaskInstance
from tests.unit.learner.fleet import options_for
from tests.unit.learner.tiny import make_tiny_model


@pytest.mark.parametrize(("buffer_tokens", "expected"), [(0, 1.0), (4, 0.75)])
def test_overlong_completions_lose_reward_in_training_only(tmp_path: Path, buffer_tokens: int, expected: float) -> None:
    task = {"name": "sort_digits", "args": {"digit_count": 3}}
    model = make_tiny_model(tmp_path / "model")
    options = options_for(tmp_path, model, learner={"overlong_buffer_tokens": buffer_tokens}, task=task)
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    instance = prompts.world.instance(prompts.split.train_index(0))
    token_ids = prompts.tokenizer.encode(instance.answer)
    assert len(token_ids) == 3, "one over the four tokens before the limit of six begin"
    trained = asyncio.run(prompts.answer(0, [token_ids], 10)).scored
    assert trained is not None and trained.reward is not None and trained.reward.value == pytest.approx(expected)
    judged = asyncio.run(prompts.answer_instance(instance.index, [token_ids], 10)).scored
    assert judged is not None and judged.reward is not None and judged.reward.value == 1.0
    prompts.close()


def test_prompts_beyond_the_limit_are_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = {"name": "tests.unit.learner.test_prompts:OddOnesAreLong"}
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"), task=task, sampling={"max_prompt_tokens": 9})
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


def test_where_every_prompt_is_too_long_the_search_for_another_ends(tmp_path: Path) -> None:
    task = {"name": "sort_digits", "args": {"digit_count": 12}}
    options = options_for(tmp_path, make_tiny_model(tmp_path / "model"), task=task, sampling={"max_prompt_tokens": 9})
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    assert prompts.next_wanted(5) == 5 + SKIPS_MAX
    with pytest.raises(ConfigError, match=r"expected at most 9 tokens"):
        prompts.draw(5 + SKIPS_MAX)
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


def test_a_prompt_on_which_the_tokenizer_breaks_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:1|11)+$"), behavior="isolated")
    core.save(str(model / "tokenizer.json"))
    options = options_for(tmp_path, model, task={"name": "tests.unit.learner.test_prompts:Ones"})
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    with pytest.raises(
        ConfigError, match=r"prompt \d+ of task sort_digits: tokenizer: expected one that takes this text"
    ):
        prompts.next_wanted(0)
    prompts.close()


def test_completions_end_where_tokenizer_or_model_say_and_tags_stay_in_their_text(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.add_special_tokens(["<answer>", "</answer>", "<turn_end>"])
    core.save(str(model / "tokenizer.json"))
    begin, close, end = (core.token_to_id(tag) for tag in ("<answer>", "</answer>", "<turn_end>"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    task = {"name": "tests.unit.learner.test_prompts:Tagged", "trusted_rewards": True}
    prompts = Prompts(options_for(tmp_path, model, task=task), vocabulary_size=100, stop_token_ids=[end])
    assert prompts.sampling.stop_token_ids == (1, end)
    four = core.token_to_id("4")
    completion = [begin, four, close, end]
    assert "".join(prompts.text_of(completion).split()) == "<answer>4</answer>"
    scored = asyncio.run(prompts.answer(0, [completion], 10)).scored
    assert scored is not None and scored.reward is not None and scored.reward.value == 1.0
    prompts.close()


def test_a_turn_end_that_the_template_alone_names_is_left_out_of_what_is_scored(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.add_special_tokens(["<turn_end>"])
    core.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<turn_end>{% endfor %}")
    options = options_for(tmp_path, model, task={"name": "sort_digits", "args": {"digit_count": 3}})
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    end = core.token_to_id("<turn_end>")
    assert prompts.sampling.stop_token_ids == (1, end)
    instance = prompts.world.instance(prompts.split.train_index(0))
    scored = asyncio.run(prompts.answer(0, [[*prompts.tokenizer.encode(instance.answer), end]], 10)).scored
    assert scored is not None and scored.reward is not None and scored.reward.value == 1.0
    prompts.close()


class Tagged(SortDigits):
    """Pays for an answer between tags."""

    is_cheap = True

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return Reward(float("".join(completion_text.split()) == "<answer>4</answer>"))


class Ones(SortDigits):
    """Prompts that a pattern cannot match in any reasonable time."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "1" * 50_000 + "2", "1")


def test_a_template_that_tells_the_date_tells_the_run_s_beginning_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
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
