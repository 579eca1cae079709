"""What the learner needs from the training side: this project's own trainers (team) or a user's trainer (lent_trainer).

Guarantees: nothing; this module only defines interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from echo2.base.ids import Version
from echo2.learner.audit import Passage, Piece, ScoreUnderVersion
from echo2.learner.batch import Batch
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore
from echo2.learner.runtime.coding import VersionCoder
from echo2.learner.runtime.trainer import StepResult
from echo2.scoring.request import TokenScores


class Scorer(ScoreUnderVersion, Protocol):
    """Scores tokens under the published `versions` (ascending) that it keeps. `is_of_trainer`: it uses the model that trains, so
    call it only on the trainer's thread; else it needs its own thread. `keep` may be called from a different thread."""

    @property
    def is_of_trainer(self) -> bool: ...

    @property
    def versions(self) -> list[Version]: ...

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a version. `tensors`: its published weights, as in a snapshot; never changed in place."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Context in which all scoring takes place; versions kept at its start stay until its end."""
        ...

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        """Scores independent pieces, all under one version."""
        ...


class PublishedModel(Protocol):
    """The facts about the model that workers and prompts need."""

    path: str
    config: Any  # transformers'

    @property
    def device(self) -> torch.device: ...

    @property
    def parameter_count(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def flops_per_position(self) -> float: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def snapshot_bytes(self) -> int: ...

    def check_length(self, tokens: int) -> None: ...

    def config_json(self) -> bytes: ...

    def digest(self) -> str: ...

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None: ...


class StepCounter(Protocol):
    """`step_count`: completed steps."""

    @property
    def step_count(self) -> int: ...


class TrainingSide(Protocol):
    """Makes steps, snapshots and checkpoints. `starts_from_base`: after every start, the first snapshot is the base model's.

    A snapshot may hold only this rank's rows (DTensors); `coder` encodes it, `whole` gathers all rows. Call all methods except the
    coder's on the trainer's thread.
    """

    starts_from_base: bool
    coder: VersionCoder

    @property
    def model(self) -> PublishedModel: ...

    @property
    def trainer(self) -> StepCounter: ...

    @property
    def checkpoint_bytes(self) -> int: ...

    def step(self, batch: Batch, is_published: bool = False) -> StepResult: ...

    def snapshot(self) -> dict[str, Tensor]: ...

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]: ...

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Turns whole weights of a published version, under the names of a snapshot, into a snapshot of that version."""
        ...

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint: ...

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None: ...

    def scorer(self, versions_max: int, newest: Version) -> Scorer:
        """Makes the scorer for audits; call it once. Each rank keeps its rows of `newest`, which is still held, and of later
        versions."""
        ...

    def stop(self) -> None: ...
