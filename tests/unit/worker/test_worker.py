"""The whole worker, in process, against a small real run: enrolment, broadcast, embedded engine, reports, drain."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from echo2.base.errors import BadToken, NotAllowed, ProtocolError, StateError, VersionMismatch
from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, Rollout, SamplingParams
from echo2.broadcast.node import BroadcastNode
from echo2.config.run import RunConfig
from echo2.weights import fingerprint
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker.control import ask
from echo2.worker.options import WorkerOptions
from echo2.worker.weights import model_digest
from echo2.worker.worker import Worker, WorkerDaemon
from tests.contract.engine_rig import make_versions, tiny_config
from tests.patience import WAIT_S
from tests.unit.worker.peers import KEY, SmallRun, until

CONFIG = tiny_config("qwen3")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.worker.worker.RECONNECT_S_MAX", 0.3)


def options(run: SmallRun, folder: Path, **more: object) -> WorkerOptions:
    """`slowdown`, `model_path`: options of the run file; the rest of `more`: of the process."""
    worker = {"engine": "embedded", "slots": 8, "price_usd_per_hour": 0.5, "slowdown": more.pop("slowdown", 1.0)}
    config = RunConfig.model_validate({"worker": worker, "model": {"path": more.pop("model_path", "")}})
    given = {"join_link": run.link(), "name": "w1", "listen_host": "127.0.0.1"}
    return WorkerOptions(folder=folder, config=config, **(given | more))  # type: ignore[arg-type]


def group(name: str, count: int = 4, tokens_max: int = 24, prompt: tuple[int, ...] = (5, 6, 7)) -> GroupSpec:
    return GroupSpec(GroupId(name), prompt, count, SamplingParams(max_new_tokens=tokens_max, seed=3), 0)


def worker_of(daemon: WorkerDaemon) -> Worker:
    assert daemon.worker is not None, "it has enrolled"
    return daemon.worker


@asynccontextmanager
async def working(run: SmallRun, folder: Path, **more: object) -> AsyncIterator[WorkerDaemon]:
    """A daemon that runs for the block and is drained after it."""
    daemon = WorkerDaemon(options(run, folder, **more))
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
        daemon.stop("the test ends")
        await asyncio.wait_for(task, WAIT_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def prepared(run: SmallRun) -> list[torch.nn.Module]:
    """The learner has joined and published version 0."""
    run.model_config_json = json.dumps(CONFIG).encode()
    models = make_versions(CONFIG)
    table = [(name, tuple(p.shape), "bfloat16") for name, p in models[0].named_parameters()]
    run.model_digest = model_digest(run.model_config_json, table)
    run.coordinator.learner = run.whereabouts
    await run.publish(0, models[0])
    return models


def judged(models: list[torch.nn.Module], prompt: tuple[int, ...], rollout: Rollout) -> float:
    """The largest difference between the rollout's raw log-probabilities and the versions' own, token by token."""
    tokens = torch.tensor([[*prompt, *rollout.token_ids]])
    versions = [span.version for span in rollout.version_spans for _ in range(span.count)]
    worst = 0.0
    with torch.no_grad():
        by_version = {v: models[v](tokens).logits[0].log_softmax(-1) for v in set(versions)}
    for i, (token, version) in enumerate(zip(rollout.token_ids, versions, strict=True)):
        expected = by_version[version][len(prompt) + i - 1, token].item()
        worst = max(worst, abs(expected - rollout.raw_logprobs[i]))
    return worst


async def test_a_worker_joins_measures_its_rate_and_delivers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "echo2")
    async with SmallRun(tmp_path / "run") as run:
        models = await prepared(run)
        run.coordinator.learner.longest_sequence_tokens = 40
        run.coordinator.clock_ahead_s = 3600.0
        run.coordinator.lease_s = 3630.0  # by the coordinator's clock in half a minute
        async with working(run, tmp_path / "w") as daemon:
            await run.coordinator.until(lambda it: it.requests)
            declared = [beat for beat in run.coordinator.heartbeats if beat.tokens_per_s > 0]
            assert declared and declared[0].sampled_tokens == 0, "what the probe samples is nobody's"
            status = await ask(daemon.folder, "status")
            assert "measured before the first lease" in str(status["rate"])
            assert "waits for its embedded engine to start" in caplog.text and "engine" not in str(status["waits_for"])
            assert "behind the coordinator's" in str(status["clock"]) and "synchronised" in str(status["clock"])
            assert (status["price_usd_per_hour"], status["slots"], status["version"]) == (0.5, 8, 0)
            run.coordinator.groups = [group(f"g{i}") for i in range(4)]
            await run.learner.until(lambda it: len(it.finished) == 16)
            await run.coordinator.until(lambda it: len(it.ended) == 4)
            assert {e.reason for e in run.coordinator.ended} == {coordinator_pb2.LeaseEnded.REASON_FINISHED}
            await run.coordinator.until(lambda it: it.heartbeats[-1].finished_rollouts == 16)
            beat = run.coordinator.heartbeats[-1]
            assert (beat.version, beat.fingerprint) == (0, f"{run.published.fingerprint():016x}")
            assert 16 <= beat.sampled_tokens <= 16 * 24
        assert run.coordinator.leavings == ["the test ends"]
        hello = run.coordinator.hellos[0]
        assert (hello.name, hello.price_usd_per_hour, hello.slot_count, hello.engine) == ("w1", 0.5, 8, "embedded")
        assert hello.quantisation == "" and "8 sequences of up to 40 tokens" in caplog.text
        for key, rollout in run.learner.finished.items():
            assert judged(models, (5, 6, 7), rollout) < 1e-4, key


async def test_a_version_that_comes_midway_is_swapped_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with SmallRun(tmp_path / "run") as run:
        models = await prepared(run)
        run.coordinator.groups = [group(f"g{i}", 4, 60) for i in range(200)]  # work until the version is here
        async with working(run, tmp_path / "w", slowdown=12.0) as daemon:
            await run.learner.until(lambda it: len(it.held) == 4)
            fingerprint = await run.publish(1, models[1])
            await run.coordinator.until(lambda it: it.heartbeats[-1].version == 1)
            run.coordinator.groups.clear()
            assert run.coordinator.heartbeats[-1].fingerprint == fingerprint
            await until(lambda: daemon.worker is not None and not daemon.worker.leases.lease_ids)
        assert "the engine kept version" not in caplog.text, "the delta itself was put in place"
        mixed = [r for r in run.learner.finished.values() if len(r.version_spans) == 2]
        assert mixed, "some rollout spans both versions"
        for rollout in run.learner.finished.values():
            assert judged(models, (5, 6, 7), rollout) < 1e-4


async def test_a_drain_hands_partials_back_at_once_and_another_worker_goes_on(tmp_path: Path) -> None:
    async with SmallRun(tmp_path / "run") as run:
        models = await prepared(run)
        run.coordinator.groups = [group("g1", 4, 200)]
        run.coordinator.report_interval_s = 60.0  # nothing but the drain reports
        async with working(run, tmp_path / "w1", slowdown=6.0) as daemon:
            await until(lambda: daemon.worker is not None and daemon.worker.leases.rates.sampled_tokens > 40)
            assert not run.learner.held
            begun = time.monotonic()
            daemon.stop("preempted")
            await run.coordinator.until(lambda it: it.ended)
            assert time.monotonic() - begun < 20.0, "no report was due for a minute; benchmarks tell how long"
            assert worker_of(daemon).generation.unheld_tokens == 0
        assert run.coordinator.ended[0].reason == coordinator_pb2.LeaseEnded.REASON_HANDED_BACK
        sampled = worker_of(daemon).leases.rates.sampled_tokens
        assert sum(len(run.learner.rollout_of(key).token_ids) for key in run.learner.held) == sampled
        partials = {key: run.learner.rollout_of(key).token_ids for key in run.learner.held}
        run.coordinator.groups = [group("g1", 4, 200)]
        run.coordinator.continues = {"g1"}
        async with working(run, tmp_path / "w2") as second:
            await run.learner.until(lambda it: len(it.finished) == 4)
        assert worker_of(second).leases.rates.sampled_tokens == 4 * 200 - sampled
        for key, rollout in run.learner.finished.items():
            assert rollout.token_ids[: len(partials[key])] == partials[key]
            assert judged(models, (5, 6, 7), rollout) < 1e-4


async def test_the_owner_can_let_it_finish_or_send_it_away(tmp_path: Path) -> None:
    async with SmallRun(tmp_path / "run") as run:
        await prepared(run)
        run.coordinator.groups = [group("g1", 4, 60)]
        daemon = WorkerDaemon(options(run, tmp_path / "w", slowdown=12.0))
        task = asyncio.create_task(daemon.run())
        await run.learner.until(lambda it: it.held)
        assert await ask(daemon.folder, "drain") == {"text": "finishing 1 leases, then leaving"}
        await asyncio.wait_for(task, WAIT_S)
        assert len(run.learner.finished) == 4
        assert run.coordinator.leavings == ["drained"]
        run.coordinator.groups = [group("g2", 4, 200)]
        task = asyncio.create_task(WorkerDaemon(options(run, tmp_path / "w", slowdown=12.0)).run())
        await run.learner.until(lambda it: ("g2", 0) in it.held)
        await ask(daemon.folder, "leave")
        await asyncio.wait_for(task, WAIT_S)
        assert run.coordinator.ended[-1].reason == coordinator_pb2.LeaseEnded.REASON_HANDED_BACK


async def test_a_worker_that_still_reads_the_chunks_of_the_run_before_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SmallRun(tmp_path / "run") as run:
        monkeypatch.setattr(BroadcastNode, "start", lambda _: asyncio.Event().wait())
        async with working(run, tmp_path / "w") as daemon:
            await until(lambda: daemon.worker is not None)


async def test_generation_goes_on_while_coordinator_and_learner_are_away_or_move(tmp_path: Path) -> None:
    async with SmallRun(tmp_path / "run") as run:
        await prepared(run)
        run.coordinator.groups = [group("g1", 4, 60)]
        async with working(run, tmp_path / "w", slowdown=12.0) as daemon:
            await run.learner.until(lambda it: it.held)
            await run.stop("coordinator")
            await run.stop("learner")
            await until(lambda: worker_of(daemon).leases.rates.finished_rollouts == 4)
            assert not run.learner.finished
            await run.start_learner()
            await run.learner.until(lambda it: len(it.finished) == 4)
            run.coordinator_address = "127.0.0.1:0"  # elsewhere
            await run.start_coordinator()
            await run.coordinator.until(lambda it: len(it.hellos) == 2)
            run.coordinator.groups = [group("g2", 2, 8)]
            await run.learner.until(lambda it: len(it.finished) == 6)


async def test_refusals_end_the_worker_with_the_error_that_they_name(tmp_path: Path) -> None:
    async with SmallRun(tmp_path / "run") as run:
        with pytest.raises(BadToken, match="expected one that is known"):
            await WorkerDaemon(options(run, tmp_path / "w", join_link=run.link("bad"))).run()
        for code, error in (
            ("NotAllowed", NotAllowed), ("VersionMismatch", VersionMismatch), ("Nonsense", ProtocolError)
        ):  # fmt: skip
            run.coordinator.refusal = coordinator_pb2.Refusal(code=code, message="protocol 2, not 1")
            with pytest.raises(error, match="protocol 2, not 1"):
                await WorkerDaemon(options(run, tmp_path / "w")).run()
        run.coordinator.refusal, run.coordinator.run_id = None, "another-run"
        with pytest.raises(StateError, match="expected run small-run, got another-run"):
            await WorkerDaemon(options(run, tmp_path / "w")).run()
    async with SmallRun(tmp_path / "other") as other:
        with pytest.raises(StateError, match="give this run a folder of its own"):
            await WorkerDaemon(options(other, tmp_path / "w")).run()


def saved(folder: Path, model: torch.nn.Module) -> str:
    folder.mkdir()
    tensors = {key: value.detach().clone() for key, value in model.named_parameters()}
    save_file(tensors, str(folder / "model.safetensors"))
    return str(folder)


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """A later version: few weights differ."""
    later = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.view(-1)[::50] *= 1.01
    return later


async def test_the_base_of_this_machine_goes_live_by_its_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "echo2.worker")
    async with SmallRun(tmp_path / "run") as run:
        models = await prepared(run)
        bases = [await asyncio.to_thread(saved, tmp_path / str(n), models[n]) for n in range(2)]
        for number, is_adopted in enumerate((True, False)):  # the latter is another model's
            run.coordinator.groups = [group(f"g{number}")]
            async with working(run, tmp_path / f"w{number}", model_path=bases[number]):
                await run.learner.until(lambda it, count=4 * number + 4: len(it.finished) == count)
            assert "base checkpoint in" in caplog.text and ("nothing to fetch" in caplog.text) == is_adopted
            caplog.clear()
        assert all(judged(models, (5, 6, 7), rollout) < 1e-4 for rollout in run.learner.finished.values())
        run.coordinator.heartbeats.clear()
        async with working(run, tmp_path / "w1", join_link=run.link("spent"), model_path=bases[0]):
            await run.coordinator.until(lambda it: it.heartbeats and it.heartbeats[-1].has_version)
        assert "base checkpoint in" not in caplog.text, "its store has the version"


@pytest.mark.parametrize("is_base", [True, False])
async def test_a_newcomer_with_the_base_fetches_a_delta(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_base: bool
) -> None:
    caplog.set_level("INFO", "echo2")
    async with SmallRun(tmp_path / "run") as run:
        models = await prepared(run)
        later = moved(models[0])
        await run.publish(7, later, base=models[0])
        run.coordinator.learner.newest_version = 7
        await run.publish(8, moved(later))
        base = await asyncio.to_thread(saved, tmp_path / "base", models[0 if is_base else 1])
        async with working(run, tmp_path / "w1", model_path=base) as daemon:
            await run.coordinator.until(lambda it: it.heartbeats and it.heartbeats[-1].version == 8)
            host = worker_of(daemon).weights.host
            assert fingerprint(host.tensors(), KEY) == host.fingerprint()
            beat = run.coordinator.heartbeats[-1]
            assert beat.fingerprint == f"{run.published.fingerprint():016x}"
        sizes = [left.stat().st_size for left in (tmp_path / "w1" / "chunks").glob("*.artifact")]
        if is_base:
            assert "catching up by base" in caplog.text and "base checkpoint and delta 0->7" in caplog.text
            assert sum(sizes) < sum(t.nbytes for t in run.published.tensors().values()) / 3, "no keyframe was fetched"
        else:
            assert "parent's fingerprint" in caplog.text


async def test_an_engine_that_does_not_end_in_time_leaves_nothing_else_open() -> None:
    engine = mock.Mock(stop=mock.AsyncMock(side_effect=TimeoutError))
    worker = mock.Mock(_parts=[], weights=None, node=mock.AsyncMock(), generation=mock.Mock(engine=engine))
    await Worker.close(worker)
    worker.node.stop.assert_awaited_once()
    worker.generation.close.assert_called_once()
