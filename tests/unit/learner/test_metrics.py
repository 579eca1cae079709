"""What a run keeps for people: rows, recent rollouts, its folder."""

import asyncio
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from google.protobuf.json_format import Parse

from echo2.base.errors import EchoError, StateError
from echo2.base.ids import PeerId, Step
from echo2.config.run import OptimizerState
from echo2.learner import startup
from echo2.learner.metrics import (
    JsonLines,
    PrometheusEndpoint,
    RunFacts,
    StepTimes,
    Utilisation,
    gauge_name,
    open_sinks,
    past_evaluations,
    peak_flops_of,
    time_fields,
)
from echo2.learner.recent import REPORTED_TOKENS_MAX, RecentRollouts, answer, keep, plain
from echo2.learner.rollouts.groups import Batch, Insertion, TrainGroup
from echo2.learner.startup import RunFolder
from echo2.learner.training import trainer as trainer_module
from echo2.learner.training.loss import SUM_NAMES, loss_metrics
from echo2.learner.training.trainer import StepResult
from echo2.wire.bounds import LENGTH_SHARES_MAX, ROLLOUTS_SHOWN_MAX, TOKENS_SHOWN_MAX, TURNS_SHOWN_MAX, check
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.learner.fleet import options_for, prepared_from, prompts_for
from tests.unit.learner.made import group_of, rollout_of

ROW = {"step": 3, "reward/mean": 0.5, "lag/histogram": [7, 0, 2], "is_skipped": False, "note": "text"}

DOCS = Path(__file__).parents[3] / "docs" / "learner.md"


