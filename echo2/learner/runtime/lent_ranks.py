"""A user's own trainer that spans several processes: tensor, expert or data parallel, on any engine.

On every rank the user's thread calls `begin`, `next_batch` and `hand_in` with that rank's tensors: DTensors of any placement, or
tensors that are whole on each rank. Guarantees: each rank keeps its own rows of the published weights, and only the rank that
writes the finished model gathers them all; a batch is handed out on all ranks; otherwise as `lent_trainer`. Waits for: what
`lent_trainer` waits for; ranks other than 0, in `next_batch` and at the end, for rank 0's commands. Leaves to others: how
commands travel (ranks), coding (broadcast/runtime/sharded).

The engine's collectives run in the user's thread. Rank 0's learner sends commands only while rank 0's user thread waits for a
batch or has left; the other ranks then wait for commands too, so two threads never use one process group at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import Step, Version
from echo2.broadcast.runtime.sharded import HeldVersions, ShardFollower, ShardLeader
from echo2.learner.audit import Passage, Piece
from echo2.learner.batch import Batch
from echo2.learner.runtime.batch_bytes import batch_from_bytes, batch_to_bytes
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore, published_shards, state_of, write_shards
from echo2.learner.runtime.lent_trainer import DeclaredModel, LentTrainer
from echo2.learner.runtime.ranks import Ranks, own_part, own_rows, whole
from echo2.learner.runtime.snapshots import VersionScorer, scorer_of
from echo2.learner.runtime.trainer import StepResult
from echo2.scoring.request import TokenScores


class SpreadWeights:
    """This rank's rows of the versions that may still be needed. `layout`: the newest sharded tensors, by name."""

    def __init__(self, model: DeclaredModel, ranks: Ranks) -> None:
        self.model, self.ranks, self.held = model, ranks, HeldVersions()
        self.path = model.path
        self.layout: dict[str, Tensor] = {}

    def rows_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies this rank's rows to host memory in the published dtype. A collective of all ranks."""
        self.model.check_table(tensors)
        rows = {name: self._rows(tensors[name].detach().to(self.model.dtype)) for name in sorted(self.model.shapes)}
        self.layout = rows
        self.ranks.meet()
        return rows

    def _rows(self, tensor: Tensor) -> Tensor:
        mesh = self.ranks.mesh("cpu")
        assert mesh is not None, "there are several ranks"
        if isinstance(tensor, DTensor):
            is_over_all = tensor.device_mesh.mesh.flatten().tolist() == list(range(self.ranks.count))
            if tensor.device_mesh.ndim == 1 and is_over_all and tensor.ndim:
                part = tensor.redistribute(placements=[Shard(0)]).to_local()
                return _split_by_rows(part.to("cpu", copy=True), tensor, self.ranks)
            tensor = tensor.full_tensor()  # one tensor at a time, to bound memory
        if tensor.ndim == 0:
            return tensor.to("cpu", copy=True)
        parts = torch.chunk(tensor, self.ranks.count, 0)
        part = parts[self.ranks.rank] if self.ranks.rank < len(parts) else tensor[:0]
        return _split_by_rows(part.to("cpu", copy=True), tensor, self.ranks)

    def layout_of(self, name: str) -> Tensor | None:
        return self.layout.get(name)

    def masters_by_name(self) -> dict[str, Tensor]:
        """Returns nothing: the masters are in the user's own checkpoints."""
        return {}

    def take_rows(self, version: Version, name: str, payload: bytes) -> None:
        layout = self.layout[name]
        tensor = torch.frombuffer(bytearray(payload), dtype=self.model.dtype).view(layout.shape)
        self.held.add(version, name, own_rows(tensor, layout, self.ranks))

    def load(self, folder: Path) -> Checkpoint:
        """Loads this rank's rows of a checkpoint. A collective of all ranks."""
        step = Step(int(folder.name.removeprefix("step-")))
        checkpoint = CheckpointStore.load_shards(folder, _Laid(self, self.ranks), step)
        self.held.keep(checkpoint.published_version, checkpoint.published)
        return checkpoint

    def check_as_published(self, checkpoint: Checkpoint) -> None:
        """Raises `ConfigError` on all ranks unless the user's initial weights equal the last published ones. A collective."""
        if int(checkpoint.published_version) != int(checkpoint.step):
            return
        pairs = ((own_part(self.layout[n]), own_part(t)) for n, t in checkpoint.published.items())
        is_other = any(not torch.equal(given, kept) for given, kept in pairs)
        if self.ranks.largest(float(is_other)):
            raise ConfigError(
                f"publish: expected the weights that were published as version {checkpoint.published_version}, got others"
            )


