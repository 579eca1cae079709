"""What the learner needs of whoever trains: this project's own trainers (team), or a trainer of the user's (lent_trainer).

Guarantees: nothing; these are the shapes.
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
    """Scores tokens under the published `versions` (ascending) that it keeps. `is_of_trainer`: by the model that trains, so only
    on the trainer's thread; else in a thread of its own. `keep` may be called from another thread than the rest."""

    @property
    def is_of_trainer(self) -> bool: ...

    @property
    def versions(self) -> list[Version]: ...

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: what is published of it, as in a snapshot; never changed in place."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """What is scored is scored within one; no version that was kept as it began is forgotten before its end."""
        ...

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        """Of pieces that stand alone, all under one version."""
        ...


class PublishedModel(Protocol):
    """The model as workers and prompts need to know it."""

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
    """`step_count` optimiser steps are complete."""

    @property
    def step_count(self) -> int: ...


class TrainingSide(Protocol):
    """Steps, snapshots and checkpoints. `starts_from_base`: the first snapshot of every start is the base model's.

    A snapshot may hold this rank's rows alone (DTensors); `coder` codes it, `whole` brings all rows together. All but
    the coder's methods are called from the trainer's thread.
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
        """Takes whole weights of a version that was published, by the names of a snapshot, for a snapshot of it."""
        ...

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint: ...

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None: ...

    def scorer(self, versions_max: int, newest: Version) -> Scorer:
        """For audits; asked for once. Of several ranks each keeps its rows from `newest` on, which is still held."""
        ...

    def stop(self) -> None: ...
