"""A learner that is killed on a device which does not give the same bits twice: real daemon, trainer, journal, chunk store."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.errors import FingerprintMismatch, StateError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.store import LeftFile, LeftVersions
from echo2.learner.options import LearnerLimits, LearnerOptions, RunFolder
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.publishing.publisher import SeedNode
from echo2.learner.rollouts.groups import Batch, Group, SentTokens, group_id_of
from echo2.learner.rollouts.journal import Journal, finished, opened, read_journal
from echo2.learner.startup import Prepared, new_team, prepare_with
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.shards import HeldVersions, VersionCoder
from echo2.learner.training.team import Team
from echo2.learner.training.trainer import StepResult, Trainer
from echo2.weights import DeltaHeader, Encoding, HostWeights, WeightSet
from echo2.weights.fingerprint import key_of_run
from echo2.wire.rollout import group_from_message
from tests.unit.learner.fleet import RUN, Run, crash_image, options_for, prepared_from, rows_of
from tests.unit.learner.made import rollout_of

Killed = tuple[LearnerOptions, dict[int, str]]


class OtherDevice(Team):
    """Its sums come out a little otherwise in the steps from `first_step` on."""

    def __init__(self, trainer: Trainer, first_step: int) -> None:
        super().__init__(trainer)
        self.first_step, self.is_copied = first_step, True

    def step(self, batch: Batch, is_published: bool = False, is_kept: bool = False) -> StepResult:
        done = super().step(batch, is_published, is_kept)
        self.is_copied = is_published
        if batch.step >= self.first_step:
            noise = torch.Generator().manual_seed(int(batch.step))
            for master in self.model.masters:
                master.add_(1e-3 * torch.randn(master.shape, generator=noise))
            self.model.round_to_policy()
        return done

    def snapshot(self) -> dict[str, torch.Tensor]:
        assert self.is_copied, "of a user's trainer that has been told so before the step"
        return super().snapshot()


def prepared_elsewhere(options: LearnerOptions, folder: RunFolder, first_step: int = 0) -> Prepared:
    team = new_team(options, Ranks())
    return prepare_with(OtherDevice(team.trainer, first_step), options, folder)


def new_run(options: LearnerOptions, first_step: int | None = None) -> Run:
    """With the real node and its store; on another device where `first_step` is given."""
    if first_step is None:
        return Run(options, make_broadcaster=SeedNode)
    return Run(options, make_broadcaster=SeedNode, make_prepared=lambda o, f: prepared_elsewhere(o, f, first_step))


def fingerprints(run: Run) -> dict[int, str]:
    return {published.version: published.fingerprint for published in run.coordinator.published}


def left_of(options: LearnerOptions) -> LeftVersions:
    return LeftVersions(options.chunk_folder)


class LeftDeltas(LeftVersions):
    """As if no keyframe were there: of a model this small, one is cheaper than two deltas."""

    @property
    def artifacts(self) -> list[LeftFile]:
        return [left for left in super().artifacts if left.header.artifact.parent is not None]


def deltas_of(options: LearnerOptions) -> LeftVersions:
    return LeftDeltas(options.chunk_folder)


def killed_as_it_left(model: Path, tmp_path: Path, versions: tuple[int, ...]) -> Killed:
    """As `kill`, at the moments at which the deltas to `versions` are sealed and on no record yet."""
    options = options_for(tmp_path / "run", model, staleness={"bound": 4, "kappa": 1})
    run = new_run(options)

    def watch() -> None:
        publisher = run.learner.publisher
        assert publisher.of_base.at == 0, "deltas go on from the base itself"
        told = publisher.port.on_artifact

        def killed_here(artifact: Any) -> None:
            if artifact.version in versions and artifact.has_parent:
                crash_image(run, tmp_path / str(artifact.version))
            told(artifact)

        publisher.port.on_artifact = killed_here

    run.at_step[1] = watch
    asyncio.run(run.finish())
    return options, fingerprints(run)


def worker_at(options: LearnerOptions, version: int, fingerprint: str) -> HostWeights:
    """What a worker holds that followed the learner to `version` before the kill."""
    host = HostWeights.empty(key_of_run(RUN))
    left_of(options).bring(host, Version(version), fingerprint)
    return host


Kill = Callable[..., Killed]


@pytest.fixture(scope="module")
def kill(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Kill:
    """A run's folder, copied to the given one, as a kill after step `at` leaves it, with one checkpoint or none; and what was
    published until the end. Beside it the weights that were lost. Runs are made once."""
    runs: dict[tuple[object, ...], Killed] = {}

    def of(folder: Path, at: int, checkpoint_at: int = 0, kappa: int = 0, lr: float = 1e-3) -> Killed:
        key = (checkpoint_at, kappa, lr)
        if key not in runs:
            kept = tmp_path_factory.mktemp("image")
            limits = LearnerLimits(8, free_bytes_min=1 << 20, linger_s=0.0)
            every, bounded = {"checkpoint_every_steps": checkpoint_at or 100, "lr": lr}, {"bound": 4, "kappa": kappa}
            options = options_for(kept / "run", model_path, limits=limits, staleness=bounded, learner=every)
            run = new_run(options)

            def crash(step: int) -> None:
                masters = crash_image(run, kept / str(step))
                torch.save(masters, kept / str(step) / "masters.pt")

            for step in (3, 5, 6):
                run.at_step[step] = partial(crash, step)
            asyncio.run(run.finish())
            runs[key] = replace(options, folder=kept), fingerprints(run)
        options, published = runs[key]
        shutil.copytree(options.folder / str(at), folder / "crashed")
        for later in sorted((folder / "crashed" / "checkpoints").glob("step-*"))[1:]:
            shutil.rmtree(later)
        return replace(options, folder=folder / "crashed"), published

    return of


def last_published(options: LearnerOptions) -> int:
    return max(left.header.artifact.version for left in left_of(options).artifacts)


@pytest.mark.parametrize(("at", "kappa", "checkpoint_at"), [(3, 1, 0), (5, 1, 2), (6, 4, 0), (6, 1, 0)])
def test_a_killed_learner_goes_on(
    kill: Kill, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, kappa: int, checkpoint_at: int
) -> None:
    crashed, before = kill(tmp_path, at, checkpoint_at, kappa=kappa)
    last = last_published(crashed)
    worker = worker_at(crashed, last, before[last])
    learner = crashed.config.learner.model_copy(update={"checkpoint_every_steps": 3})
    crashed = replace(crashed, config=crashed.config.model_copy(update={"learner": learner}))
    second = new_run(crashed, first_step=0)
    with caplog.at_level("INFO", logger="echo2.learner"):
        summary = asyncio.run(second.finish())
    assert summary.is_finished and summary.version == 6 and summary.over_stale_tokens == 0
    kept = CheckpointStore(crashed.folder / "checkpoints", crashed.limits, is_owner=False).steps()
    assert (4 in kept) == (at == 3), "the first step after those trained again, which have passed a multiple of three"
    groups = second.learner.pool.groups
    assert summary.trained_rollouts == 6 * 8 and groups.counts.trained_tokens == sum(groups.ledger.histogram().values())
    assert "published versions stay as they are" in caplog.text and "rebuilt from" in caplog.text
    deltas_of(crashed).bring(worker, Version(6), summary.fingerprint)  # from the bits that they hold, by deltas alone
    with pytest.raises(FingerprintMismatch):
        left_of(crashed).bring(worker, Version(6), "as another says")
    if last < at:
        assert f"leaves as version {at}, with a delta from version {last}" in caplog.text
        assert ArtifactId(Version(at), Version(last)) in [left.header.artifact for left in left_of(crashed).artifacts]
    if at == 6 == last:
        assert summary.fingerprint == before[6], "the run's last version had left: that is the model"
    else:
        assert summary.fingerprint != before[6], "it was another device"


@pytest.mark.parametrize(("at", "checkpoint_at"), [(3, 0), (5, 2), (6, 0)])
def test_on_the_same_device_the_weights_after_a_kill_are_bit_identical(
    model_path: Path, kill: Kill, tmp_path: Path, at: int, checkpoint_at: int
) -> None:
    base = PolicyModel(str(model_path), "bfloat16", torch.device("cpu"), 1.0)
    crashed, _ = kill(tmp_path, at, checkpoint_at, kappa=1)
    lost = torch.load(crashed.folder / "masters.pt")
    assert not any(map(torch.equal, lost, base.masters)), "there was something to lose"
    again = prepared_from(crashed)
    assert again.team.step_count == at
    assert all(map(torch.equal, again.team.model.masters, lost))  # type: ignore[attr-defined]
    trained = again.groups.ledger.trained
    assert len(trained) == 2 * at and not set(trained) & set(again.groups.groups)


def test_a_second_kill_after_a_replay_that_differed_is_survived(kill: Kill, tmp_path: Path) -> None:
    crashed, before = kill(tmp_path, 3, kappa=1)
    last = last_published(crashed)
    worker = worker_at(crashed, last, before[last])
    second = new_run(crashed, first_step=1)
    second.at_step[5] = lambda: crash_image(second, tmp_path / "again")
    asyncio.run(second.finish())
    again = replace(crashed, folder=tmp_path / "again")
    third = new_run(again, first_step=0)
    summary = asyncio.run(third.finish())
    assert summary.is_finished and summary.trained_rollouts == 6 * 8
    left_of(again).bring(worker, Version(6), summary.fingerprint)


def test_workers_may_hold_a_version_without_a_record(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options, before = killed_as_it_left(model_path, tmp_path, (3, 6))
    unsealed = replace(options, folder=shutil.copytree(tmp_path / "3", tmp_path / "unsealed"))
    shutil.rmtree(unsealed.chunk_folder)  # a moment before
    again = prepared_from(unsealed)
    assert again.cut_off is not None, "workers wait for the rest"
    assert (again.cut_off[0], again.schedule.newest) == (2, 3)
    crashed = replace(options, folder=tmp_path / "3")
    worker = worker_at(crashed, 3, before[3])
    summary = asyncio.run(new_run(crashed, first_step=0).finish())
    applied = deltas_of(crashed).bring(worker, Version(6), summary.fingerprint)
    assert applied[0].parent == 3, "the version that left unrecorded is the one that is gone on from"
    crashed = replace(options, folder=tmp_path / "6")
    worker = worker_at(crashed, 6, before[6])
    summary = asyncio.run(new_run(crashed, first_step=0).finish())
    assert summary.fingerprint == before[6]
    exported = AutoModelForCausalLM.from_pretrained(crashed.folder / "model", dtype=torch.bfloat16)
    held = worker.tensors()
    assert all(torch.equal(tensor, held[name]) for name, tensor in exported.named_parameters())


def test_groups_too_old_after_a_replay_are_not_offered_again(kill: Kill, tmp_path: Path) -> None:
    """The kill came before it was dropped: one of its rollouts is of version 0, the others are still to be sampled."""
    crashed, _ = kill(tmp_path, 5, kappa=1)
    stale, fresh = begun_groups(crashed, versions=(0, 1))
    resumed = prepared_from(crashed)
    resumed.journal.close()
    assert resumed.groups.next_step == 5, "which may train on version 1 and newer"
    (closed,) = [one for one in resumed.groups.closures if one.group_id in (stale, fresh)]
    assert (closed.group_id, closed.reason) == (stale, "stale")
    assert closed.again is not None and closed.again[1] == 1, "its prompt has another try"
    assert stale not in resumed.groups.groups and fresh in resumed.groups.groups
    run = new_run(crashed)
    assert asyncio.run(run.finish()).is_finished
    offered = {group.group_id for group in run.coordinator.hellos[0].open_groups}
    assert fresh in offered and stale not in offered


def begun_groups(crashed: LearnerOptions, versions: tuple[int, ...]) -> list[GroupId]:
    """Further groups on a killed learner's journal, of each a first rollout of its version."""
    journal = Journal(crashed.folder / "journal")
    records, newest = read_journal(journal.folder, Step(0))
    known = [record.opened for _, record in records if record.HasField("opened")]
    training = [each for each in known if not each.group.HasField("exact_version")]
    cursor, sampled = 1 + max(each.cursor for each in training), group_from_message(training[-1].group)
    journal.go_on(newest)
    names = []
    for number, version in enumerate(versions):
        name, n = group_id_of(cursor + number), crashed.config.learner.rollouts_per_prompt
        spec = GroupSpec(name, sampled.prompt_token_ids, n, sampled.sampling, 4)
        rollout = rollout_of((4, 1), name=name, spans=[(version, 2)], logprobs=(-4.0, -4.0))
        for record in (opened(Group(spec, cursor + number)), finished(rollout, (SentTokens(PeerId("alice"), 2),))):
            journal.append(record)
        names.append(name)
    journal.close()
    return names