def documented_names() -> set[str]:
    table = DOCS.read_text().split("## metrics.jsonl", 1)[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_a_torn_last_row_is_cut_off_also_on_a_full_disk_and_no_step_gets_a_second_row(tmp_path: Path) -> None:
    rows, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    sink = JsonLines(rows, 0)
    for step in range(3):
        sink.write({"step": step})
    sink.close()
    with rows.open("a") as file:
        file.write('{"step": 3, "rew')
    sink = JsonLines(rows, 3)
    assert sink.last_step == 2
    for step in (1, 2, 3):
        sink.write({"step": step})
    sink.close()
    assert rows.read_text().splitlines() == ['{"step": 0}', '{"step": 1}', '{"step": 2}', '{"step": 3}']
    samples.write_text('{"step": 0}\n{"ste')
    assert past_evaluations(tmp_path, 0) == {}
    assert samples.read_text() == '{"step": 0}\n', "else the next one follows in the same line"
    anew = JsonLines(rows, -1)
    assert anew.last_step == -1 and not rows.read_text(), "all of them came later"
    anew.close()
    rows.write_text('{"step": 0}\n{"ste')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # no file may be written beyond its first byte
    try:
        JsonLines(rows, 0).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rows.read_text() == '{"step": 0}\n'


@pytest.mark.parametrize("step", range(4))
def test_what_comes_after_the_step_that_a_run_has_gone_back_to_is_written_anew(step: int, tmp_path: Path) -> None:
    """As where a record of the journal was damaged, and it and all after it was given up, as the error says."""
    names = ("metrics", "evaluations", "samples")
    for name in names:
        rows = [{"step": at, "eval/reward": 0.1 * at} for at in range(4) for _ in range(2 if name == "samples" else 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sink,) = open_sinks(tmp_path, "run", (), step)
    assert [*past_evaluations(tmp_path, step)] == list(range(step + 1))
    sink.write({"step": step + 1})
    sink.close()
    metrics, *others = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in names)
    assert len(metrics) == step + 2 and metrics[-1] == json.dumps({"step": step + 1})
    assert [len(lines) for lines in others] == [step + 1, 2 * (step + 1)]


def served(endpoint: PrometheusEndpoint) -> dict[str, float]:
    with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_prometheus_serves_the_last_row_under_the_documented_names() -> None:
    endpoint = PrometheusEndpoint(0, lambda: {"step": 4, "waiting_s": 1.5})
    try:
        assert await asyncio.to_thread(served, endpoint) == {"echo2_learner_step": 4.0, "echo2_learner_waiting_s": 1.5}
        endpoint.write(ROW)
        endpoint.write({"step": 4, "eval/reward": 0.25})
        found = await asyncio.to_thread(served, endpoint)
        assert found["echo2_learner_eval_reward"] == 0.25, "an evaluation's, beside those of the last step"
        assert found["echo2_learner_reward_mean"] == 0.5 and found["echo2_learner_is_skipped"] == 0.0
        assert found['echo2_learner_lag_histogram{lag="2"}'] == 2.0 and found["echo2_learner_step"] == 4.0
        taken = int(endpoint.url.rpartition(":")[2].partition("/")[0])
        for port, told in (
            (taken, f"to listen on 127.0.0.1:{taken}: Address"),
            (70_000, "HOST:PORT, got '127.0.0.1:70000'"),
        ):
            with pytest.raises(EchoError, match=f"^--metrics-port: expected {told}"):
                PrometheusEndpoint(port, dict)
    finally:
        await endpoint.stop()
    assert len({gauge_name(name) for name in documented_names()}) == len(documented_names()), "no two share a name"
    page = DOCS.read_text()
    for name in ("echo2_learner_reward_mean", "echo2_learner_step", "echo2_learner_waiting_s"):
        assert name in page


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(tmp_path, "run", ("tensorboard",), 0)
    for step in (1, 2):
        for sink in sinks:
            sink.write({**ROW, "step": step, "reward/mean": step / 4})
    for sink in sinks:
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


WRITES = f"""
import pathlib, sys
from echo2.learner.metrics import open_sinks
for steps in ((1, 2), (3,)):  # a restart goes on with the same run
    sinks = open_sinks(pathlib.Path(sys.argv[1]), "trial", (sys.argv[2],), 0)
    for step in steps:
        for sink in sinks:
            sink.write({{**{ROW!r}, "step": step, "reward/mean": step / 4}})
    for sink in sinks:
        sink.close()
"""


def written_by(sink: str, folder: Path, more: str = "", **environment: str) -> str:
    """In a process of its own: a library's service has written everything only once its process is gone."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", WRITES + more, str(folder), sink]
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": paths, **environment}
    return subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True).stdout


def test_a_tracker_whose_service_has_died_costs_its_own_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    died = mock.Mock(side_effect=ConnectionResetError("by peer"))
    run = SimpleNamespace(url="", log=died, finish=died)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))  # type: ignore[arg-type]
    sinks = open_sinks(tmp_path, "trial", ("wandb",), 0)
    for sink in sinks:
        sink.write(ROW)
        sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == ROW and died.call_count == 2
    assert "a row of sink wandb ended by an unforeseen error" in caplog.text
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=died))  # type: ignore[arg-type]
    with pytest.raises(ConnectionResetError):
        open_sinks(tmp_path, "other", ("wandb",), 0)
    (rows,) = open_sinks(tmp_path, "trial", ("wandb",), 3)  # a run goes on without
    rows.close()


@pytest.mark.extras
def test_weights_and_biases_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    written_by("wandb", tmp_path, WANDB_MODE="offline")
    written = [path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/run-trial.wandb")]
    assert written and all(b"reward/mean" in content for content in written)


@pytest.mark.extras
def test_trackio_keeps_a_run_under_the_rows_own_names(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    read = (
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print([(one['step'], one['reward/mean']) for one in SQLiteStorage.get_logs('echo2', 'trial')])\n"
    )
    said = written_by("trackio", tmp_path, read, TRACKIO_DIR=str(tmp_path / "t"))
    assert "[(1, 0.25), (2, 0.5), (3, 0.75)]" in said.splitlines()


def test_utilisation_of_the_device_counts_six_operations_a_parameter_and_position() -> None:
    metrics = loss_metrics(torch.zeros(len(SUM_NAMES)), 0.0)
    result = StepResult(1, {"forward": 1.0, "backward": 1.0}, metrics, 0.0, 0.0, False, 1000, 500)
    facts = RunFacts(flops_per_position=6e9, peak_flops=peak_flops_of("NVIDIA H200"))
    assert time_fields(result, StepTimes(), facts)["mfu"] == pytest.approx(6e9 * 1000 / 2.0 / 989e12)
    assert "mfu" not in time_fields(result, StepTimes(), RunFacts(flops_per_position=6e9))
    assert peak_flops_of("AMD Ryzen") == 0.0
    assert Utilisation().window == 0.0, "not 100 %, before the first step of a process"


PIECES = ["a", "\n", "\x1b[2J", "\u202e", "<b>"]


class Letters:
    """Tokens are PIECES, over and over."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(PIECES[token % len(PIECES)] for token in token_ids)


def group(name: str, tokens: int, count: int = 2) -> TrainGroup:
    half, told = tokens // 2, [-0.5 * place for place in range(tokens)]
    spans, senders = [(3, half), (4, tokens - half)], [(PeerId("w1"), half), (PeerId("w2"), tokens - half)]
    rollouts = [rollout_of(range(tokens), i, name=name, spans=spans, logprobs=told) for i in range(count)]
    return group_of((0, 4), rollouts, [i / 2 for i in range(count)], senders=senders, max_new_tokens=tokens)


def shown(recent: RecentRollouts, rollout_id: str = "", offset: int = 0) -> pb.RolloutsShown:
    found = answer(recent, Letters(), pb.RolloutsWanted(request=7, rollout_id=rollout_id, offset=offset))
    check(found, "the learner")
    assert found.request == 7
    return found


def test_the_list_is_newest_first_and_one_rollout_has_each_token_with_its_log_probability_and_version() -> None:
    recent = RecentRollouts()
    for step in (4, 5):
        recent.add(Batch(Step(step), (group(f"g{step}", 10),)))
    rows = shown(recent).rollouts
    assert [row.rollout_id for row in rows] == ["g5/1", "g5/0", "g4/1", "g4/0"]
    first = rows[0]
    assert (first.step, first.reward, first.token_count, first.finish_reason) == (6, 0.5, 10, "stop")
    assert (first.oldest_version, first.newest_version, list(first.peer_ids)) == (3, 4, ["w1", "w2"])
    one = shown(recent, "g4/0", 3)
    assert [token.token_id for token in one.tokens] == list(range(3, 10))
    assert [token.logprob for token in one.tokens] == [-0.5 * place for place in range(3, 10)]
    assert [token.version for token in one.tokens] == [3, 3, 4, 4, 4, 4, 4]
    assert [one.rollouts[0].peer_ids[token.peer] for token in one.tokens] == ["w1", "w1", "w2", "w2", "w2", "w2", "w2"]
    assert one.prompt == "a<b>" and one.rollouts[0].turn_count == 1 and not one.turns
    assert not shown(recent, "g9/0").rollouts, "one that is not kept is not shown"
    assert not shown(recent, "g4/0", 10).tokens


def test_an_episode_shows_what_the_environment_said_before_each_turn_and_no_more_turns_than_fit() -> None:
    recent = RecentRollouts()
    every = tuple(Insertion(2 * turn, (0, 4)) for turn in range(1, 100))
    long = replace(group("g1", 200, count=1), insertions=(every,))
    agent = replace(group("a1", 4, count=1), insertions=((Insertion(0, (4,)), Insertion(2, ())),))
    recent.add(Batch(Step(1), (long, agent)))
    assert (kept := recent.find("g1/0")) is not None and kept.size == 200 + 2 + 2 * len(every)
    begun, one = 0, shown(recent, "g1/0")
    assert one.rollouts[0].turn_count == 100
    seen = []
    while begun < 200:
        one = shown(recent, "g1/0", begun)
        assert len(one.turns) <= TURNS_SHOWN_MAX
        assert all(begun <= turn.position < begun + len(one.tokens) for turn in one.turns)
        seen += [(turn.turn, turn.position, turn.text) for turn in one.turns]
        begun += len(one.tokens)
    assert seen == [(turn + 1, 2 * turn, "a<b>") for turn in range(1, 100)]
    calls = shown(recent, "a1/0")
    assert [(turn.turn, turn.position, turn.text) for turn in calls.turns] == [(1, 0, "<b>"), (2, 2, "")]


def test_the_newest_rollouts_are_kept_for_the_report_with_all_their_tokens_as_far_as_they_fit(tmp_path: Path) -> None:
    recent = RecentRollouts()
    keep(recent, Letters(), tmp_path)
    assert not list(tmp_path.iterdir()), "an earlier process may have left some"
    recent.add(Batch(Step(1), (group("g1", 9000, count=3),)))
    recent.add(Batch(Step(2), (group("g2", 1200, count=1),)))
    keep(recent, Letters(), tmp_path)
    pages = [Parse(line, pb.RolloutsShown()) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    told: dict[str, list[int]] = {}
    for page in pages:
        told.setdefault(page.rollouts[0].rollout_id, []).extend(token.token_id for token in page.tokens)
    assert list(told) == ["g2/0", "g1/2", "g1/1"], "newest first"
    assert told["g2/0"] == list(range(1200)) and told["g1/2"] == list(range(9000))
    assert REPORTED_TOKENS_MAX <= sum(map(len, told.values())) < REPORTED_TOKENS_MAX + TOKENS_SHOWN_MAX


def test_hostile_texts_are_shown_as_escapes_and_cut() -> None:
    recent = RecentRollouts()
    recent.add(Batch(Step(4), (group("g1", 2000),)))
    one = shown(recent, "g1/0")
    assert len(one.tokens) == TOKENS_SHOWN_MAX
    assert [token.text for token in one.tokens[:5]] == ["a", "\n", "\\x1b[2J", "\\u202e", "<b>"]
    assert "\x1b" not in one.rollouts[0].completion and one.rollouts[0].completion.endswith("…")
    assert plain("x" * 5, 5) == "xxxxx" and plain("x" * 6, 5) == "xxxx…"


def test_what_is_kept_is_bounded_by_tokens_and_a_large_step_by_a_quarter_of_them() -> None:
    recent = RecentRollouts(tokens_max=4000)
    for step in range(50):
        recent.add(Batch(Step(step), tuple(group(f"g{step}-{index}", 100) for index in range(20))))
        kept = recent.newest(10_000)
        assert sum(one.size for one in kept) <= 4000
        newest = [one for one in kept if one.step == step + 1]
        assert 0 < sum(one.size for one in newest) <= 1000
    assert len(shown(RecentRollouts(), "").rollouts) == 0
    assert len(shown(recent).rollouts) <= ROLLOUTS_SHOWN_MAX
    assert len({one.rollout_id.partition("-")[0] for one in kept}) >= 3, "of several steps"
    recent.add(Batch(Step(50), (group("huge", 2000),)))
    assert not [one for one in recent.newest(10_000) if one.rollout_id.startswith("huge")]


def test_lengths_are_means_of_equal_shares_of_the_newest_rollouts() -> None:
    recent = RecentRollouts()
    recent.add(Batch(Step(1), (group("early", 50, count=LENGTH_SHARES_MAX - 1),)))
    assert recent.lengths() == [], "too few rollouts for so many shares"
    sizes = [10 + index % 200 for index in range(1000)]
    recent.add(Batch(Step(2), tuple(group(f"g{index}", size, count=1) for index, size in enumerate(sizes))))
    lengths = recent.lengths()
    assert len(lengths) == LENGTH_SHARES_MAX and lengths == sorted(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(sum(sizes) / len(sizes), rel=0.03)
    assert lengths[0] < 13 and lengths[-1] > 205


WANTED = {"seed": 0, "task": "sums", "lora": [0, 0]}


def test_what_a_run_is_may_not_change_and_every_flipped_bit_of_it_stops_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity(WANTED, {"model_path": "here"})
    path, refused = tmp_path / "run.json", 0
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        try:
            folder.check_identity(WANTED)
        except StateError as error:
            assert "expected the run's identity" in str(error) and "restore it from a backup" in str(error)
            refused += 1
        else:
            assert json.loads(path.read_bytes())["model_path"] == "here", at
    assert refused > 0.7 * len(whole)  # the rest is white space and the name of the checksum
    path.write_bytes(whole)
    folder.check_identity(WANTED, {"model_path": "moved"})
    with pytest.raises(StateError, match='expected task "sums" as when the run began, got "products"'):
        folder.check_identity(WANTED | {"task": "products"})
    (tmp_path / "journal").mkdir()
    path.unlink()
    folder.check_identity({"seed": 0})
    path.unlink()
    (tmp_path / "journal" / "segment-00000000.records").touch()
    with pytest.raises(StateError, match=r"run\.json: expected it beside segment-00000000\.records, found none"):
        folder.check_identity({"seed": 1})


def test_another_optimisers_state_is_refused(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "refuse_optimizer", lambda *_: None)  # the package for 8 bits may be missing
    monkeypatch.setattr(trainer_module, "adamw_of", lambda _, masters, *args, **how: torch.optim.AdamW(masters, **how))

    def begin(run: str, optimizer_state: OptimizerState) -> None:
        prepared_from(options_for(tmp_path / run, model_path, learner={"optimizer_state": optimizer_state}))

    begin("one", "host")
    kept = json.loads((tmp_path / "one" / "run.json").read_text())
    assert kept["lora"] == [0, 0] and {"model_path", "weights_dtype"} <= kept.keys(), "export reads these"
    begin("one", "float32")
    with pytest.raises(StateError, match='expected optimizer_state "float32" as when the run began, got "8bit"'):
        begin("one", "8bit")
    begin("other", "8bit")
    with pytest.raises(StateError, match='expected optimizer_state "8bit" as when the run began, got "float32"'):
        begin("other", "host")


def test_seeds_follow_from_a_secret_of_the_run_that_is_made_once(model_path: Path, tmp_path: Path) -> None:
    prompts = prompts_for(options_for(tmp_path / "run", model_path))
    seeds = []
    for name in ("one", "one", "other"):
        folder = RunFolder(tmp_path / name)
        prompts.secret = folder.secret()
        folder.release()
        drawn = [prompts.draw(cursor) for cursor in range(3)]
        seeds.append([sampling.seed for _, sampling in drawn])
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 6, "the same after a restart, new for another"
    secret = tmp_path / "one" / "sampling.secret"
    assert secret.stat().st_mode & 0o077 == 0
    secret.write_bytes(b"short")
    with pytest.raises(StateError, match="expected 32 bytes, got 5"):
        RunFolder(tmp_path / "one").secret()
