"""The learner's view of the data plane: what is trained on is the task's reward, less the punishment for length."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from echo2.base.errors import ConfigError, MalformedMessage, StateError, TaskError
from echo2.base.ids import Step, Version
from echo2.config.run import RunConfig
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts import prompts as rollout_prompts
from echo2.learner.rollouts.evaluation import Evaluations
from echo2.learner.rollouts.groups import Batch, Insertion, turn_of
from echo2.learner.rollouts.prompts import SKIPS_MAX, Conversations, Prompts, load_tokenizer
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.tasks.built_in import SortDigits
from echo2.tasks.chat_format import ChatFormat
from echo2.tasks.data_files import read_conversations
from echo2.tasks.registry import make_task
from echo2.tasks.rewards import RewardFailure
from echo2.tasks.split import TaskSplit
from echo2.tasks.task import Reward, TaskInstance, TaskSpec
from tests.fork_server import ROOT
from tests.unit.learner.fleet import (
    Run,
    crash_image,
    options_for,
    prepared_from,
    prompts_for,
    rows_of,
)
from tests.unit.learner.made import group_of, new_trainer, rollout_of
from tests.unit.learner.test_metrics import documented_names
from tests.unit.learner.tiny import make_tiny_model

THREE_DIGITS = {"name": "sort_digits", "args": {"digit_count": 3}}


@pytest.fixture
def model(model_path: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    return Path(shutil.copytree(model_path, tmp_path / "model"))


def reward_of(prompts: Prompts, *completions: list[int]) -> float:
    scored = asyncio.run(prompts.answer(0, completions, 10))
    assert scored is not None and scored.reward is not None
    return scored.reward.value


@pytest.mark.parametrize(("buffer_tokens", "expected"), [(0, 1.0), (4, 0.75), (7, None)])
def test_overlong_ones_lose_reward(tmp_path: Path, model: Path, buffer_tokens: int, expected: float | None) -> None:
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
    judged = asyncio.run(prompts.answer_instance(instance.index, [token_ids], 10))
    assert judged is not None and judged.reward is not None and judged.reward.value == 1.0


class OddOnesAreLong(SortDigits):
    """Every other prompt has twelve digits and not three."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "123" * (4 if index % 2 else 1), "123")


