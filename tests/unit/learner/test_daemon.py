"""The learner's daemon over real gRPC, with a made-up coordinator and workers: runs to the end, kills, stops and refusals."""

import asyncio
import itertools
import json
import math
import shutil
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from echo2.base.errors import (
    ConfigError,
    DiskFull,
    EchoError,
    PortBusy,
    RunFinished,
    StateError,
    TaskError,
    TrainingError,
)
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.cli.main import main
from echo2.control.session import ControlSession
from echo2.coordinator.planning.telemetry import LearnerBoard
from echo2.learner.learner import LearnerDaemon, as_reported, parts_of
from echo2.learner.loop import keep_for_inspection
from echo2.learner.options import LearnerLimits, RunFolder
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch, evaluated_version
from echo2.learner.rollouts.pool import RolloutPool
from echo2.learner.startup import export_run
from echo2.outside.guard import FairShare
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.trust.tls import Credentials, load_credentials, load_or_create_identity
from echo2.weights import fingerprint
from echo2.wire.bounds import limits_of, parsed
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from tests.certificates import issued
from tests.ports import choose_ports
from tests.unit.learner.fleet import (
    RUN,
    FollowerBroadcaster,
    Run,
    new_authority,
    options_for,
    prepared_from,
    rows_of,
)
from tests.unit.learner.test_metrics import documented_names
from tests.unit.learner.tiny import make_tiny_model

# ---- to the end


@pytest.mark.parametrize(("bound", "kappa", "lag"), [(0, 0, 0), (1, 1, 1), (8, 1, 0)])
def test_a_run_never_trains_above_the_bound(model_path: Path, tmp_path: Path, bound: int, kappa: int, lag: int) -> None:
    """Also where workers lag behind."""
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": bound, "kappa": kappa}))
    run.follower.spread_bytes_per_s = 1e3
    summary = asyncio.run(run.finish(lag=lag))
    assert summary.is_finished and summary.steps == 6 and summary.over_stale_tokens == 0
    rows = rows_of(tmp_path / "run")
    assert not {name for row in rows for name in row} - documented_names()
    evaluated = rows_of(tmp_path / "run", "evaluations")
    steps = [row["step"] for row in evaluated]
    assert steps in ([0, 3, 6], [0, 6]) and [*summary.evaluations] == steps, "one that waits gives way to a newer one"
    assert all(row["eval/rollouts"] == 4 for row in evaluated)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["lag/max"] <= bound for row in rows[1:])
    assert summary.trained_rollouts == 6 * 8
    assert summary.version == 6, "the last step is always published"
    assert f"{run.follower.host.fingerprint():016x}" == summary.fingerprint
    if bound == 8:
        assert rows[-1]["delta/setting"] == "dense" and rows[-1]["bytes/merged"] > 0


