"""Restores a learner from its run folder to exactly its previous state.

Guarantees: the last checkpoint is loaded and every batch recorded since is trained on again, in order (replay).
Leaves to others: sockets and the fleet (shift).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import RunId, Step, Version
from echo2.base.rng import derived_seed
from echo2.broadcast.room import store_bytes_min
from echo2.broadcast.runtime.left_versions import LeftVersions
from echo2.learner.history import History, SegmentBegan
from echo2.learner.publication import PublicationConfig, PublicationSchedule
from echo2.learner.runtime.adapter import AdapterOptions
from echo2.learner.runtime.agreement import check_agreement
from echo2.learner.runtime.attention_choice import choose_attention
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore, put_back_shelf
from echo2.learner.runtime.examination import Examination
from echo2.learner.runtime.journal import Journal, has_journal, read_journal
from echo2.learner.runtime.model import PolicyModel, pick_device
from echo2.learner.runtime.options import CheckpointOptions, LearnerOptions, TrainerOptions, chunk_folder
from echo2.learner.runtime.prompts import Prompts, PromptSource, load_tokenizer
from echo2.learner.runtime.ranks import Ranks, local_device, ranks_of_environment
from echo2.learner.runtime.replay import StandingVersion, replay
from echo2.learner.runtime.run_folder import RunFolder
from echo2.learner.runtime.team import Team
from echo2.learner.runtime.trainer import Trainer
from echo2.learner.runtime.training_side import PublishedModel, StepCounter, TrainingSide
from echo2.learner.selection import PruningRule
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.outside.allocator import map_large
from echo2.staleness.ledger import Ledger
from echo2.weights.fingerprint import key_of_run

MAPS_FROM_PARAMETERS = 10_000_000
"""From this many parameters on, large blocks are mapped separately; in a smaller model, freed memory is not worth new pages."""
_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class Prepared:
    """Everything that does not need the network. `published`: weights of the newest published version, a snapshot from `team`.

    `cut_off`: the previous version and its weights, if a kill may have come before the newest one was fully sent: workers that
    have part of that delta wait for the rest. `base`: version 0, if workers may have that checkpoint and a later version is
    published; `team`'s coder keeps it until the publisher has sent the delta from it.
    """

    folder: RunFolder
    model: PublishedModel
    trainer: StepCounter
    team: TrainingSide
    prompts: Prompts
    examination: Examination
    shelf: Shelf
    journal: Journal
    history: History
    store: CheckpointStore
    schedule: PublicationSchedule
    published: Mapping[str, Tensor]
    fingerprint_key: int
    trained_again: int
    checkpoint_step: Step | None
    cut_off: tuple[Version, Mapping[str, Tensor]] | None = None
    base: Mapping[str, Tensor] | None = None
    rows_again: tuple[Mapping[str, object], ...] = ()


def new_team(options: LearnerOptions, ranks: Ranks) -> Team:
    """Makes model and optimiser of this rank in their initial state. A collective."""
    check_agreement(options, ranks)
    torch.set_num_threads(options.trainer.threads)
    torch.manual_seed(derived_seed(options.seed, "trainer"))
    device = pick_device(local_device(options.trainer.device))
    given = options.trainer
    model = PolicyModel(
        given.model_path, given.weights_dtype, device, options.sampling.temperature, ranks, _adapter_of(given),
        replays_routing=given.replays_routing,
    )  # fmt: skip
    if device.type == "cpu" and model.parameter_count >= MAPS_FROM_PARAMETERS:
        map_large()
    choose_attention(model.policy, given.attention, device, ranks)
    return Team(Trainer(model, given, options.steps), options.folder)


def _adapter_of(options: TrainerOptions) -> AdapterOptions | None:
    if options.lora_rank == 0:
        return None
    return AdapterOptions(options.lora_rank, options.lora_alpha or 2 * options.lora_rank)


def prepare_here(options: LearnerOptions, folder: RunFolder) -> Prepared:
    """Prepares as rank 0 of the processes that torchrun started, or as a single process."""
    return prepare(options, folder, ranks_of_environment(options.trainer.replicas))


def prepare(options: LearnerOptions, folder: RunFolder, ranks: Ranks | None = None) -> Prepared:
    """Loads the model, resumes the run and trains again on recorded batches. Call it on rank 0's trainer thread."""
    return prepare_with(new_team(options, ranks or Ranks()), options, folder)


