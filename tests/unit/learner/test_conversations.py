"""The supervised warm start: what it reads, what it trains on, and a run that begins with one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.errors import TaskError
from echo2.config.run import RunConfig
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.prompts import Conversations, load_tokenizer
from echo2.tasks.chat_format import ChatFormat
from echo2.tasks.data_files import read_conversations
from tests.fork_server import ROOT
from tests.unit.learner.fleet import Run, crash_image, go, options_for, prepared_from, rows_of
from tests.unit.learner.made import new_trainer
from tests.unit.learner.test_metrics import documented_names
from tests.unit.learner.tiny import make_tiny_model

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
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_the_models_turns_are_trained_on_and_nothing_else(model_path: Path, tmp_path: Path) -> None:
    rows, learner = written(tmp_path / "rows.jsonl", ROWS), {"prompts_per_step": 2, "rollouts_per_prompt": 4}
    config = RunConfig.model_validate({"sft": {"path": str(rows)}, "learner": learner})
    tokenizer = load_tokenizer(str(model_path))
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
    trainer = new_trainer(model_path, "float32", temperature=0.7, supervised_steps=5)
    alone = type(batches[0])(batches[0].step, (group,))
    with torch.no_grad():
        expected = float(trainer.model.hf_model(torch.tensor([ids]), labels=torch.tensor([labels])).loss)
    assert trainer.cross_entropy(alone) == pytest.approx(expected, rel=1e-5)
    result = trainer.step(alone)
    assert result.metrics is not None and result.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.cross_entropy(alone) < expected


def test_what_a_message_spells_is_text(tmp_path: Path, model_path: Path) -> None:
    tokenizer = load_tokenizer(str(model_path))
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
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_told_with_row_and_column(tmp_path: Path, row: object, said: str) -> None:
    fine = {"prompt": "1+1=", "completion": "2"}
    with pytest.raises(TaskError) as refusal:
        read_conversations(written(tmp_path / "rows.jsonl", [fine, row]))
    assert said in str(refusal.value)


def test_the_conversations_of_the_example_are_read(tmp_path: Path) -> None:
    wrote = subprocess.run([sys.executable, "examples/conversations.py"], cwd=ROOT, capture_output=True, check=True)
    (tmp_path / "digits.jsonl").write_bytes(wrote.stdout)
    assert len(read_conversations(tmp_path / "digits.jsonl")) > 2900, "but for those that come twice"


def test_a_run_learns_its_conversations_before_anything_is_asked_of_workers(model_path: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", ROWS)
    run = Run(options_of(tmp_path / "run", model_path, rows))
    images: dict[int, dict[str, Any]] = {}
    offers: dict[int, int] = {}

    def look(step: int) -> None:
        images[step] = crash_image(run, tmp_path / f"killed-{step}")
        offers[step] = run.coordinator.offers

    for step in (1, 3, STEPS):
        run.at_step[step] = lambda step=step: look(step) if step not in images else None
    summary = go(run.finish())
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
        again = prepared_from(options_of(tmp_path / f"killed-{step}", model_path, rows))
        assert again.conversations is not None
        while again.team.step_count < step:
            again.team.step(again.conversations.batch(again.team.step_count))
        masters = again.model.masters  # type: ignore[attr-defined]
        assert all(map(torch.equal, images[step]["masters"], masters)), f"killed after step {step}"
