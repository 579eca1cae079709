"""Runs on all ranks what the learner asks for: steps, snapshots, scoring, checkpoints.

Guarantees: on rank 0 each method first sends a command to the other ranks, then does rank 0's part; the others do theirs in
`follow`. With one process it is a plain call. Only rank 0 has journal, ledger and network. Snapshots are not moved: each rank
keeps its own rows until rank 0's `coder` releases them. Call all methods except the coder's from one thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from echo2.base.errors import MalformedMessage, StateError
from echo2.base.ids import Step, Version
from echo2.base.rollout import RoutingShape
from echo2.cost_model.sizing import checkpoint_bytes
from echo2.learner.audit import Scorer
from echo2.learner.publishing.checkpoint import (
    Checkpoint,
    CheckpointStore,
    load_shards,
    published_shards,
    put_back,
    shards_of,
    take,
    write_shards,
)
from echo2.learner.rollouts.groups import Batch, Insertion, TrainGroup
from echo2.learner.training.ranks import own_rows, whole
from echo2.learner.training.scoring import READINGS, VersionScorer
from echo2.learner.training.shards import HeldVersions, ShardFollower, VersionCoder
from echo2.learner.training.trainer import StepResult, Trainer
from echo2.wire.gen.echo2.v1 import rollout_pb2
from echo2.wire.rollout import group_from_message, group_to_message, rollout_from_message, rollout_to_message


class PublishedModel(Protocol):
    """The facts about the model that workers and prompts need. `routing`: shape of the routes that workers record, if any."""

    path: str
    config: Any  # transformers'
    device: torch.device
    parameter_count: int
    vocabulary_size: int
    context_tokens: int
    flops_per_position: float
    snapshot_bytes: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def routing(self) -> RoutingShape | None: ...
    def config_json(self) -> bytes: ...
    def digest(self) -> str: ...
    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None: ...


class TrainingSide(Protocol):
    """Makes steps, snapshots and checkpoints. `step_count`: completed steps. `starts_from_base`: after every start, the first
    snapshot is the base model's.

    A snapshot may hold only this rank's rows (DTensors); `coder` encodes it, `whole` gathers all rows; `hold` makes one of
    whole weights of a published version, under the names of a snapshot. `cross_entropy`: mean negative log-probability of a
    batch's tokens, nats. `scorer`, called once: for audits; each rank keeps its rows of `newest`, which is still held, and of
    later versions. Call all methods except the coder's on the trainer's thread."""

    starts_from_base: bool
    coder: VersionCoder

    @property
    def model(self) -> PublishedModel: ...
    @property
    def step_count(self) -> int: ...
    @property
    def checkpoint_bytes(self) -> int: ...
    def step(self, batch: Batch, is_published: bool = False, is_kept: bool = False) -> StepResult: ...
    def cross_entropy(self, batch: Batch) -> float: ...
    def snapshot(self) -> dict[str, Tensor]: ...
    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]: ...
    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...
    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint: ...
    def load_newest(self, store: CheckpointStore) -> Checkpoint | None: ...
    def scorer(self, versions_max: int, newest: Version) -> Scorer: ...
    def stop(self) -> None: ...


def batch_to_bytes(batch: Batch) -> bytes:
    groups = [
        {
            "cursor": group.cursor,
            "rewards": list(group.rewards),
            "insertions": [[[i.position, list(i.token_ids)] for i in row] for row in group.insertions],
            "rollouts": len(group.rollouts),
        }
        for group in batch.groups
    ]
    frames = [json.dumps({"step": batch.step, "groups": groups}).encode()]
    for group in batch.groups:
        frames.append(group_to_message(group.spec).SerializeToString())
        frames += [rollout_to_message(rollout).SerializeToString() for rollout in group.rollouts]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def batch_from_bytes(data: bytes) -> Batch:
    frames = _frames(data)
    head = json.loads(next(frames))
    groups = []
    for entry in head["groups"]:
        spec = group_from_message(rollout_pb2.GroupSpec.FromString(next(frames)), prompt_tokens_min=0)
        rollouts = tuple(
            rollout_from_message(rollout_pb2.RolloutSegment.FromString(next(frames))) for _ in range(entry["rollouts"])
        )
        insertions = tuple(tuple(Insertion(at, tuple(ids)) for at, ids in row) for row in entry["insertions"])
        groups.append(TrainGroup(spec, entry["cursor"], rollouts, tuple(entry["rewards"]), insertions))
    return Batch(Step(head["step"]), tuple(groups))


def _frames(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    while view:
        length = int.from_bytes(view[:4], "little")
        if len(view) < 4 + length:
            raise MalformedMessage(f"batch of rank 0: expected a frame of {length} bytes, got {len(view) - 4}")
        yield bytes(view[4 : 4 + length])
        view = view[4 + length :]


_log = logging.getLogger("echo2.learner")


class Team:
    """The trainers of all ranks, led from rank 0."""

    starts_from_base = True

    def __init__(self, trainer: Trainer, folder: Path | None = None) -> None:
        """`folder`: this rank's own run folder, possibly on another disk than rank 0's; None: use rank 0's paths."""
        self.trainer, self._folder = trainer, folder
        self.model = trainer.model
        self.ranks = trainer.ranks
        self.coder = VersionCoder(self.ranks.encoders if self.ranks.is_leader else None, self.ranks.shards)
        self._held = HeldVersions()
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._scorer: VersionScorer | None = None
        self._keeping = ThreadPoolExecutor(1, thread_name_prefix="keep")

    @property
    def step_count(self) -> int:
        return self.trainer.step_count

    @property
    def checkpoint_bytes(self) -> int:
        state = self.trainer.learner.optimizer_state
        return checkpoint_bytes(self.model.parameter_count, self.model.snapshot_bytes, state)

    # ---- rank 0

    def step(self, batch: Batch, is_published: bool = False, is_kept: bool = False) -> StepResult:
        """Trains one step. `is_published`, `is_kept`: the caller will take a snapshot or a checkpoint after it."""
        if self.ranks.count > 1:
            self.ranks.tell({"command": "step"}, batch_to_bytes(batch))
        return self.trainer.step(batch)

    def cross_entropy(self, batch: Batch) -> float:
        """Each rank computes all of it."""
        if self.ranks.count > 1:
            self.ranks.tell({"command": "cross_entropy"}, batch_to_bytes(batch))
        return self.trainer.cross_entropy(batch)

    def snapshot(self) -> dict[str, Tensor]:
        """Returns rank 0's rows of the weights; by then all ranks hold theirs, as the version of this step."""
        self.ranks.tell({"command": "snapshot"})
        rows = self.model.snapshot()
        self.ranks.meet()
        return rows

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        """Gathers all rows of a snapshot that is still held, tensor by tensor."""
        self.ranks.tell({"command": "gather", "version": version})
        return {name: whole(snapshot[name]) for name in sorted(snapshot)}

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Distributes whole weights of a published version, under the names of a snapshot; each rank keeps its rows."""
        for name in sorted(weights) if self.ranks.count > 1 else ():
            whole_bytes = weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            self.ranks.tell({"command": "hold", "version": version, "name": name}, whole_bytes)
        return {name: self._rows_of(name, tensor) for name, tensor in weights.items()}

    def _rows_of(self, name: str, tensor: Tensor) -> Tensor:
        layout = self.model.layout_of(name)
        assert layout is not None, f"{name} is published"
        return own_rows(tensor.view(layout.shape), layout, self.ranks)

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        """Takes the state between two steps. The other ranks start writing theirs; the caller must `store.save` the result."""
        checkpoint = take(self.trainer, published, version, state)
        folder = store.begin(checkpoint)
        self.ranks.tell({"command": "save", "folder": str(folder), "version": version})
        return checkpoint

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        """Restores the newest checkpoint on every rank; None if there is none."""
        step = store.newest()
        if step is None:
            return None
        self.ranks.tell({"command": "load", "folder": str(store.folder_of(step))})
        checkpoint = store.load(step, self.trainer)
        put_back(checkpoint, self.trainer, is_given_away=True)
        return replace(checkpoint, shards={})  # the trainer has taken them

    def scorer(self, versions_max: int, newest: Version) -> VersionScorer:
        self.ranks.tell({"command": "audit", "versions_max": versions_max, "newest": newest})
        return VersionScorer(self.model.hf_model, versions_max, self.model)

    def stop(self) -> None:
        """Ends the other ranks. Call it once, while no checkpoint is being written."""
        self.coder.stop()
        self.ranks.tell({"command": "stop"})
        self.ranks.close()

    # ---- other ranks

    def follow(self) -> None:
        assert self.ranks.encoders is not None, "several ranks have a group to code in"
        follower = ShardFollower(self.ranks.encoders, self._held)
        # If rank 0 dies without sending "stop", it must not keep this process alive.
        coding = self._begin("sections", follower.serve, is_daemon=True)
        while True:
            head, payload = self.ranks.hear()
            if self._failure is not None:
                raise self._failure
            match head["command"]:
                case "step":
                    self.trainer.step(batch_from_bytes(payload))
                case "cross_entropy":
                    self.trainer.cross_entropy(batch_from_bytes(payload))
                case "snapshot":
                    self._held.keep(Version(self.trainer.step_count), self.model.snapshot())
                    self.ranks.meet()
                    self._keep_for_audits(Version(self.trainer.step_count))
                case "audit":
                    self._scorer = VersionScorer(self.model.hf_model, head["versions_max"], self.model)
                    self._keep_for_audits(Version(head["newest"]))
                case "begin_scoring" | "score" | "end_scoring":
                    self._score(head, payload)
                case "gather":
                    held = self._held.of(Version(head["version"]))
                    for name in sorted(held):
                        whole(held[name])
                case "hold":
                    tensor = torch.frombuffer(bytearray(payload), dtype=self.model.published_dtype)
                    self._held.add(Version(head["version"]), head["name"], self._rows_of(head["name"], tensor))
                case "save":
                    self._written()
                    folder, published = self._local(head["folder"]), self._held.of(Version(head["version"]))
                    shards = {**shards_of(self.trainer), **published_shards(published)}
                    self._writing = self._begin("checkpoint", partial(write_shards, shards, folder, self.ranks))
                case "load":
                    checkpoint = load_shards(self._local(head["folder"]), self.trainer)
                    put_back(checkpoint, self.trainer)
                    self._held.keep(checkpoint.published_version, checkpoint.published)
                case "stop":
                    self._written()
                    coding.join()
                    self.ranks.close()
                    return
                case command:
                    raise StateError(f"rank {self.ranks.rank}: expected a known command of rank 0, got {command!r}")

    def _local(self, folder: str) -> Path:
        return Path(folder) if self._folder is None else self._folder / "checkpoints" / Path(folder).name

    def _keep_for_audits(self, version: Version) -> None:
        """Keeps a version for scoring, in a thread: comparing all rows with the previous version takes seconds."""
        if (scorer := self._scorer) is not None:
            held = self._held.of(version)
            self._keeping.submit(self._attempt, lambda: scorer.keep(version, held))

    def _begin(self, name: str, work: Callable[[], object], *, is_daemon: bool = False) -> threading.Thread:
        thread = threading.Thread(target=self._attempt, args=(work,), name=name, daemon=is_daemon)
        thread.start()
        return thread

    def _attempt(self, work: Callable[[], object]) -> None:
        """In a thread of its own: the main thread raises what fails at the next command."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised there
            self._failure = error

    def _score(self, head: Mapping[str, Any], payload: bytes) -> None:
        assert self._scorer is not None, "rank 0 says audit first"
        match head["command"]:
            case "begin_scoring":
                self._keeping.submit(lambda: None).result()  # wait until all versions that rank 0 may name are kept
                self._scorer.kept.forget_before(Version(head["oldest"]))
                self._scorer.begin()
            case "score":
                self._scorer.columns(Version(head["version"]), READINGS.validate_json(payload))
            case _:
                self._scorer.end()

    def _written(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            raise self._failure
