"""Restores a learner from its run folder to exactly its previous state.

Guarantees: the last checkpoint is loaded, and every batch recorded since is trained on again, once and in order. If each version
gets the fingerprint with which it was published, the learner is back in its previous state. If one does not (a GPU that sums in
another order, other threads, another machine), nothing is lost: published versions stay as they are, the last of them is rebuilt
bit for bit from the chunk store, and the retrained weights are published as the next version, with a delta from that one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from echo2.base.errors import ConfigError, EchoError, FingerprintMismatch, StateError
from echo2.base.ids import Step, Version
from echo2.base.rng import derived_seed
from echo2.base.units import format_seconds
from echo2.broadcast.store import LeftVersions
from echo2.learner.metrics import RunFacts, StepTimes, step_row, task_fields
from echo2.learner.options import LearnerLimits, LearnerOptions, RunFolder
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore, put_back_groups
from echo2.learner.publishing.schedule import PublicationSchedule
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.evaluation import Evaluations
from echo2.learner.rollouts.journal import History, Journal, began, has_journal, read_journal
from echo2.learner.rollouts.prompts import Conversations, Prompts, PromptSource, load_tokenizer
from echo2.learner.training.loading import folder_of
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.optimiser import refuse_optimizer
from echo2.learner.training.ranks import Ranks, check_agreement, local_device, pick_device, ranks_of_environment
from echo2.learner.training.scoring import choose_attention, refuse_wrong_rows
from echo2.learner.training.team import PublishedModel, Team, TrainingSide
from echo2.learner.training.trainer import Trainer
from echo2.outside import monotonic
from echo2.outside.allocator import give_back, map_large
from echo2.weights import HostWeights
from echo2.weights.fingerprint import key_of_run

MAPS_FROM_PARAMETERS = 10_000_000
"""From this many parameters on, large blocks are mapped separately; in a smaller model, freed memory is not worth new pages."""
TOLD_EVERY_S = 10.0  # a person who waits sees that it goes on
Standing = tuple[Version, Mapping[str, Tensor]]  # a version with its weights, a snapshot from the team
_log = logging.getLogger("echo2.learner")


class Prepared:
    """Everything that does not need the network, of any training side and any source of prompts, at the run's beginning;
    `_resume` restores it. `published`: weights of the newest published version, a snapshot from `team`. `conversations`: of the
    supervised warm start, if the run has one.

    `cut_off`: the previous version and its weights, if a kill may have come before the newest one was fully sent: workers that
    have part of that delta wait for the rest. `base`: version 0, if workers may have that checkpoint and a later version is
    published; `team`'s coder keeps it until the publisher has sent the delta from it."""

    def __init__(
        self, team: TrainingSide, options: LearnerOptions, folder: RunFolder, source: PromptSource | None = None
    ) -> None:
        self.folder, self.team, self.model = folder, team, team.model
        begun, config = folder.began(), options.config
        self.prompts = prompts = Prompts(options, self.model, source, folder.secret(), begun)
        self.conversations: Conversations | None = None
        if config.sft.path:
            self.conversations = Conversations(config, prompts.chat, prompts.context_tokens, prompts.vocabulary_size)
        self.published: Mapping[str, Tensor] = team.snapshot()
        identity = _identity_of(options, team, self.published) | prompts.content() | {"began": begun.isoformat()}
        sft = self.conversations and [self.conversations.content, config.sft.steps, config.sft.lr]
        identity |= {"teacher": config.learner.teacher, "sft": sft}  # also if none: neither may be added later
        folder.check_identity(identity, {"model_path": config.model.path})
        self.store = CheckpointStore(folder.path / "checkpoints", options.limits)
        self.store.check_room(team.checkpoint_bytes)
        self.evaluations = Evaluations(folder.path, config, prompts, options.limits.evaluation_patience_s)
        row_bytes = self.model.routing.row_bytes if self.model.routing is not None else 0
        self.groups = OpenGroups(config, self.model.vocabulary_size, row_bytes=row_bytes)
        self.journal, self.history = Journal(folder.path / "journal"), History()
        self.schedule = PublicationSchedule(config.staleness, options.limits.keyframe_chain_max)
        self.fingerprint_key = key_of_run(config.run.name)
        self.checkpoint_step: Step | None = None
        self.cut_off: Standing | None = None
        self.base: Mapping[str, Tensor] | None = None
        self.rows_again: tuple[Mapping[str, object], ...] = ()