def _split_by_rows(part: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    mesh = ranks.mesh("cpu")
    assert mesh is not None, "there are several ranks"
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(part.contiguous(), mesh, [Shard(0)], run_check=False, shape=like.shape, stride=stride)


class _Laid:
    """Adapter: what the checkpoint reader needs from a trainer."""

    def __init__(self, model: SpreadWeights, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks


class SpreadTrainer(LentTrainer):
    """Rank 0's side; it sends commands to the other ranks."""

    def __init__(self, model: DeclaredModel, ranks: Ranks) -> None:
        super().__init__(model)
        assert ranks.encoders is not None, "several ranks have a group to code in"
        self.ranks, self.spread = ranks, SpreadWeights(model, ranks)
        self._shards = ShardLeader(ranks.encoders, ranks.count)
        self.coder = self._shards
        self._scorer: SpreadScorer | None = None

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.spread.rows_of(tensors)

    def step(self, batch: Batch, is_published: bool = False) -> StepResult:
        self.ranks.tell({"command": "batch", "is_published": is_published}, batch_to_bytes(batch))
        return super().step(batch, is_published)

    def snapshot(self) -> dict[str, Tensor]:
        if not self.has_copy():
            self.ranks.tell({"command": "snapshot"})
        taken = super().snapshot()
        version = Version(self.step_count)
        self.spread.held.keep(version, taken)
        if self._scorer is not None:
            self._scorer.bring(version, self.whole(taken, version))
        return taken

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        self.ranks.tell({"command": "gather", "version": version})
        return {name: whole(snapshot[name]) for name in sorted(snapshot)}

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name in sorted(weights):
            payload = weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            self.ranks.tell({"command": "hold", "version": version, "name": name}, payload)
            self.spread.take_rows(version, name, payload)
        return self.spread.held.of(version)

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        step = Step(self.step_count)
        checkpoint = Checkpoint(step, {}, published, version, state_of(state, step, version), self.ranks)
        self.ranks.tell({"command": "save", "folder": str(store.begin(checkpoint)), "version": version})
        return checkpoint

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        steps = store.steps()
        self.check_step(Step(steps[-1] if steps else 0))
        if not steps:
            return None
        folder = store.folder_of(steps[-1])
        self.ranks.tell({"command": "load", "folder": str(folder)})
        checkpoint = self.spread.load(folder)
        self.spread.check_as_published(checkpoint)
        return checkpoint

    def scorer(self, versions_max: int, newest: Version) -> SpreadScorer:  # type: ignore[override]
        """A scorer that uses a copy of the whole model in rank 0's host memory."""
        self._scorer = SpreadScorer(scorer_of(self.model.config, versions_max))
        self._scorer.bring(newest, self.whole(self.spread.held.of(newest), newest))
        return self._scorer

    def stop(self) -> None:
        self._shards.stop()
        self.ranks.tell({"command": "stop"})


class SpreadScorer:
    """Scores with whole weights, which the trainer's thread brings before `keep` is called with rank 0's rows only."""

    is_of_trainer = False

    def __init__(self, scorer: VersionScorer) -> None:
        self._scorer = scorer
        self._brought: dict[Version, Mapping[str, Tensor]] = {}

    def bring(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        self._brought[version] = weights

    @property
    def versions(self) -> list[Version]:
        return self._scorer.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self._scorer.keep(version, self._brought.pop(version))

    def turn(self) -> AbstractContextManager[None]:
        return self._scorer.turn()

    def __call__(self, *asked: Any, **named: Any) -> Any:
        return self._scorer(*asked, **named)

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        return self._scorer.together(version, asked)


class FollowingTrainer:
    """The side of every other rank; the user's thread makes the same calls as on rank 0. `step_count`: completed steps."""

    def __init__(self, model: DeclaredModel, ranks: Ranks) -> None:
        self.ranks, self.spread = ranks, SpreadWeights(model, ranks)
        self.step_count = 0
        self._is_published = self._is_over = False
        self._live: Mapping[str, Tensor] = {}
        self._failure: BaseException | None = None
        self._writing: threading.Thread | None = None

    def begin(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        assert self.ranks.encoders is not None, "several ranks have a group to code in"
        self.step_count, self._live = step, tensors
        self.spread.held.keep(Version(step), self.spread.rows_of(tensors))
        follower = ShardFollower(self.ranks.encoders, self.spread.held)
        threading.Thread(target=self._guarded, args=(follower.serve,), name="sections", daemon=True).start()

    def next_batch(self) -> Batch | None:
        """Returns the same batch as on rank 0, or None at the end; carries out rank 0's commands while it waits."""
        while not self._is_over:
            head, payload = self.ranks.hear()
            if self._failure is not None:
                raise self._failure
            if head["command"] == "batch":
                self._is_published = head["is_published"]
                return batch_from_bytes(payload)
            self._obey(head, payload)
        return None

    def hand_in(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        if step != self.step_count + 1:
            raise StateError(f"publish: expected step {self.step_count + 1}, got {step}")
        self.step_count, self._live = step, tensors
        if self._is_published:
            self.spread.held.keep(Version(step), self.spread.rows_of(tensors))
        return self._is_published

    def end(self, failure: BaseException | None = None) -> None:
        """Carries out commands until rank 0's learner has ended, unless this rank failed."""
        if failure is None and self._live and self.next_batch() is not None:
            raise StateError(
                f"rank {self.ranks.rank}: expected the trainer to take the batch of step {self.step_count}"
            )
        if self._writing is not None:
            self._writing.join()

    def untold_failure(self) -> BaseException | None:
        return self._failure

    def _obey(self, head: Mapping[str, Any], payload: bytes) -> None:
        match head["command"]:
            case "snapshot":
                self.spread.held.keep(Version(self.step_count), self.spread.rows_of(self._live))
            case "gather":
                held = self.spread.held.of(Version(head["version"]))
                for name in sorted(held):
                    whole(held[name])
            case "hold":
                self.spread.take_rows(Version(head["version"]), head["name"], payload)
            case "save":
                shards = published_shards(self.spread.held.of(Version(head["version"])))
                folder = Path(head["folder"])
                if self._writing is not None:
                    self._writing.join()
                self._writing = threading.Thread(
                    target=self._guarded, args=(lambda: write_shards(shards, folder, self.ranks),), name="checkpoint"
                )
                self._writing.start()
            case "load":
                self.spread.check_as_published(self.spread.load(Path(head["folder"])))
            case "stop":
                self._is_over = True
            case command:
                raise StateError(f"rank {self.ranks.rank}: expected a known command of rank 0, got {command!r}")

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the user's thread raises it at the next command
            self._failure = error