def prepare_with(
    team: TrainingSide, options: LearnerOptions, folder: RunFolder, source: PromptSource | None = None
) -> Prepared:
    """As `prepare`, with any training side and any source of prompts."""
    trainer, model = team.trainer, team.model
    prompts = Prompts(
        options, model.vocabulary_size, model.stop_token_ids, source, check_length=model.check_length,
        context_tokens=min(options.longest_tokens, model.context_tokens), secret=folder.secret(),
    )  # fmt: skip
    base = team.snapshot()
    folder.check_identity(_identity_of(options, team, base), {"model_path": options.trainer.model_path})
    bound = options.staleness_bound
    config = ShelfConfig(
        bound,
        options.rollouts_per_step,
        options.rollouts_per_group,
        model.vocabulary_size,
        drops_equal_rewards=options.drops_equal_rewards,
        pruning=PruningRule() if options.prunes_hopeless else None,
        is_driven=options.agent is not None,
    )
    store = CheckpointStore(folder.path / "checkpoints", options.checkpoint)
    store.check_room(team.checkpoint_bytes)
    _check_chunk_store(options, model.snapshot_bytes)
    prepared = Prepared(
        folder=folder,
        model=model,
        trainer=trainer,
        team=team,
        prompts=prompts,
        examination=Examination(options.evaluation, prompts),
        shelf=Shelf(config, Ledger(bound)),
        journal=Journal(folder.path / "journal"),
        history=History(),
        store=store,
        schedule=PublicationSchedule(PublicationConfig(bound, options.kappa, chain_max=options.keyframe_chain_max)),
        published=base,
        fingerprint_key=key_of_run(options.run_id),
        trained_again=0,
        checkpoint_step=None,
    )
    if team.starts_from_base and not options.trainer.lora_rank:
        prepared.base = base
        team.coder.keep(Version(0))
    _resume(prepared, options, team.load_newest(store))
    if prepared.schedule.newest == 0:
        prepared.base = None
        team.coder.keep(None)
    return prepared


def _check_chunk_store(options: LearnerOptions, weights_bytes: int) -> None:
    """Raises `ConfigError` if the chunk store is too small for a keyframe; otherwise the first keyframe would end the run."""
    needed = store_bytes_min(weights_bytes)
    if options.store_bytes and options.store_bytes < needed:
        raise ConfigError(
            f"learner.store_bytes: expected at least {needed} for a keyframe of this model, got {options.store_bytes}; "
            "0 sizes the store by the model"
        )


def _identity_of(options: LearnerOptions, team: TrainingSide, base: Mapping[str, Tensor]) -> dict[str, object]:
    """What must not change within a run; otherwise replaying the journal would not give the same weights."""
    shares = [[one.name, one.task, dict(one.args), one.weight, one.held_out] for one in options.task.mixture]
    mixture: dict[str, object] = {"mixture": shares} if shares else {}
    return {
        "run_id": options.run_id,
        "model_digest": team.model.digest(),
        "base_fingerprint": f"{team.coder.fingerprint(Version(0), base, 0):016x}" if team.starts_from_base else "",
        "weights_dtype": options.trainer.weights_dtype,
        "lora": [options.trainer.lora_rank, options.trainer.lora_alpha],
        "task": options.task.name,
        "task_args": dict(options.task.args),
        "seed": options.seed,
        "rollouts_per_step": options.rollouts_per_step,
        "rollouts_per_group": options.rollouts_per_group,
        "staleness_bound": options.staleness_bound,
        "held_out_prompts": options.evaluation.prompts,
        **mixture,
    }


