from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
import urllib.request
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch

from echo2.base.errors import (
    ConfigError,
    DiskFull,
    EchoError,
    StateError,
    TaskError,
    TrainingError,
)
from echo2.base.ids import Version
from echo2.base.rng import derived_seed
from echo2.learner.learner import Learner, LearnerDaemon, RunSummary
from echo2.learner.metrics import gauge_name
from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.rollouts.groups import Batch, evaluated_version
from echo2.learner.run_folder import RunFolder, keep_for_inspection
from echo2.learner.startup import Prepared, export_run, prepare
from echo2.learner.training.model import PolicyModel
from echo2.trust.tls import open_channel
from echo2.weights import Encoding, HostWeights, fingerprint
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, ingest_pb2_grpc
from tests.ports import choose_ports
from tests.unit.learner.fleet import (
    Coordinator,
    FollowerBroadcaster,
    RandomWorker,
    new_authority,
    options_for,
    prepare_node,
)
from tests.unit.learner.test_metrics import documented_names
from tests.unit.learner.tiny import make_tiny_model

T = TypeVar("T")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Run:
    """One learner with its coordinator and workers."""

    def __init__(self, options: LearnerOptions, plan: coordinator_pb2.PlanUpdate | None = None, **made: Any) -> None:
        """`made`: parts of the daemon's own, in the place of a follower that applies what is published."""
        self.options = options
        self.authority = new_authority()
        self.coordinator = Coordinator(self.authority, plan)
        self.follower = FollowerBroadcaster()
        self.daemon = LearnerDaemon(options, **(made or {"make_broadcaster": self.follower.made}))
        self.workers: list[RandomWorker] = []
        self.at_step: dict[int, Any] = {}

    async def finish(self, worker_count: int = 2, lag: int = 0) -> RunSummary:
        await self.coordinator.start()
        learner = prepare_node(self.options.folder, self.authority, self.coordinator.address)
        running = asyncio.get_running_loop().create_task(self.daemon.run())
        while self.daemon.learner is None and not running.done():
            await asyncio.sleep(0.01)
        address = ""
        if self.daemon.learner is not None:
            loop, address = self.daemon.learner.loop, self.daemon.learner.address
            original = loop._on_step
            loop._on_step = lambda: (original(), self._stepped())[0]
        tasks = []
        for _ in range(worker_count):
            worker = RandomWorker(self.coordinator, address, learner, 60)
            worker.lag = lag
            self.workers.append(worker)
            tasks.append(asyncio.get_running_loop().create_task(worker.run()))
        try:
            return await asyncio.wait_for(running, 60)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.coordinator.stop()

    @property
    def learner(self) -> Learner:
        assert self.daemon.learner is not None, "it has begun"
        return self.daemon.learner

    def _stepped(self) -> None:
        action = self.at_step.get(self.learner.loop.step)
        if action is not None:
            action()


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 8])
def test_a_run_trains_to_its_end_and_never_above_the_bound(model_path: Path, tmp_path: Path, bound: int) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": bound}))
    summary = go(run.finish())
    assert summary.is_finished and summary.steps == 6 and summary.over_stale_tokens == 0
    rows = rows_of(tmp_path / "run")
    undocumented = {name for row in rows for name in row} - documented_names()
    assert not undocumented
    evaluated = evaluations_of(tmp_path / "run")
    steps = [row["step"] for row in evaluated]
    assert steps in ([0, 3, 6], [0, 6]) and [*summary.evaluations] == steps, "one that waits gives way to a newer one"
    assert all(row["eval/rollouts"] == 4 for row in evaluated)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["lag/max"] <= bound for row in rows[1:])
    assert summary.trained_rollouts == 6 * 8
    assert summary.version == 6, "the last step is always published"
    assert f"{run.follower.host.fingerprint():016x}" == summary.fingerprint