def new_team(options: LearnerOptions, ranks: Ranks) -> Team:
    """Makes model and optimiser of this rank in their initial state. A collective."""
    check_agreement(options, ranks)
    torch.set_num_threads(options.threads)
    torch.manual_seed(derived_seed(options.config.run.seed, "trainer"))
    config, section, learner = options.config, options.config.model, options.config.learner
    device = pick_device(local_device(learner.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where FSDP puts its rows: torch's mesh sets it only if no GPU was used before
    refuse_optimizer(learner.optimizer_state, section.weights_dtype, ranks.count)
    model = PolicyModel(
        section.path, section.weights_dtype, device, config.sampling.temperature, ranks, section.lora_rank,
        replays_routing=learner.replay_routing, masters_on_host=learner.optimizer_state == "host",
    )  # fmt: skip
    if device.type == "cpu" and model.size.parameters >= MAPS_FROM_PARAMETERS:
        map_large()
        give_back()  # what loading has freed
    refuse_wrong_rows(model.policy, min(options.longest_tokens, model.context_tokens), f"model {section.path}")
    choose_attention(model.policy, device, ranks)
    return Team(Trainer(model, config, options.threads), options.folder)


def prepare(options: LearnerOptions, folder: RunFolder, ranks: Ranks | None = None) -> Prepared:
    """Loads the model, resumes the run and trains again on recorded batches. Call it on rank 0's trainer thread. `ranks`: those
    that torchrun started, or a single process."""
    ranks = ranks or ranks_of_environment(options.config.learner.replicas)
    return prepare_with(new_team(options, ranks), options, folder)


def prepare_with(
    team: TrainingSide, options: LearnerOptions, folder: RunFolder, source: PromptSource | None = None
) -> Prepared:
    """As `prepare`, with any training side and any source of prompts."""
    prepared = Prepared(team, options, folder, source)
    if team.starts_from_base and not options.config.model.lora_rank:
        prepared.base = prepared.published
        team.coder.keep(Version(0))
    _resume(prepared, options, team.load_newest(prepared.store))
    prepared.evaluations.go_on_from(team.step_count)
    if prepared.schedule.newest == 0:
        prepared.base = None
        team.coder.keep(None)
    return prepared


def _identity_of(options: LearnerOptions, team: TrainingSide, base: Mapping[str, Tensor]) -> dict[str, object]:
    """What must not change within a run; otherwise replaying the journal would not give the same weights."""
    config, held_out = options.config, options.config.task.held_out
    shares = [[name, row.task, row.args, row.weight, held_out[name]] for name, row in config.task.mixture.items()]
    mixture: dict[str, object] = {"mixture": shares} if shares else {}
    return {
        "run_id": config.run.name,
        # Before the model's digest, which they change, so that a refusal names them.
        "weights_dtype": config.model.weights_dtype,
        "lora": [config.model.lora_rank, 0],  # alpha: 0 is twice the rank
        "model_digest": team.model.digest(),
        "base_fingerprint": f"{team.coder.fingerprint(Version(0), base, 0):016x}" if team.starts_from_base else "",
        # Masters on the host leave the state that float32 leaves.
        "optimizer_state": "8bit" if config.learner.optimizer_state == "8bit" else "float32",
        "task": config.task.name,
        "task_args": config.task.args,
        "seed": config.run.seed,
        "rollouts_per_step": config.learner.rollouts_per_step,
        "rollouts_per_group": config.learner.rollouts_per_prompt,
        "staleness_bound": config.staleness.bound,
        "held_out_prompts": sum(held_out.values()),
        **mixture,
    }


def _resume(prepared: Prepared, options: LearnerOptions, checkpoint: Checkpoint | None) -> None:
    journal_from = Step(0)
    if checkpoint is not None:
        put_back_groups(checkpoint.state["groups"], checkpoint.step, prepared.groups)
        prepared.published = checkpoint.published
        prepared.schedule.newest = checkpoint.published_version
        prepared.checkpoint_step = checkpoint.step
        journal_from = Step(int(checkpoint.state["journal_from"]))
    elif not has_journal(prepared.journal.folder):
        prepared.journal.begin(began(options.config.run.name, Step(0), 0, (Version(0),)))
        return
    records, newest_segment = read_journal(prepared.journal.folder, journal_from)
    for segment, record in records:
        if record.HasField("header") and record.header.run_id != options.config.run.name:
            raise StateError(
                f"journal {prepared.journal.folder}: expected run {options.config.run.name}, got {record.header.run_id}"
            )
        prepared.history.apply(record, segment)
    prepared.history.restore(prepared.groups)
    prepared.journal.go_on(newest_segment)
    conversations = prepared.conversations
    while conversations is not None and prepared.history.drawn and prepared.team.step_count < conversations.steps:
        # Of a checkpoint before the warm start's last, which was damaged.
        prepared.team.step(conversations.batch(prepared.team.step_count))
    _train_again(prepared, LeftVersions(options.chunk_folder))
    _log.info(
        "resumed at step %d: checkpoint of step %s, %d recorded batches trained on again, %d rollouts kept",
        prepared.team.step_count, "none" if checkpoint is None else checkpoint.step, len(prepared.rows_again),
        prepared.groups.buffered_rollouts,
    )  # fmt: skip


def _train_again(prepared: Prepared, left: LeftVersions) -> None:
    """Trains on all recorded batches. Raises `FingerprintMismatch` if a version comes out different and the last published one
    cannot be rebuilt."""
    team, history, groups = prepared.team, prepared.history, prepared.groups
    # Workers may hold a sealed version even if the kill came before its record was written.
    published = {version: known or left.fingerprint_of(version) for version, known in history.published.items()}
    exact: Standing = prepared.schedule.newest, prepared.published
    begun: Standing | None = None  # was being published when the learner was killed; no worker has it
    difference: tuple[Version, str] | None = None  # the first version that came out different, and its fingerprint
    rows: list[Mapping[str, object]] = []
    if (step := Version(prepared.team.step_count)) > exact[0] and step in published:
        # The supervised warm start is on disk before its version is published: the checkpoint has the version's masters.
        standing = step, team.snapshot()
        exact, begun = (standing, None) if published[step] else (exact, standing)
    last, began_s, told_s = max(history.drawn, default=Step(0)), monotonic(), float("-inf")
    while (batch := history.next_batch(groups)) is not None:
        if monotonic() - told_s >= TOLD_EVERY_S:
            told_s, left_count = monotonic(), last + 1 - batch.step
            about = f", about {format_seconds((told_s - began_s) / len(rows) * left_count)}" if rows else ""
            _log.info("trained again on %d recorded batches, %d are left%s", len(rows), left_count, about)
        version = Version(batch.step + 1)
        is_copied = version in published or batch.step == last  # what comes out may leave as the newest version
        row = step_row(batch, team.step(batch, is_copied), StepTimes(), RunFacts())
        # The kill may have come before it was written.
        rows.append({**row, **task_fields(batch, prepared.prompts.task_of)})
        if version not in published or difference is not None:
            continue
        standing = version, team.snapshot()
        if not published[version]:
            begun = standing
            continue
        fingerprint = f"{team.coder.fingerprint(*standing, prepared.fingerprint_key):016x}"
        if fingerprint != published[version]:
            difference = version, fingerprint
        else:
            exact, begun = standing, None
            team.coder.forget_before(version)
    newest, before = (begun, exact) if begun is not None else (exact, None)
    if difference is not None:
        newest, before = _go_on_from_published(exact, published, difference, prepared, left)
        leaves = f"the next version, with a delta from version {newest[0]}"
        if before is not None:
            leaves = f"version {newest[0]}, with a delta from version {before[0]}"
        _log.warning(
            "training on the recorded batches again gave version %d the fingerprint %s, it was published with %s: this device, "
            "its threads or the trainer's options do not give the same bits. No batch is lost and none counts twice: %d were "
            "trained on again, published versions stay as they are, and what came out leaves %s %s",
            *difference, published[difference[0]], len(rows), "with" if before is None else "as", leaves,
        )  # fmt: skip
    groups.take_closures()  # discard them: the hello tells the coordinator what is open
    groups.drop_stale()
    groups.resumed_at = groups.next_step
    prepared.schedule.newest, prepared.published = newest
    prepared.cut_off, prepared.rows_again = before, tuple(rows)


def _go_on_from_published(
    exact: Standing, published: Mapping[Version, str], difference: tuple[Version, str], prepared: Prepared,
    left: LeftVersions,
) -> tuple[Standing, Standing | None]:  # fmt: skip
    """Rebuilds the last published version; returns the newest version from now on, and the parent for its delta, if one is due."""
    team, groups = prepared.team, prepared.groups
    last = max(version for version, fingerprint in published.items() if fingerprint)
    host = HostWeights.from_tensors(team.whole(exact[1], exact[0]), exact[0], prepared.fingerprint_key)
    try:
        applied = left.bring(host, last, published[last])
    except EchoError as error:
        raise FingerprintMismatch(
            f"version {difference[0]}: expected the fingerprint {published[difference[0]]} with which it was published, got "
            f"{difference[1]} after training on the recorded batches again; to go on from version {last}, which workers "
            f"hold, its weights are needed, and they are not in the chunk store: {error}"
        ) from None
    _log.info("version %d, published last, is rebuilt from %s", last, ", ".join(map(str, applied)) or "the checkpoint")
    tensors = host.tensors()
    rebuilt = last, team.hold(last, {name: tensors[name] for name in exact[1]})
    team.coder.forget_before(last)
    step = Version(team.step_count)
    if step == last:
        return rebuilt, None
    if step > groups.published[-1]:
        groups.publish(step)
    return (step, team.snapshot()), rebuilt


def export(model: PublishedModel, policy: Mapping[str, Tensor], tokenizer: object, folder: Path) -> None:
    """Writes `policy`, a whole snapshot of `model`, as a Hugging Face folder in its base's dtype; replaces `folder`."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a kill, perhaps with another model's files
    model.save(policy, partial)
    tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
    if getattr(model.config, "vision_config", None):  # vLLM asks for what prepares images, though the run was of text
        for file in folder_of(model.path).glob("*processor_config.json"):
            shutil.copy(file, partial)
    mode = partial.stat().st_mode & 0o666
    for file in partial.glob("*.safetensors"):  # it writes for its owner alone, and another account may serve the model
        file.chmod(mode)
    previous = folder.with_name(folder.name + ".previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)


def export_run(folder: Path, target: Path, model_path: str = "") -> Step:
    """Writes the policy of a run folder's newest checkpoint as a Hugging Face folder; returns its step.
    `model_path`: the base model, if it has moved since the run began. The run may be stopped or still running: checkpoints are
    never changed in place. Raises `StateError` without a checkpoint, `ConfigError` if `target` is not empty."""
    if not (folder / "checkpoints").is_dir():
        raise StateError(f"run folder {folder}: expected checkpoints, found none")
    checkpoint = CheckpointStore(folder / "checkpoints", LearnerLimits(), is_owner=False).load_newest()
    if checkpoint is None:
        raise StateError(f"run folder {folder}: expected a whole checkpoint, found none yet")
    identity = json.loads((folder / "run.json").read_text())
    model_path = model_path or str(identity.get("model_path", ""))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"export: expected {target} to be empty or not there, got files in it")
    rank = int(identity["lora"][0])
    how = identity["weights_dtype"], torch.device("cpu"), 1.0
    model = PolicyModel(model_path, *how, lora_rank=rank, masters_on_host=None)
    policy, step = checkpoint.published, Step(checkpoint.published_version)
    if checkpoint.masters:  # else a trainer of one's own has them
        model.load_masters(checkpoint.masters)
        policy, step = model.snapshot(), checkpoint.step
    export(model, policy, load_tokenizer(model_path), target)
    return step