def test_a_prompt_is_made_once_to_be_looked_at_and_drawn(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, made = prompts_for(options_for(tmp_path, model, task=THREE_DIGITS)), list[int]()
    world = prompts.worlds[0]
    real = world.instance
    monkeypatch.setattr(world, "instance", lambda index: (made.append(index), real(index))[1])
    for cursor in range(3):
        assert prompts.next_wanted(cursor) == cursor and prompts.draw(cursor)[0]
    assert made == [prompts.split.train_index(cursor) for cursor in range(3)]


def test_prompts_beyond_a_limit_are_passed_over(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    task, limit = {"name": "tests.unit.learner.test_prompts:OddOnesAreLong"}, {"max_prompt_tokens": 9}
    short = options_for(tmp_path, model, task=task, sampling=limit)
    prompts = prompts_for(short)
    long = [cursor for cursor in range(20) if prompts.split.train_index(cursor) % 2]
    with caplog.at_level("WARNING", logger="echo2.learner"):
        taken = {prompts.next_wanted(cursor) for cursor in range(20)}
    assert len(long) >= 5 and not taken & set(long)
    assert "passed over: 12 tokens, above sampling.max_prompt_tokens of 9" in caplog.text
    assert len(prompts.draw(min(taken))[0]) == 3
    evaluations = Evaluations(tmp_path, short.config, prompts, 60.0)
    asked = [evaluations.draw(Version(0), number) for number in range(4)]
    lengths = [3 if prompts.split.held_out_index(0, number) % 2 == 0 else 0 for number in range(4)]
    assert [0 if each is None else len(each[0]) for each in asked] == lengths and 0 < sum(lengths) < 12
    long_answers = prompts_for(options_for(tmp_path, model, task=task, sampling={"max_new_tokens": 250}))
    assert {long_answers.next_wanted(cursor) for cursor in range(20)} == taken, "of a context of 256 tokens, 6 are left"
    left_out = frozenset(("", prompts.split.train_index(cursor)) for cursor in sorted(taken)[:2])
    fewer = prompts_for(replace(options_for(tmp_path, model, task=task, sampling=limit), left_out=left_out))
    assert {fewer.next_wanted(cursor) for cursor in range(20)} == taken - set(sorted(taken)[:2])
    all_long = {"name": "sort_digits", "args": {"digit_count": 12}}
    prompts = prompts_for(options_for(tmp_path, model, task=all_long, sampling=limit))
    assert prompts.next_wanted(5) == 5 + SKIPS_MAX
    with pytest.raises(ConfigError, match=r"got 13 tokens, above sampling.max_prompt_tokens of 9"):
        prompts.draw(5 + SKIPS_MAX)
    prompts = prompts_for(options_for(tmp_path, model, sampling={"max_new_tokens": 256}))
    with pytest.raises(ConfigError, match="above the 0 that sampling.max_new_tokens leaves of .* context of 256"):
        prompts.draw(0)


def test_a_tokenizer_of_another_model_is_refused_with_both_numbers(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer of at most 40 tokens \(the model's embedding\), got \d+"):
        prompts_for(options_for(tmp_path, model), 40)
    with pytest.raises(ConfigError, match="expected a tokenizer beside the model"):
        prompts_for(options_for(tmp_path, tmp_path / "nowhere"))
    tokenizer = load_tokenizer(str(model))
    vocabulary = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # no text has it
    tokenizer.save_pretrained(model)
    prompts = prompts_for(options_for(tmp_path, model), vocabulary)
    prompts.vocabulary_size = 5
    with pytest.raises(ConfigError, match="token ids below 5.* wrong tokenizer for this model"):
        prompts.draw(0)


class Ones(OddOnesAreLong):
    """Prompts that a pattern cannot match in any reasonable time."""

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, "1" * 50_000 + "2", "1")


def test_a_prompt_on_which_the_tokenizer_breaks_is_named(tmp_path: Path, model: Path) -> None:
    core = Tokenizer.from_file(str(model / "tokenizer.json"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:1|11)+$"), behavior="isolated")
    core.save(str(model / "tokenizer.json"))
    prompts = prompts_for(options_for(tmp_path, model, task={"name": "tests.unit.learner.test_prompts:Ones"}))
    with pytest.raises(ConfigError, match=r"prompt \d+ of task sort_digits: tokenizer: expected one that takes"):
        prompts.next_wanted(0)


class Hinted(TaskInstance):
    """A user's own class, which cannot be made from its fields."""

    def __init__(self, index: int) -> None:
        TaskInstance.__init__(self, index, "3 1 2", "123")


class Tagged(OddOnesAreLong):
    """Pays for an answer between tags."""

    is_cheap = True

    def sample(self, index: int) -> TaskInstance:
        return Hinted(index)

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return Reward(float("".join(completion_text.split()) == "<answer>4</answer>"))


@pytest.mark.parametrize("is_named_by", ["model", "template"])
def test_completions_end_where_model_or_template_say(tmp_path: Path, model: Path, is_named_by: str) -> None:
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


def test_a_template_s_date_is_the_run_s_beginning(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y%m%d%H%M%S') }}:{{ messages[0].content }}")
    drawn = []
    for now in (1.7e9, 1.8e9):
        monkeypatch.setattr("echo2.learner.options.unix_now", lambda now=now: now)
        prompts = prepared_from(options_for(tmp_path / "run", model)).prompts
        drawn.append(prompts.draw(0)[0])
        assert prompts.tokenizer.decode(drawn[-1]).replace(" ", "").startswith("20231114221320:")
    assert drawn[0] == drawn[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["began"] == "2023-11-14T22:13:20+00:00"


WORLDS = "tests.unit.learner.worlds:"
MIXTURE: dict[str, dict[str, Any]] = {
    "echoes": {"task": f"{WORLDS}Echoes", "weight": 2.0, "eval_prompts": 3},
    "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 2},
}


def test_the_worlds_tokens_are_read_and_not_trained_on(model_path: Path) -> None:
    rollouts = [rollout_of(range(10 + i, 15 + i), i, logprobs=[-4.0] * 5) for i in range(2)]
    said = ((Insertion(2, (40, 41, 42)), Insertion(4, (43,))), ())
    group = group_of((5, 6, 7), rollouts, (1.0, 0.0), said=said, max_new_tokens=16)
    trainer = new_trainer(model_path)
    whole = torch.tensor([[5, 6, 7, 10, 11, 40, 41, 42, 12, 13, 43, 14]])
    with torch.no_grad():
        logits = trainer.model.hf_model(input_ids=whole).logits[0].log_softmax(-1)
    expected = [logits[at - 1, whole[0, at]] for at in (3, 4, 8, 9, 11)]
    assert torch.allclose(trainer.logprobs((group,))[0], torch.stack(expected), atol=1e-4)
    result = trainer.step(Batch(Step(0), (group,)))
    assert result.sampled_tokens == 10 and sum(result.left_out) == 0
    as_bytes = batch_to_bytes(Batch(Step(0), (group,)))
    assert batch_from_bytes(as_bytes).groups[0].insertions == said
    with pytest.raises(MalformedMessage, match="expected a frame"):
        batch_from_bytes(as_bytes[:-3])


def test_an_episode_without_room_for_another_turn_is_worth_nothing(model_path: Path, tmp_path: Path) -> None:
    prompts = prompts_for(options_for(tmp_path, model_path, task={"name": f"{WORLDS}Endless"}))
    prompts.context_tokens = 256
    going_on = asyncio.run(prompts.answer(0, [(10, 11)], 20))
    assert going_on.reward is None and len(going_on.reply) > 12
    assert prompts.sampling.max_new_tokens == 6, "the room that the next turn needs"
    cut = asyncio.run(prompts.answer(0, [(10, 11)], 256 - 6 - len(going_on.reply)))
    assert cut is not None and cut.reward is not None and cut.reward.value == 0.0 and cut.reward.parts["cut"] == 1
    prompts.close()


# ---- mixtures


def mixed(folder: Path, model: Path, mixture: dict[str, dict[str, Any]] | None = None, **task: object) -> Any:
    task = {"name": "sort_digits", "mixture": MIXTURE if mixture is None else mixture, **task}
    return options_for(folder, model, task=task, staleness={"bound": 4, "kappa": 2}, turns_max=3)


def test_prompts_come_by_weight_and_are_answered_by_their_own_task(tmp_path: Path, model_path: Path) -> None:
    mixture: dict[str, dict[str, Any]] = {
        "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "weight": 3.0, "eval_prompts": 0},
        "sums": {"task": "sums", "eval_prompts": 0},
    }
    options = mixed(tmp_path, model_path, mixture)
    prompts = prompts_for(options)
    alone = {
        name: make_task(TaskSpec(entry.task, entry.args, prompts.seed))
        for name, entry in options.config.task.mixture.items()
    }
    assert Counter(prompts.task_of(cursor) for cursor in range(40)) == {"digits": 30, "sums": 10}
    seen = Counter[str]()
    for cursor in range(12):
        name = prompts.task_of(cursor)
        instance = prompts.instance(prompts.split.train_index(cursor))
        task = alone[name]
        own = task.sample(TaskSplit(task.size, 0, prompts.seed).train_index(seen[name]))
        seen[name] += 1
        assert (instance.prompt, instance.answer) == (own.prompt, own.answer)
        right = tuple(prompts.tokenizer.encode(own.answer))
        scored = asyncio.run(prompts.answer(cursor, [right], 10))
        assert scored is not None and scored.reward is not None
        assert scored.reward.value == task.score(own, prompts.chat.text_of(right)).value


def test_references_that_cannot_be_judged_are_left_out_of_each_set(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = mixed(tmp_path, model_path, eval_sets={"more": {"task": "sums", "prompts": 4}})
    monkeypatch.setattr(rollout_prompts, "check_rewards", lambda spec, containment: None)
    monkeypatch.setattr(rollout_prompts, "unjudgeable_references", lambda spec, containment: frozenset({3}))
    assert rollout_prompts.check_rewards_of(options).left_out == {("", 6), ("", 7), ("more", 3)}


def test_tokens_that_no_tokenizer_decodes_cost_their_completion_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(tmp_path, model, task=THREE_DIGITS)
    prompts = prompts_for(options)
    evaluations = Evaluations(tmp_path, options.config, prompts, 60.0)

    def broken(ids: list[int]) -> str:
        raise ConfigError("tokenizer: piece id is out of range")

    monkeypatch.setattr(prompts.chat, "text_of", broken)
    scored = asyncio.run(prompts.answer(0, [[59]], 10))
    assert scored.reward is None and scored.failure is RewardFailure.RAISED and "out of range" in scored.message
    evaluations.write_samples(group_of([5], [rollout_of([59], name="e00000000-00000")]))
    assert not (tmp_path / "samples.jsonl").exists()


def test_each_task_has_its_set_of_held_out_prompts_under_a_name_of_its_own(tmp_path: Path, model_path: Path) -> None:
    options = mixed(tmp_path, model_path)
    prompts = prompts_for(options)
    evaluations = Evaluations(tmp_path, options.config, prompts, 60.0)
    assert [(one.name, one.questions) for one in evaluations.sets] == [("echoes", 3), ("digits", 2)]
    asked = [evaluations.draw(Version(0), number)[0] for number in range(5)]
    held_out = [prompts.split.held_out_index(*at) for at in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    assert asked == [prompts.tokens_of(prompts.instance(index)) for index in held_out]
    assert [index % 2 for index in held_out] == [0, 0, 0, 1, 1]
    assert not set(held_out) & {prompts.split.train_index(cursor) for cursor in range(200)}

    def with_set(name: str, count: int) -> Evaluations:
        table = {"task": "sort_digits", "args": {"digit_count": 1}, "prompts": count}
        return Evaluations(tmp_path, mixed(tmp_path, model_path, eval_sets={name: table}).config, prompts, 60.0)

    assert [with_set("more", count).sets[-1].questions for count in (0, 4)] == [10, 4], "0: all that there are"
    for name, count, said in (
        ("echoes", 4, "names that differ, none called held_out or as a task of the mixture"),
        ("more", 11, "more: expected 1 to 10 prompts of sort_digits, got 11"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_set(name, count)
    further = [with_set("more", 10).problem(5 + place)[0].index for place in range(10)]
    assert sorted(further) == list(range(10)) != further, "each once, in an order of the run's seed"
    fewer = prompts_for(replace(options, left_out=frozenset({("more", further[0]), ("", further[1])})))
    more = {"task": "sort_digits", "args": {"digit_count": 1}, "prompts": 4}
    evaluations = Evaluations(tmp_path, mixed(tmp_path, model_path, eval_sets={"more": more}).config, fewer, 60.0)
    assert [evaluations.draw(Version(0), number) is None for number in (5, 6)] == [True, False]
    fewer.close()
    prompts.vocabulary_size = 3
    with pytest.raises(ConfigError, match="prompt [0-9] of task sort_digits: expected 1 or more token ids below 3"):
        with_set("more", 4).draw(Version(0), 5)
    prompts.close()


def test_a_mixture_with_an_environment_trains_each_and_stays_what_it_is(model_path: Path, tmp_path: Path) -> None:
    run = Run(mixed(tmp_path / "run", model_path))
    summary = asyncio.run(run.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8 and summary.over_stale_tokens == 0
    groups = Counter[str]()
    for row in rows_of(tmp_path / "run")[1:]:
        told = [name for name in MIXTURE if f"task/{name}/groups" in row]
        assert told and all(f"task/{name}/reward" in row for name in told)
        groups.update({name: row[f"task/{name}/groups"] for name in told})
        groups["all"] += row["groups"]
    assert groups["echoes"] + groups["digits"] == groups["all"] and groups["echoes"] > 0
    for row in rows_of(tmp_path / "run", "evaluations"):
        assert {"eval/echoes/reward", "eval/echoes/turns", "eval/digits/reward"} <= row.keys()
    offered = run.coordinator.groups
    later = {name: spec for name, spec in offered.items() if turn_of(name, 0).turn}
    assert max(turn_of(name, 0).turn for name in later) == 2, "a third turn was leased"
    assert all(spec.rollout_count == 1 and len(spec.prompt_token_ids) > 8 for spec in later.values())
    assert later.keys() & {name for name, reason in run.coordinator.closed if reason == "complete"}

    changed = MIXTURE | {"digits": MIXTURE["digits"] | {"weight": 5.0}}
    with pytest.raises(StateError, match="mixture"):
        prepared_from(mixed(tmp_path / "run", model_path, changed))


async def test_a_reward_reads_what_it_is_given_and_nothing_of_the_run(model_path: Path, tmp_path: Path) -> None:
    """Whose folder has the workers' keys, too, where all processes run on one machine."""
    data, key = tmp_path / "data.txt", tmp_path / "run" / "workers" / "w0" / "identity.key"
    key.parent.mkdir(parents=True)
    for path, reward in ((data, 1.0), (key, 0.0)):
        path.write_text("secret")
        task = {"name": "tests.unit.tasks.naughty:Reads", "args": {"where": f"file:{path}"}, "eval_prompts": 0}
        readable = {"readable": [str(tmp_path)], "trusted_rewards": False}
        prompts = prompts_for(options_for(tmp_path / "run" / "learner", model_path, task=task | readable))
        scored = await prompts.answer(0, [(5, 6)], 10)
        assert scored.reward is not None and scored.reward.value == reward, scored
        prompts.close()


# ---- the supervised warm start: what it reads, what it trains on, and a run that begins with one

CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n % 7)},
                  {"role": "user", "content": "and then?"}, {"role": "assistant", "content": str((n + 1) % 7)}]}
    for n in range(60)
]  # fmt: skip
STEPS = 4


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def options_of(folder: Path, model: Path, rows: Path) -> LearnerOptions:
    return options_for(
        folder, model, staleness={"bound": 2}, sampling={"max_prompt_tokens": 60},
        sft={"path": str(rows), "steps": STEPS, "lr": 5e-3}, learner={"steps": 6, "checkpoint_every_steps": 2},
    )  # fmt: skip


def test_the_models_turns_are_trained_on_and_nothing_else(chat_model: Path, tmp_path: Path) -> None:
    rows, learner = written(tmp_path / "rows.jsonl", ROWS), {"prompts_per_step": 2, "rollouts_per_prompt": 4}
    config = RunConfig.model_validate({"sft": {"path": str(rows)}, "learner": learner})
    tokenizer = load_tokenizer(str(chat_model))
    data = Conversations(config, ChatFormat(tokenizer), 200, len(tokenizer))
    batches = [data.batch(step) for step in range(2)]
    held_out = {group.cursor for group in data.held_out().groups}
    assert len(held_out) == 3 and not any(group.cursor in held_out for batch in batches for group in batch.groups)
    seen = [group.cursor for batch in batches for group in batch.groups]
    assert len(seen) == len(set(seen)) == 16, "each once before any comes again"
    group = batches[0].groups[0]
    text, trained_at = group.text_of(0)
    ids = [*group.spec.prompt_token_ids, *text]
    messages = ROWS[group.cursor]["messages"]
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)[: len(ids)], "the template's own tokens"
    said = [message["content"] + "<eos>" for message in messages if message["role"] == "assistant"]
    assert tokenizer.decode([text[at] for at in trained_at]).replace(" ", "") == "".join(said)
    labels = [-100] * len(ids)
    for at in trained_at:
        labels[len(group.spec.prompt_token_ids) + at] = text[at]
    trainer = new_trainer(chat_model, "float32", temperature=0.7, supervised_steps=5)
    alone = type(batches[0])(batches[0].step, (group,))
    with torch.no_grad():
        expected = float(trainer.model.hf_model(torch.tensor([ids]), labels=torch.tensor([labels])).loss)
    assert trainer.cross_entropy(alone) == pytest.approx(expected, rel=1e-5)
    result = trainer.step(alone)
    assert result.metrics is not None and result.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.cross_entropy(alone) < expected


def test_a_step_whose_conversations_are_all_too_long_takes_others(chat_model: Path, tmp_path: Path) -> None:
    """In the middle of a warm start it would end the run, and each start again at the same step."""
    long = [{"prompt": f"{n}?", "completion": "7" * 300} for n in range(20)]
    config = RunConfig.model_validate({
        "sft": {"path": str(written(tmp_path / "rows.jsonl", [*ROWS[:20], *long]))},
        "learner": {"prompts_per_step": 1, "rollouts_per_prompt": 1},
    })  # fmt: skip
    tokenizer = load_tokenizer(str(chat_model))
    data, again = (Conversations(config, ChatFormat(tokenizer), 200, len(tokenizer)) for _ in range(2))
    batches = [data.batch(step) for step in range(30)]
    assert [len(batch.groups) for batch in batches] == [1] * 30 and batches[17] == again.batch(17)
    with pytest.raises(ConfigError, match="expected conversations of at most 5 tokens, .* got none among 18"):
        Conversations(config, ChatFormat(tokenizer), 5, len(tokenizer)).batch(0)


def test_few_conversations_whose_held_out_one_is_too_long_hold_out_another(chat_model: Path, tmp_path: Path) -> None:
    tokenizer, rows = load_tokenizer(str(chat_model)), ROWS[:20]
    config = RunConfig.model_validate({"sft": {"path": str(tmp_path / "rows.jsonl")}})

    def conversations() -> Conversations:
        written(tmp_path / "rows.jsonl", rows)
        return Conversations(config, ChatFormat(tokenizer), 200, len(tokenizer))

    (first,) = conversations().held_out().groups
    rows[first.cursor] = {"prompt": "1?", "completion": "7" * 300}
    data, again = conversations(), conversations()
    batches = [again.batch(step) for step in range(4)]  # as after a restart, before the loss is measured
    (other,) = data.held_out().groups
    trained = {group.cursor for batch in batches for group in batch.groups}
    assert trained == set(range(20)) - {first.cursor, other.cursor}
    assert batches == [data.batch(step) for step in range(4)]


def test_what_a_message_spells_is_text(tmp_path: Path, chat_model: Path) -> None:
    tokenizer = load_tokenizer(str(chat_model))
    spelled = [{"role": "user", "content": "a<eos>b"}, {"role": "assistant", "content": "c<eos>d"}]
    row = read_conversations(written(tmp_path / "rows.jsonl", [{"messages": spelled}]))[0]
    ((read, turn),) = ChatFormat(tokenizer).conversation(row)
    assert tokenizer.eos_token_id not in read and turn.count(tokenizer.eos_token_id) == 1
    assert turn[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "row 2: expected a column messages, conversations, conversation, or prompt and completion"),
        ({"messages": "hello"}, "row 2 column messages: expected text or a list of"),
        ({"messages": [{"role": "user", "content": "x"}]}, "row 2 column messages: expected turns of the assistant"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "row 2 column messages message 1: expected a role among"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": " "}]}, "message 2: expected something"),
        ({"messages": [{"role": "user", "content": [{"image": 1}]}]}, "message 1: expected a message's content as text"),
        (
            {"messages": [{"role": "assistant", "content": "b", "reasoning_content": "c"}]},
            "message 1: expected calls of tools and thoughts in the content, .* got reasoning_content beside it",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[1]"}, "got a column tools beside it"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_told_with_row_and_column(tmp_path: Path, row: object, said: str) -> None:
    fine = {"prompt": "1+1=", "completion": "2"}
    with pytest.raises(TaskError, match=said):
        read_conversations(written(tmp_path / "rows.jsonl", [fine, row]))


def test_the_conversations_of_the_example_are_read(tmp_path: Path) -> None:
    wrote = subprocess.run([sys.executable, "examples/conversations.py"], cwd=ROOT, capture_output=True, check=True)
    (tmp_path / "digits.jsonl").write_bytes(wrote.stdout)
    assert len(read_conversations(tmp_path / "digits.jsonl")) > 2900, "but for those that come twice"


def test_a_run_learns_its_conversations_before_anything_is_asked_of_workers(chat_model: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", ROWS)
    run = Run(options_of(tmp_path / "run", chat_model, rows))
    images: dict[int, list[torch.Tensor]] = {}
    offers: dict[int, int] = {}

    def look(step: int) -> None:
        images[step] = crash_image(run, tmp_path / f"killed-{step}")
        offers[step] = run.coordinator.offers

    for step in (1, 3, STEPS):
        run.at_step[step] = lambda step=step: look(step) if step not in images else None
    summary = asyncio.run(run.finish())
    assert summary.is_finished and summary.over_stale_tokens == 0
    assert set(offers.values()) == {0} and run.coordinator.offers > 0
    assert run.follower.versions[1] == (STEPS, 0), "the first version is what the warm start made of the base"
    told = [report.waits_for for report in run.coordinator.reports if report.waits_for]
    assert any("supervised warm start: step 3 of 4" in text for text in told)
    metrics = rows_of(run.options.folder)
    assert [row["step"] for row in metrics] == list(range(7))
    assert metrics[STEPS]["supervised/held_out_loss"] < metrics[0]["supervised/held_out_loss"] - 0.1
    names = {name for row in metrics[: STEPS + 1] for name in row}
    assert names <= documented_names() and "reward/mean" in metrics[STEPS + 1] and "reward/mean" not in metrics[STEPS]
    for step in (1, 3, STEPS):
        again = prepared_from(options_of(tmp_path / f"killed-{step}", chat_model, rows))
        assert again.conversations is not None
        while again.team.step_count < step:
            again.team.step(again.conversations.batch(again.team.step_count))
        masters = again.model.masters  # type: ignore[attr-defined]
        assert all(map(torch.equal, images[step], masters)), f"killed after step {step}"
    stopped = Run(options_of(tmp_path / "stopped", chat_model, rows))
    stopped.at_step[1] = stopped.daemon.stop
    assert asyncio.run(stopped.finish(worker_count=0)).steps == 1 and not stopped.coordinator.offers


def test_a_run_that_began_without_a_warm_start_or_a_teacher_gets_none(chat_model: Path, tmp_path: Path) -> None:
    """Steps that are recorded would else be trained again as others."""
    rows = written(tmp_path / "rows.jsonl", ROWS)
    prepared_from(options_for(tmp_path / "run", chat_model))
    with pytest.raises(StateError, match="expected sft null as when the run began, got"):
        prepared_from(options_of(tmp_path / "run", chat_model, rows))
    with pytest.raises(StateError, match='expected teacher "" as when the run began, got'):
        prepared_from(options_for(tmp_path / "run", chat_model, learner={"teacher": str(chat_model)}))