def test_where_the_store_lost_the_version_a_start_says_so_but_on_the_same_device_where_steps_without_a_row_get_one(
    kill: Kill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kill came before the rows were written. And the log says how far training again is."""
    monkeypatch.setattr("echo2.learner.startup.TOLD_EVERY_S", 0.0)
    crashed, _ = kill(tmp_path, 5, kappa=1)
    shutil.rmtree(crashed.chunk_folder)
    with pytest.raises(FingerprintMismatch, match=r"version \d+: expected the fingerprint.*not in the chunk store"):
        prepared_from(crashed, prepared_elsewhere)
    rows = crashed.folder / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-2]))
    with caplog.at_level("INFO", "echo2.learner"):
        summary = asyncio.run(new_run(crashed).finish())
    assert summary.is_finished and summary.version == 6
    assert "trained again on 0 recorded batches, 5 are left" in caplog.text
    assert "trained again on 4 recorded batches, 1 are left, about" in caplog.text
    found = rows_of(crashed.folder)
    assert [row["step"] for row in found] == list(range(7)) and all("reward/mean" in row for row in found[1:])


def versions_from_base(options: LearnerOptions) -> set[int]:
    """Those that the store has a delta to from version 0."""
    return {left.header.artifact.version for left in left_of(options).artifacts if left.header.artifact.parent == 0}


class RankCoder(VersionCoder):
    """As of several ranks: codes only from versions that were not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.from_base = HeldVersions(), list[Version]()

    def forget_before(self, version: Version) -> None:
        self.held.forget_before(version, self._kept)

    def fingerprint(self, version: Version, weights: WeightSet, key: int) -> int:
        self.held.keep(version, weights)
        return super().fingerprint(version, weights, key)

    def encode(
        self, parent: WeightSet | None, target: WeightSet, header: DeltaHeader, executor: Any = None
    ) -> Encoding:
        if header.parent_version is not None:
            self.held.of(header.parent_version)
        self.held.keep(header.target_version, target)
        self.from_base += [header.target_version] if header.parent_version == 0 else []
        return super().encode(parent, target, header, executor)


def test_a_start_offers_a_delta_from_the_base(model_path: Path, tmp_path: Path, kill: Kill) -> None:
    """And goes on putting it together with what follows; several ranks hold the base for as long as it is coded from."""
    crashed, before = kill(tmp_path, 3, kappa=1, lr=1e-6)
    last, coder = last_published(crashed), RankCoder()
    learner = crashed.config.learner.model_copy(update={"steps": 22})
    longer = replace(crashed, config=crashed.config.model_copy(update={"learner": learner}))

    def prepared_on_ranks(options: LearnerOptions, folder: RunFolder) -> Prepared:
        team = new_team(options, Ranks())
        team.coder = coder
        return prepare_with(team, options, folder)

    summary = asyncio.run(Run(longer, make_broadcaster=SeedNode, make_prepared=prepared_on_ranks).finish())
    with pytest.raises(StateError, match="expected it among those held"):
        coder.held.of(Version(0))
    assert coder._kept is None and coder.from_base
    newest = max(versions_from_base(crashed))
    assert newest >= last + 16 and set(coder.from_base) <= versions_from_base(crashed)
    host = HostWeights.from_tensors(new_team(crashed, Ranks()).model.snapshot(), Version(0), key_of_run(RUN))
    applied = left_of(crashed).bring(host, Version(22), summary.fingerprint)
    assert applied[0].parent == 0 and applied[0].version == newest and before[last]