def test_a_relay_whose_port_is_taken_ends_the_learner_with_all_that_it_has_begun(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was not stopped held the process for ever."""
    run = Run(options_for(tmp_path / "run", model_path, learner={"advertise": "192.0.2.1:1"}))
    monkeypatch.setattr(run.follower, "serve_relay", mock.AsyncMock(side_effect=PortBusy("8425 is taken")))
    monkeypatch.setattr(run.follower, "stop", stop := mock.AsyncMock())
    with pytest.raises(PortBusy, match="8425"):
        asyncio.run(run.finish(worker_count=0))
    assert stop.await_count == 1


def test_a_finished_learner_stays_while_its_last_version_is_fetched_and_is_exported(
    model_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (port,), pages, target = choose_ports((0,)), list[str](), tmp_path / "exported"
    limits = LearnerLimits(free_bytes_min=1, linger_s=20.0)
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 1}, limits=limits, metrics_port=port))
    run.follower.needed_looks = 4

    def look() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            pages.append(answer.read().decode())

    run.at_step = {step: lambda: threading.Thread(target=look).start() for step in (3, 4, 5)}
    summary = asyncio.run(run.finish())
    assert any("echo2_learner_reward_mean" in page for page in pages)
    assert run.follower.asked >= 4 and run.coordinator.left_for == ["finished"]
    assert main(["export", str(run.options.folder), str(target)]) == 0
    assert main(["export", str(run.options.folder), str(target)]) == 2, "a folder with files is not written over"
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "new")]) != 0
    for folder in (target, run.options.folder / "model"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert AutoTokenizer.from_pretrained(folder).encode("12>")
        key = run.follower.host.key
        assert f"{fingerprint(dict(model.named_parameters()), key):016x}" == summary.fingerprint


def test_learner_and_coordinator_hear_of_each_other(model_path: Path, tmp_path: Path) -> None:
    plan = coordinator_pb2.PlanUpdate(kappa=2, in_flight_cap_rollouts=16, predicted_utilisation=0.5)
    task = {"args": {"one_in": 4}}
    section = {"steps": 5, "emulated_link": "8mbit/s 16mbit/s 30ms"}
    run = Run(options_for(tmp_path / "run", model_path, staleness={"bound": 4}, learner=section, task=task), plan)
    banned = [
        coordinator_pb2.WorkerBanned(peer_id="liar", reason="by hand", is_banned=True),
        coordinator_pb2.WorkerBanned(peer_id="slip", reason="a slip", is_banned=True),
        coordinator_pb2.WorkerBanned(peer_id="slip", is_lifted=True),
    ]
    run.coordinator.orders += [coordinator_pb2.LearnerOrder(banned=order) for order in banned]
    kept: list[Version] = []

    def after_one() -> None:
        run.learner.accuse(PeerId("w"), "it lies", is_certain=True)
        run.learner.auditor.keep = lambda version, tensors: kept.append(version)  # type: ignore[method-assign]

    run.at_step[1] = after_one
    has_model: list[bool] = []  # at each report of a finished learner: what runs it may end it then

    class Reports(list[coordinator_pb2.LearnerReport]):
        def append(self, report: coordinator_pb2.LearnerReport) -> None:
            super().append(report)
            if report.is_finished:
                has_model.append((tmp_path / "run" / "model" / "config.json").exists())

    run.coordinator.reports = Reports()
    summary = asyncio.run(run.finish())
    coordinator = run.coordinator
    assert has_model and all(has_model) and max(summary.evaluations) == 5, "the last version is evaluated, too"
    (hello,) = coordinator.hellos
    assert list(run.learner.hello().barred_peer_ids) == ["liar"], "it asks whether it still is; whom it accuses it says"
    assert hello.rollouts_per_step == 8 and hello.staleness_bound == 4 and hello.model_digest
    assert json.loads(hello.model_config_json)["model_type"] == "qwen3"
    link = hello.link
    assert (link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s) == (1e6, 2e6, pytest.approx(0.03))
    assert kept == [v.version for v in coordinator.published if v.has_parent] == [2, 4, 5]
    complete = [name for name, reason in coordinator.closed if reason == "complete"]
    assert sum(evaluated_version(name) is None for name in complete) == 10
    assert coordinator.offers > coordinator.reminders, "groups are offered as they are opened, not by reminders"
    assert coordinator.reports[-1].is_finished and coordinator.reports[-1].step == 5
    equal = [row["reward/equal_group_fraction"] == 1 for row in rows_of(tmp_path / "run") if "reward/mean" in row]
    in_a_row = list(itertools.accumulate(equal, lambda count, is_equal: (count + 1) * is_equal, initial=0))
    assert any(in_a_row)
    for report in coordinator.reports:  # one between a step and its row has those of the row before
        assert report.equal_reward_steps in in_a_row[max(0, report.step - 1) : report.step + 1]
    assert coordinator.reports[-1].equal_reward_steps == in_a_row[5]
    assert rows_of(tmp_path / "run")[3]["utilisation/predicted"] == 0.5
    assert run.learner.pool.barred == {"liar": "by hand"}, "nothing is taken from it, and the other is back"
    assert coordinator.accused == [coordinator_pb2.WorkerAccused(peer_id="w", reason="it lies", is_certain=True)]


@pytest.mark.parametrize(("groups", "tokens", "pieces"), [(3, 1 << 18, 0), (96, 2, 3000)])
def test_a_coordinator_takes_every_message_of_groups_however_large_they_are(
    groups: int, tokens: int, pieces: int
) -> None:
    """Long prompts, and stop strings that thousands of tokens can be part of."""
    stops = (b"\n",) if pieces else ()
    sampling = SamplingParams(stop_strings=stops, stop_piece_ids=tuple(range(pieces)), stop_pieces=(b"a\n",) * pieces)
    specs = [GroupSpec(GroupId(f"g{number}"), (100_000,) * tokens, 16, sampling, 0) for number in range(groups)]
    limits, taken = replace(limits_of("/echo2.v1.Coordinator/LearnerSession"), bytes_max=1 << 20), []
    for part in parts_of(specs):
        said = coordinator_pb2.LearnerMessage(offer=coordinator_pb2.OfferGroups(groups=part)).SerializeToString()
        taken += parsed(coordinator_pb2.LearnerMessage, said, limits, "the learner").offer.groups
    assert [group.group_id for group in taken] == [spec.group_id for spec in specs]


def test_coordinator_and_deltas_may_be_lost(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[tuple[float, float, float]] = []
    monkeypatch.setattr("echo2.learner.loop.steps_between", lambda *seconds: (costs.append(seconds), 2)[1])
    limits, learner = LearnerLimits(8, free_bytes_min=1, linger_s=0.0), {"steps": 8, "checkpoint_every_steps": 0}
    run = Run(options_for(tmp_path, model_path, limits=limits, staleness={"bound": 1}, learner=learner))
    tasks = []

    monkeypatch.setattr("echo2.learner.learner.PART_BYTES", 1)  # as if each group were large

    async def go_and_come_back() -> None:
        port = int(run.coordinator.address.rpartition(":")[2])
        await run.coordinator.stop()
        run.learner.accuse(PeerId("w"), "it lies", is_certain=True)
        run.coordinator.groups.clear()
        run.coordinator.offered.clear()
        await run.coordinator.start(port)

    run.at_step[2] = lambda: tasks.append(asyncio.get_running_loop().create_task(go_and_come_back()))
    run.at_step[3] = lambda: run.follower.calls.lost("delta 0->1")
    summary = asyncio.run(run.finish())
    assert summary.is_finished and f"{run.follower.host.fingerprint():016x}" == summary.fingerprint
    _, again = run.coordinator.hellos
    assert again.step >= 2 and len(again.open_groups) == 1 <= len(again.later_group_ids)
    later, lacking = {*again.later_group_ids}, {group.spec.group_id for group in run.learner.pool.groups.lacking}
    assert later & run.coordinator.groups.keys() >= later & lacking, (
        "offered behind the welcome, unless complete by then"
    )
    assert [accused.peer_id for accused in run.coordinator.accused] == ["w"], "told to the one that came back"
    keyframes = [version for version, parent in run.follower.versions if parent is None]
    assert keyframes[:2] == [0, 2], "these are due by their weight"
    assert keyframes[2] in (2, 3), "this one is due to the loss alone"
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps[-1] == 8 and len(steps) >= 2 and min(b - a for a, b in itertools.pairwise([0, *steps[:-1]])) >= 2
    assert all(checkpoint_s > 0 and 0 < train_s <= step_s for checkpoint_s, train_s, step_s in costs)


# ---- stops and absences


def test_a_stopped_learner_does_not_say_that_the_run_is_finished_and_goes_on_until_the_operator_ends_it(
    model_path: Path, tmp_path: Path
) -> None:
    """Workers are sent home and machines given back by that word."""
    from transformers import AutoModelForCausalLM

    with pytest.raises(StateError, match="expected checkpoints"):
        export_run(tmp_path / "run", tmp_path / "out", str(model_path))
    options = options_for(tmp_path / "run", model_path, learner={"steps": 40, "checkpoint_every_steps": 100})
    run = Run(options)
    run.at_step[3] = run.daemon.stop
    summary = asyncio.run(run.finish())
    assert not summary.is_finished and summary.steps == 3 and not (tmp_path / "run" / "model").exists()
    assert run.coordinator.left_for == ["stopped"]
    again = prepared_from(options)
    assert not again.rows_again and again.team.step_count == 3
    assert export_run(tmp_path / "run", tmp_path / "out", str(model_path)) == 3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in run.learner.loop.p.model.snapshot().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, dict(exported.named_parameters())[name])
    run, told = Run(options), coordinator_pb2.Refusal(code="RunFinished", message="stopped by the operator")
    run.at_step[4] = lambda: run.coordinator.orders.append(coordinator_pb2.LearnerOrder(refusal=told))
    with pytest.raises(RunFinished, match="stopped by the operator"):
        asyncio.run(run.finish())
    again = prepared_from(options)
    assert not again.rows_again and again.team.step_count == run.learner.loop.step >= 4, "what was trained is kept"


# ---- refusals at the start


def test_another_run_s_folder_or_one_in_use_is_refused(model_path: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + 1", "answer": "{n + 1}"}}\n' for n in range(9)))
    model = Path(shutil.copytree(model_path, tmp_path / "model"))
    task = {"name": "math", "args": {"path": str(rows)}, "trusted_rewards": True, "eval_prompts": 2}
    options = options_for(tmp_path / "run", model, task=task)
    prepared_from(options).prompts.close()
    with pytest.raises(StateError, match="rollouts_per_step"):
        prepared_from(options_for(tmp_path / "run", model, task=task, learner={"prompts_per_step": 4}))
    with pytest.raises(StateError, match=r"expected lora \[0, 0\] as when the run began, got \[4, 0\]"):
        prepared_from(options_for(tmp_path / "run", model, task=task, model={"path": str(model), "lora_rank": 4}))
    with pytest.raises(StateError, match="base_fingerprint"):
        prepared_from(options_for(tmp_path / "run", make_tiny_model(tmp_path / "other", seed=1), task=task))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(StateError, match=r"expected tokenizer .* as when the run began"):
        prepared_from(options)
    (model / "chat_template.jinja").unlink()
    rows.write_text(rows.read_text().replace("8 + 1", "8 + 2"))
    with pytest.raises(StateError, match=r"expected data .* as when the run began"):
        prepared_from(options)
    holder = RunFolder(tmp_path / "run")
    with pytest.raises(StateError, match="runs a learner in it"):
        RunFolder(tmp_path / "run")
    holder.release()


def test_a_start_that_cannot_work_says_so_at_once(model_path: Path, tmp_path: Path) -> None:
    too_long = options_for(tmp_path / "long", model_path, sampling={"max_new_tokens": 300})
    with pytest.raises(ConfigError, match="context of 256"):
        asyncio.run(Run(too_long).finish())
    with pytest.raises(DiskFull, match="bytes free"):
        prepared_from(options_for(tmp_path / "full", model_path, limits=LearnerLimits(free_bytes_min=1 << 62)))
    daemon = LearnerDaemon(options_for(tmp_path / "run", model_path), lambda s, c, o, k: FollowerBroadcaster())
    with pytest.raises(EchoError, match="join link"):
        asyncio.run(daemon.run())


def test_a_learner_goes_on_under_the_coordinator_that_its_link_names_and_another_runs_link_is_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has lost its folder is another: it was waited for, by the certificate of before, for ever."""
    before, after = new_authority(), new_authority()
    peer_ids = before.identity.peer_id, after.identity.peer_id
    links = {peer_id: str(JoinLink("127.0.0.1", 1, peer_id, "a-token")) for peer_id in peer_ids}

    async def enrolled(link: JoinLink, identity: Identity, role: Role, *_: object) -> Credentials:
        authority = before if link.peer_id == before.identity.peer_id else after
        return issued(authority, role, "127.0.0.1:1", identity=identity)

    monkeypatch.setattr("echo2.learner.learner.enrolled", enrolled)
    options = options_for(tmp_path / "run", model_path, run={"name": "mine"})
    options = replace(options, join_link=links[before.identity.peer_id])
    with pytest.raises(ConfigError, match=f"run mine: expected a join link of this run, .* of run {RUN};"):
        asyncio.run(LearnerDaemon(options, lambda s, c, o, k: FollowerBroadcaster()).run())
    assert not (tmp_path / "run" / "node" / "credentials.json").exists()
    prepared = mock.Mock(side_effect=StateError("so far"))
    peers = []
    for authority in (before, after, None):
        link = links[authority.identity.peer_id] if authority else ""
        options = replace(options_for(tmp_path / "run", model_path), join_link=link)
        with pytest.raises(StateError, match="so far"):
            asyncio.run(LearnerDaemon(options, make_prepared=prepared).run())
        kept = load_credentials(tmp_path / "run" / "node", load_or_create_identity(tmp_path / "run" / "node"))
        assert kept is not None and kept.coordinator_peer_id == (authority or after).identity.peer_id
        peers.append(kept.peer_id)
    assert len(set(peers)) == 1


# ---- ends that somebody must mend


@pytest.mark.parametrize(
    ("part", "method", "error", "steps"),
    [
        (RolloutPool, "tick", StateError("journal: expected to write, got: a test"), 100_000),
        (CheckpointStore, "save", DiskFull("expected room for a checkpoint, got: a test"), 1),
    ],
    ids=["beside training", "last checkpoint"],
)
def test_what_fails_beside_training_or_for_the_last_checkpoint_ends_the_run(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, method: str, error: EchoError, steps: int
) -> None:  # fmt: skip
    """Once a second the pool moves evaluations on that nobody answers: a run would wait for them for ever."""
    monkeypatch.setattr(part, method, mock.Mock(side_effect=error))
    run = Run(options_for(tmp_path / "run", model_path, task={"eval_prompts": 0}, learner={"steps": steps}))
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(run.finish())


def test_a_data_set_that_ends_first_ends_the_run_after_its_last_whole_batch(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, waits = ControlSession.leave, list[float]()
    monkeypatch.setattr(
        ControlSession, "leave", lambda self, word, within_s: (waits.append(within_s), leave(self, word, within_s))[1]
    )
    task = {"name": "sort_digits", "args": {"digit_count": 1}, "epochs": 1}
    run = Run(options_for(tmp_path / "run", model_path, task=task))
    with pytest.raises(TaskError, match="data set exhausted.* 6 training prompts, which were drawn 1 times"):
        asyncio.run(run.finish())
    (reason,) = run.coordinator.left_for
    assert reason.startswith("finished: data set exhausted"), "the coordinator is told why the run is over"
    assert rows_of(tmp_path / "run")[-1]["step"] == 3, "six prompts make three batches of two"
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    enough = Run(options_for(tmp_path / "enough", model_path, task=task, learner={"steps": 3}))
    assert asyncio.run(enough.finish()).is_finished, "no more prompts are missed than there are steps"
    assert run.coordinator.reports[-1].prompts_exhausted
    assert not any(report.prompts_exhausted for report in enough.coordinator.reports), "nobody has to add any"
    enough.learner.server = enough  # type: ignore[assignment]
    assert enough.learner.hello().step_limit == 0, "whoever hands in versions ends the run"
    assert len(waits) == 2 and min(waits) > 2 * FairShare.PAUSE_MAX_S, "so long a coordinator may leave it unread"


def test_losses_that_stay_not_finite_end_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_for(tmp_path / "run", model_path, task={"eval_prompts": 0}, learner={"steps": 12})
    monkeypatch.setattr("echo2.learner.training.trainer.NONFINITE_STEPS_MAX", 2)
    wrote: list[threading.Thread] = []

    def kept_here(batch: Batch, folder: Path) -> None:
        wrote.append(threading.current_thread())
        keep_for_inspection(batch, folder)

    monkeypatch.setattr("echo2.learner.loop.keep_for_inspection", kept_here)
    run = Run(options)

    def spoil() -> None:
        with torch.no_grad():
            for parameter in run.learner.loop.p.model.hf_model.parameters():  # type: ignore[attr-defined]
                parameter.fill_(float("nan"))

    run.at_step[1] = spoil
    with pytest.raises(TrainingError, match="3 steps in a row; their batches are in not_finite"):
        asyncio.run(run.finish())
    kept = sorted(path.name for path in (tmp_path / "run" / "not_finite").iterdir())
    assert kept == ["step-00000001.json", "step-00000002.json", "step-00000003.json"]
    assert len(wrote) == 3 and threading.main_thread() not in wrote, "the event loop serves meanwhile"
    rows = rows_of(tmp_path / "run")[1:]
    assert "are left out" not in caplog.text, "no worker is to blame"
    assert [row["is_skipped"] for row in rows] == [math.isnan(row["grad_norm"]) for row in rows] == [False, True, True]


async def test_a_reward_that_always_raises_ends_the_run_with_its_cause(model_path: Path, tmp_path: Path) -> None:
    task = {"name": "tests.unit.tasks.naughty:Always", "eval_prompts": 0, "trusted_rewards": False}
    run = Run(options_for(tmp_path / "run", model_path, task=task))
    waits, finishing = list[str](), asyncio.get_running_loop().create_task(run.finish())
    while not finishing.done():
        waits.append(run.daemon.waits_for[0])
        await asyncio.sleep(0.01)
    with pytest.raises(TaskError, match="64 rewards failed one after another, all .*: ValueError: no reward today"):
        await finishing
    assert any("rewards failed one after another" in text and "groups complete" in text for text in waits)
    (reason,) = run.coordinator.left_for
    assert reason.startswith("finished: ") and "no reward today" in reason, (
        "rented machines are given back, and the page says why; the same command opens the run again"
    )


@pytest.mark.parametrize("reward", [-1.0, -0.5, 0.0])
def test_an_evaluation_in_which_all_failed_is_no_missing_one(reward: float) -> None:
    report = coordinator_pb2.LearnerReport.FromString(
        coordinator_pb2.LearnerReport(eval_reward=as_reported(reward)).SerializeToString()
    )
    assert LearnerBoard(report=report).eval_reward == pytest.approx(reward)
    assert LearnerBoard().eval_reward is None