@pytest.mark.parametrize(("uplink", "chosen"), [(0.0, "fast"), (1e3, "dense")])
def test_merged_deltas_lead_to_the_newest_version_whatever_the_setting(
    model_path: Path, tmp_path: Path, uplink: float, chosen: str
) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 1}))
    run.follower.spread_bytes_per_s = uplink
    summary = go(run.finish())
    assert set(run.follower.merged) == {(0, 2), (2, 4), (0, 4), (4, 6)}
    host = HostWeights.empty()
    run.follower.apply(host, -1, 0)
    for parent, version in ((0, 4), (4, 6)):
        header = run.follower.apply(host, parent, version)
        assert (header.parent_version, header.target_version) == (parent, version)
    assert f"{host.fingerprint():016x}" == summary.fingerprint
    row = rows_of(tmp_path / "run")[-1]
    assert row["delta/setting"] == chosen and row["delta/setting_reason"].startswith(chosen)
    assert row["bytes/merged"] > 0
    two_singles = len(run.follower.kept[4, 5]) + len(run.follower.kept[5, 6])
    assert chosen == "dense" or len(run.follower.merged[4, 6]) < two_singles


@pytest.mark.parametrize(("stopped_at", "reason"), [(2, "stopped"), (0, "finished")], ids=["stopped", "finished"])
def test_only_a_finished_learner_says_that_the_run_is_finished(
    model_path: Path, tmp_path: Path, stopped_at: int, reason: str
) -> None:
    """Workers are sent home and machines given back by that word."""
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 1}))
    run.at_step[stopped_at] = run.daemon.stop
    summary = go(run.finish())
    assert summary.is_finished == (not stopped_at) and run.coordinator.left_for == [reason]


def test_a_finished_learner_stays_while_its_last_version_is_fetched(model_path: Path, tmp_path: Path) -> None:
    run = Run(
        options_for(
            tmp_path / "run", model_path, staleness={"bound": 1}, limits=LearnerLimits(free_bytes_min=1, linger_s=20.0)
        )
    )
    run.follower.needed_looks = 4
    assert go(run.finish()).is_finished
    assert run.follower.asked >= 4 and run.coordinator.left_for == ["finished"]


def test_what_the_disk_lost_of_the_published_is_replaced_by_a_keyframe(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 1}))
    run.at_step[3] = lambda: run.follower.calls.lost("delta 0->1")
    summary = go(run.finish())
    keyframes = [version for version, parent in run.follower.versions if parent is None]
    assert keyframes[:2] == [0, 2], "these are due by their weight"
    assert keyframes[2] in (2, 3), "this one is due to the loss alone"
    assert f"{run.follower.host.fingerprint():016x}" == summary.fingerprint


def test_the_exported_model_is_what_was_published(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = Run(options_for(tmp_path / "run", model_path, learner={"steps": 3}))
    summary = go(run.finish())
    assert summary.export_folder is not None
    model = AutoModelForCausalLM.from_pretrained(summary.export_folder, dtype=torch.bfloat16)
    assert AutoTokenizer.from_pretrained(summary.export_folder).encode("12>") is not None
    key = run.follower.host.key
    assert f"{fingerprint(dict(model.named_parameters()), key):016x}" == summary.fingerprint


def test_the_coordinator_hears_offers_closures_versions_and_reports(model_path: Path, tmp_path: Path) -> None:
    plan = coordinator_pb2.PlanUpdate(kappa=2, in_flight_cap_rollouts=16, predicted_utilisation=0.5)
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4}, learner={"steps": 5}), plan)
    go(run.finish())
    coordinator = run.coordinator
    (hello,) = coordinator.hellos
    assert hello.rollouts_per_step == 8 and hello.staleness_bound == 4 and hello.model_digest
    assert json.loads(hello.model_config_json)["model_type"] == "qwen3"
    assert [v.version for v in coordinator.published if v.has_parent] == [2, 4, 5]
    complete = [name for name, reason in coordinator.closed if reason == "complete"]
    assert sum(evaluated_version(name) is None for name in complete) == 10
    assert coordinator.offers > coordinator.reminders, "groups are offered as they are opened, not by reminders"
    assert coordinator.reports[-1].is_finished and coordinator.reports[-1].step == 5
    assert rows_of(tmp_path / "run")[3]["utilisation/predicted"] == 0.5