def _resume(prepared: Prepared, options: LearnerOptions, checkpoint: Checkpoint | None) -> None:
    journal_from = Step(0)
    if checkpoint is not None:
        put_back_shelf(checkpoint.state["batcher"], checkpoint.step, prepared.shelf)
        prepared.prompts.take_back(checkpoint.state.get("curriculum", {}))
        prepared.published = checkpoint.published
        prepared.schedule.newest = checkpoint.published_version
        prepared.checkpoint_step = checkpoint.step
        journal_from = Step(int(checkpoint.state["journal_from"]))
    elif not has_journal(prepared.journal.folder):
        prepared.journal.begin(SegmentBegan(options.run_id, Step(0), 0, (Version(0),)))
        return
    records, newest_segment = read_journal(prepared.journal.folder, journal_from)
    for segment, record in records:
        if isinstance(record, SegmentBegan) and record.run_id != options.run_id:
            raise StateError(f"journal {prepared.journal.folder}: expected run {options.run_id}, got {record.run_id}")
        prepared.history.apply(record, segment)
    prepared.history.restore(prepared.shelf)
    prepared.journal.go_on(newest_segment)
    left = LeftVersions(chunk_folder(options), RunId(options.run_id))
    replayed = replay(StandingVersion(prepared.schedule.newest, prepared.published), prepared, left)
    prepared.published, prepared.schedule.newest = replayed.newest.weights, replayed.newest.version
    prepared.cut_off = (replayed.before.version, replayed.before.weights) if replayed.before is not None else None
    prepared.trained_again, prepared.rows_again = replayed.batches, replayed.rows
    _log.info(
        "resumed at step %d: checkpoint of step %s, %d recorded batches trained on again, %d rollouts kept",
        prepared.trainer.step_count,
        "none" if checkpoint is None else checkpoint.step,
        prepared.trained_again,
        prepared.shelf.buffered_rollouts,
    )


def follow(options: LearnerOptions, ranks: Ranks) -> None:
    """Runs a rank other than rank 0, from its start to its end."""
    new_team(options, ranks).follow()


def export(model: PublishedModel, policy: Mapping[str, Tensor], tokenizer: object, folder: Path) -> None:
    """Writes `policy`, a whole snapshot of `model`, as a Hugging Face folder in the published dtype; replaces `folder`."""
    partial = folder.with_name(folder.name + ".partial")
    model.save(policy, partial)
    tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
    if folder.exists():
        previous = folder.with_name(folder.name + ".previous")
        _remove(previous)
        folder.rename(previous)
        partial.rename(folder)
        _remove(previous)
        return
    partial.rename(folder)


def export_run(folder: Path, target: Path, model_path: str = "") -> Step:
    """Writes the policy of a run folder's newest checkpoint as a Hugging Face folder; returns the checkpoint's step.

    `model_path`: the base model, if it has moved since the run began. The run may be stopped or still running: checkpoints are
    never changed in place. Raises `StateError` without a checkpoint, `ConfigError` if `target` is not empty.
    """
    if not (folder / "checkpoints").is_dir():
        raise StateError(f"run folder {folder}: expected checkpoints, found none")
    checkpoint = CheckpointStore(folder / "checkpoints", CheckpointOptions(), is_owner=False).load_newest()
    if checkpoint is None:
        raise StateError(f"run folder {folder}: expected a whole checkpoint, found none yet")
    identity = json.loads((folder / "run.json").read_text())
    model_path = model_path or str(identity.get("model_path", ""))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"export: expected {target} to be empty or not there, got files in it")
    rank, alpha = identity["lora"]
    adapter = _adapter_of(TrainerOptions(model_path, lora_rank=int(rank), lora_alpha=int(alpha)))
    model = PolicyModel(model_path, identity["weights_dtype"], torch.device("cpu"), 1.0, adapter=adapter)
    model.load_masters(checkpoint.masters)
    export(model, model.snapshot(), load_tokenizer(model_path), target)
    return checkpoint.step


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