def test_rollouts_that_are_too_old_are_dropped_and_their_prompts_offered_again(
    model_path: Path, tmp_path: Path
) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 1, "kappa": 1}, learner={"steps": 5}))
    summary = go(run.finish(lag=1))
    assert summary.is_finished and summary.over_stale_tokens == 0


def crash_image(run: Run, target: Path) -> dict[str, Any]:
    """What a kill would leave on the disk at this very instant, and the weights that are lost with the process."""
    shutil.copytree(run.options.folder, target, ignore=shutil.ignore_patterns("learner.lock", "*.partial"))
    loop = run.learner.loop
    return {"step": loop.step, "masters": [master.clone() for master in loop.p.model.masters]}


def prepared_from(options: LearnerOptions) -> Prepared:
    folder = RunFolder(options.folder)
    try:
        return prepare(options, folder)
    finally:
        folder.release()


@pytest.mark.parametrize("at", [1, 3, 5])
def test_after_a_kill_the_weights_are_bit_identical(model_path: Path, tmp_path: Path, at: int) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4, "kappa": 2}))
    image: dict[str, Any] = {}
    run.at_step[at] = lambda: image.update(crash_image(run, tmp_path / "crashed"))
    go(run.finish())
    again = prepared_from(options_for(tmp_path / "crashed", model_path, staleness={"bound": 4, "kappa": 2}))
    assert again.trainer.step_count == image["step"] == at
    base = PolicyModel(str(model_path), "bfloat16", torch.device("cpu"), 1.0)
    moved = [not torch.equal(one, other) for one, other in zip(image["masters"], base.masters, strict=True)]
    assert all(moved), "there was something to lose"
    for ours, theirs in zip(again.team.model.masters, image["masters"], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(ours, theirs)
    trained = again.groups.ledger.trained
    assert len(trained) == 2 * at and not set(trained) & set(again.groups.groups)


def test_a_killed_run_goes_on_to_its_end(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4, "kappa": 2}))
    run.at_step[3] = lambda: crash_image(run, tmp_path / "crashed")
    go(run.finish())
    second = Run(options_for(tmp_path / "crashed", model_path, staleness={"bound": 4, "kappa": 2}))
    summary = go(second.finish())
    assert summary.is_finished and summary.over_stale_tokens == 0 and summary.trained_rollouts == 6 * 8
    assert [row["step"] for row in rows_of(tmp_path / "crashed")] == list(range(7))
    assert f"{second.follower.host.fingerprint():016x}" == summary.fingerprint


def test_a_kill_in_the_last_step_keeps_neither_its_version_nor_its_evaluation_back(
    model_path: Path, tmp_path: Path
) -> None:
    """The last batch is drawn, its version not yet begun: the next start finds nothing left to train."""
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4, "kappa": 4}))

    def wait_for_the_last() -> None:
        publisher, original = run.learner.loop.publisher, run.learner.loop.publisher.publish_soon

        async def killed(version: Version, tensors: Mapping[str, torch.Tensor]) -> float:
            crash_image(run, tmp_path / "crashed")
            return await original(version, tensors)

        publisher.publish_soon = killed  # type: ignore[method-assign]

    run.at_step[5] = wait_for_the_last
    first = go(run.finish())
    assert rows_of(tmp_path / "crashed")[-1]["step"] == 5
    second = Run(options_for(tmp_path / "crashed", model_path, staleness={"bound": 4, "kappa": 4}))
    summary = go(second.finish())
    assert summary.is_finished and summary.version == 6, "the last step is always published"
    assert summary.fingerprint == first.fingerprint == f"{second.follower.host.fingerprint():016x}"
    assert [*summary.evaluations] == [*first.evaluations] == [0, 4, 6]
    assert rows_of(tmp_path / "crashed")[-1]["step"] == 6


def test_a_delta_that_a_kill_cut_off_is_sent_again(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4, "kappa": 1}))
    original = run.follower.publish

    async def cut(version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int) -> int:
        if version == 3 and parent is not None:
            crash_image(run, tmp_path / "crashed")
        return await original(version, parent, encoding, full_snapshot_bytes)

    run.follower.publish = cut  # type: ignore[method-assign]
    go(run.finish())
    second = Run(options_for(tmp_path / "crashed", model_path, staleness={"bound": 4, "kappa": 1}))
    second.follower.host = HostWeights.from_tensors(
        prepared_from(options_for(tmp_path / "crashed", model_path, staleness={"bound": 4, "kappa": 1})).cut_off[1],  # type: ignore[index]
        Version(2),
        derived_seed(0, "fingerprint", "test-run"),
    )
    summary = go(second.finish())
    assert second.follower.versions[0] == (3, 2)
    assert f"{second.follower.host.fingerprint():016x}" == summary.fingerprint


def test_a_stopped_run_leaves_a_checkpoint_and_goes_on(model_path: Path, tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", model_path, learner={"steps": 20})
    run = Run(options)
    run.at_step[3] = run.daemon.stop
    first = go(run.finish())
    assert not first.is_finished and first.steps == 3 and first.export_folder is None
    again = prepared_from(options)
    assert again.trained_again == 0 and again.trainer.step_count == 3
    again.prompts.close()


def test_a_run_folder_is_exported_from_its_newest_checkpoint(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(StateError, match="expected checkpoints"):
        export_run(tmp_path / "run", tmp_path / "out", str(model_path))
    run = Run(options_for(tmp_path / "run", model_path, learner={"steps": 20}))
    run.at_step[2] = run.daemon.stop
    summary = go(run.finish())
    assert export_run(tmp_path / "run", tmp_path / "out", str(model_path)) == summary.steps
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in run.learner.loop.p.model.snapshot().items():
        assert torch.equal(tensor, dict(exported.named_parameters())[name])


def test_prompts_beyond_the_models_context_are_refused_at_once(model_path: Path, tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", model_path, sampling={"max_new_tokens": 300})
    with pytest.raises(ConfigError, match="context of 256"):
        go(Run(options).finish())


def test_the_coordinator_may_go_and_come_back(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, learner={"steps": 8}))

    async def scene() -> RunSummary:
        finishing = asyncio.get_running_loop().create_task(run.finish())
        port = 0

        def go_away() -> None:
            nonlocal port
            port = int(run.coordinator.address.rpartition(":")[2])
            asyncio.get_running_loop().create_task(come_back())

        async def come_back() -> None:
            await run.coordinator.stop()
            await run.coordinator.start(port)

        run.at_step[2] = go_away
        return await finishing

    summary = go(scene())
    assert summary.is_finished and len(run.coordinator.hellos) == 2
    assert run.coordinator.hellos[1].step >= 2
    names = {spec.group_id for spec in run.coordinator.groups.values()}
    assert {group.group_id for group in run.coordinator.hellos[1].open_groups} <= names


def test_nothing_is_taken_from_a_worker_that_the_coordinator_has_barred(model_path: Path, tmp_path: Path) -> None:
    run = Run(options_for(tmp_path / "run", model_path, learner={"steps": 16}))
    found: list[grpc.StatusCode] = []

    async def report(worker: RandomWorker) -> None:
        async with open_channel(worker.learner_address, worker.learner.peer_id, worker.credentials) as channel:
            group_id = next(iter(run.coordinator.groups))
            stream = ingest_pb2_grpc.IngestStub(channel).Report()
            try:
                await stream.write(
                    ingest_pb2.RolloutReport(sequence=0, ticket=worker.ticket(group_id), draws_by_seed=True)
                )
                await stream.read()
            except grpc.aio.AioRpcError as error:
                found.append(error.code())

    async def scene() -> RunSummary:
        finishing = asyncio.get_running_loop().create_task(run.finish())
        tasks = []

        def bar() -> None:
            barred = RandomWorker(run.coordinator, run.learner.address, run.workers[0].learner, 60)
            order = coordinator_pb2.WorkerBanned(peer_id=barred.identity.peer_id, reason="by hand", is_banned=True)
            run.coordinator.orders.append(coordinator_pb2.LearnerOrder(banned=order))
            run.at_step[6] = lambda: tasks.append(asyncio.get_running_loop().create_task(report(barred)))

        run.at_step[1] = bar
        summary = await finishing
        await asyncio.gather(*tasks, return_exceptions=True)
        return summary

    assert go(scene()).is_finished
    assert found == [grpc.StatusCode.PERMISSION_DENIED]


def test_a_second_learner_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    with pytest.raises(StateError, match="another learner"):
        RunFolder(tmp_path / "run")
    first.release()
    RunFolder(tmp_path / "run").release()


def test_another_batch_shape_or_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    prepared_from(options_for(tmp_path / "run", model_path))
    with pytest.raises(StateError, match="rollouts_per_step"):
        prepared_from(options_for(tmp_path / "run", model_path, learner={"prompts_per_step": 4}))
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(StateError, match="base_fingerprint"):
        prepared_from(options_for(tmp_path / "run", other))


def test_another_template_or_other_rows_under_the_same_name_are_refused(model_path: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + 1", "answer": "{n + 1}"}}\n' for n in range(9)))
    model = tmp_path / "model"
    shutil.copytree(model_path, model)
    task = {"name": "math", "args": {"path": str(rows)}, "trusted_rewards": True, "eval_prompts": 2}
    options = options_for(tmp_path / "run", model, task=task)
    prepared_from(options)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(StateError, match=r"expected tokenizer .* as when the run began"):
        prepared_from(options)
    (model / "chat_template.jinja").unlink()
    rows.write_text(rows.read_text().replace("8 + 1", "8 + 2"))
    with pytest.raises(StateError, match=r"expected data .* as when the run began"):
        prepared_from(options)


def test_without_a_join_link_the_first_start_says_so(model_path: Path, tmp_path: Path) -> None:
    daemon = LearnerDaemon(options_for(tmp_path / "run", model_path), lambda s, c, o, k: FollowerBroadcaster())
    with pytest.raises(EchoError, match="join link"):
        go(daemon.run())


def test_an_export_loads_in_transformers(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from echo2.cli.main import main

    run = Run(options_for(tmp_path / "run", model_path, learner={"steps": 4}))
    summary = go(run.finish())
    target = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(target)]) == 0
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert f"{fingerprint(dict(model.named_parameters()), run.follower.host.key):016x}" == summary.fingerprint
    assert AutoTokenizer.from_pretrained(target).encode("12>")
    assert main(["export", str(tmp_path / "run"), str(target)]) == 2, "a folder with files is not written over"
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "new")]) != 0


def test_a_data_set_that_ends_first_ends_the_run_after_its_last_whole_batch(model_path: Path, tmp_path: Path) -> None:
    task = {"name": "sort_digits", "args": {"digit_count": 1}, "epochs": 1}
    run = Run(options_for(tmp_path / "run", model_path, task=task))
    with pytest.raises(TaskError, match="data set exhausted.* 6 training prompts, which were drawn 1 times"):
        go(run.finish())
    (reason,) = run.coordinator.left_for
    assert reason.startswith("finished: data set exhausted"), "the coordinator is told why the run is over"
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["step"] == 3, "six prompts make three batches of two"
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def test_a_loss_that_stays_without_a_finite_value_ends_the_run_and_keeps_its_batches(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(tmp_path / "run", model_path, task={"eval_prompts": 0}, learner={"steps": 12})
    trainer = replace(options.trainer, nonfinite_steps_max=2)
    wrote: list[threading.Thread] = []

    def kept_here(batch: Batch, folder: Path) -> None:
        wrote.append(threading.current_thread())
        keep_for_inspection(batch, folder)

    monkeypatch.setattr("echo2.learner.loop.keep_for_inspection", kept_here)
    run = Run(replace(options, trainer=trainer))

    def spoil() -> None:
        with torch.no_grad():
            for parameter in run.learner.loop.p.model.hf_model.parameters():  # type: ignore[attr-defined]
                parameter.fill_(float("nan"))

    run.at_step[1] = spoil
    with pytest.raises(TrainingError, match="3 steps in a row; their batches are in not_finite"):
        go(run.finish())
    kept = sorted(path.name for path in (tmp_path / "run" / "not_finite").iterdir())
    assert kept == ["step-00000001.json", "step-00000002.json", "step-00000003.json"]
    assert len(wrote) == 3 and threading.main_thread() not in wrote, "the event loop serves meanwhile"
    assert [row["is_skipped"] for row in rows_of(tmp_path / "run")[1:]] == [False, True, True]


def checkpointed_steps(model: Path, folder: Path, *, follows_cost: bool) -> list[int]:
    limits = LearnerLimits(8, free_bytes_min=1 << 20, linger_s=0.0)
    every = {"checkpoint_every_steps": 0 if follows_cost else 20}
    go(Run(options_for(folder, model, limits=limits, learner=every)).finish())
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_a_checkpoint_is_taken_as_often_as_its_cost_allows(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    costs: list[tuple[float, float, float]] = []

    def every_other(checkpoint_s: float, train_s: float, step_s: float) -> int:
        costs.append((checkpoint_s, train_s, step_s))
        return 2

    monkeypatch.setattr("echo2.learner.loop.steps_between", every_other)
    with caplog.at_level("INFO", "echo2.learner"):
        found = checkpointed_steps(model_path, tmp_path / "by_cost", follows_cost=True)
    assert found[-1] == 6 and len(found) >= 2 and min(b - a for a, b in itertools.pairwise([0, *found[:-1]])) >= 2
    assert "a checkpoint every 2 steps" in caplog.text
    assert all(one[0] > 0 and 0 < one[1] <= one[2] for one in costs)
    assert checkpointed_steps(model_path, tmp_path / "given", follows_cost=False) == [6], "20, as the options say"


def test_a_disk_without_room_for_a_checkpoint_is_refused_at_the_start(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="bytes free"):
        prepared_from(options_for(tmp_path / "run", model_path, limits=LearnerLimits(free_bytes_min=1 << 62)))


def test_prometheus_serves_a_run(model_path: Path, tmp_path: Path) -> None:
    (port,) = choose_ports((0,))
    run = Run(options_for(tmp_path / "run", model_path, metrics_port=port))
    pages: list[str] = []

    def look() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            pages.append(answer.read().decode())

    run.at_step[4] = look
    go(run.finish())
    names = {line.partition(" ")[0].partition("{")[0] for line in pages[0].splitlines() if not line.startswith("#")}
    numbers = [name for name, value in rows_of(tmp_path / "run")[4].items() if not isinstance(value, str)]
    assert {gauge_name(name) for name in numbers} <= names


def test_a_reward_that_always_raises_ends_the_run_with_its_cause_and_nobody_is_paid_to_wait(
    model_path: Path, tmp_path: Path
) -> None:
    task = {"name": "tests.unit.tasks.naughty:Always", "eval_prompts": 0}
    run = Run(options_for(tmp_path / "run", model_path, task=task))
    waits: list[str] = []

    async def watched() -> RunSummary:
        async def watch() -> None:
            while True:
                waits.append(run.daemon.waits_for[0])
                await asyncio.sleep(0.01)

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            return await run.finish()
        finally:
            watcher.cancel()

    with pytest.raises(
        TaskError, match="64 rewards failed one after another, all like this: ValueError: no reward today"
    ):
        go(watched())
    assert any("rewards failed one after another" in text and "groups complete" in text for text in waits)
    (reason,) = run.coordinator.left_for
    assert reason.startswith("finished: ") and "no reward today" in reason, (
        "rented machines are given back, and the page says why; the same command opens the run again"
    )
