"""The learner's own scoring: with the model that trains, on its device, between two steps.

Guarantees: scores are computed with exactly the published bits; after a turn the parameters hold the training weights again, bit
for bit; each rank stores only its own rows of a version, and a version is never assembled whole. With several ranks, each reads a
share of the requests, and all join each forward pass. Leaves to others: which rollouts (auditor), when (auditor: it gets the
trainer's thread for a bounded share of the time), commands to ranks (team).

Shapes: L tokens read, T tokens scored, C columns of `TokenScores`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from echo2.base.ids import Version
from echo2.base.rollout import SamplingParams
from echo2.learner.audit import Passage, Piece
from echo2.learner.runtime.attention import Attention
from echo2.learner.runtime.model import PolicyModel
from echo2.learner.runtime.ranks import own_part
from echo2.learner.runtime.reading import COLUMNS, Reading, TokensToScore
from echo2.learner.runtime.snapshots import KeptVersions, rows_by_name
from echo2.scoring.request import TokenScores

Ask = Callable[[Version, Sequence[Reading], bool], list[Tensor]]


def readings_to_bytes(readings: Sequence[Reading]) -> bytes:
    return json.dumps([asdict(one) for one in readings]).encode()


def readings_from_bytes(data: bytes) -> list[Reading]:
    return [_reading_from(said) for said in json.loads(data)]


def _reading_from(said: dict[str, Any]) -> Reading:
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in said["sampling"].items()
    }
    return Reading(
        tuple(said["token_ids"]), said["count"], SamplingParams(**sampling), said["begin"], said["keeps"]
    )  # fmt: skip


class RankReader:
    """One rank's part in scoring: keeps its rows of the versions and runs the forward passes of its share."""

    def __init__(self, model: PolicyModel, versions_max: int) -> None:
        self._model = model
        self._ranks = model.ranks
        self.kept = KeptVersions(rows_by_name(model.hf_model), versions_max, is_leader=model.ranks.is_leader)
        self._cache: DynamicCache | None = None
        self._trained: dict[str, Tensor] = {}
        self._was_training = False
        self._attention = model.policy.attention

    def begin(self) -> None:
        """Sets the training weights aside. Call it between two steps."""
        self._was_training = self._model.hf_model.training
        self._model.hf_model.eval()
        self._attention = self._model.policy.attention
        if self._attention is not Attention.DENSE:  # its block masks are for packed rows
            self._model.policy.attend_by(Attention.DENSE)
        if not self._model.is_rounded:  # else `end` restores them from the masters
            self._trained = {name: own_part(p.detach()).cpu().clone() for name, p in self._parameters()}

    def end(self) -> None:
        """Restores the training weights."""
        self._cache = None
        with torch.no_grad():
            for name, parameter in self._parameters() if self._trained else ():
                own_part(parameter.detach()).copy_(self._trained[name])
        self._trained = {}
        self._model.round_to_policy()
        self.kept.changed_elsewhere()
        self._reshard()
        self._model.hf_model.train(self._was_training)
        if self._attention is not Attention.DENSE:
            self._model.policy.attend_by(self._attention)

    def read(self, version: Version, readings: Sequence[Reading], *, is_shared: bool) -> list[Tensor]:
        """Returns columns_CT of each reading, on every rank. `is_shared`: the ranks divide the readings; else each rank reads all
        of them, because the next reading continues this one's KV cache."""
        self._reshard()
        self.kept.load(version)
        count, rank = (self._ranks.count, self._ranks.rank) if is_shared else (1, 0)
        found = [torch.zeros(COLUMNS, one.count, dtype=torch.float64) for one in readings]
        for begin in range(0, len(readings), count):
            own = min(
                begin + rank, len(readings) - 1
            )  # a rank without one repeats the last: all must join the forward pass
            columns_CT = self._columns(readings[own])
            if begin + rank < len(readings):
                found[own] = columns_CT
        if count == 1:
            return found
        together = self._ranks.sum(torch.cat([one.flatten() for one in found]))
        parts = torch.split(together, [one.numel() for one in found])
        return [part.view(one.shape) for part, one in zip(parts, found, strict=True)]

    def _columns(self, reading: Reading) -> Tensor:
        if reading.keeps:
            if reading.begin == 0 or self._cache is None:
                self._cache = DynamicCache()
            elif (later := self._cache.get_seq_length() - reading.begin) > 0:
                self._cache.crop(-later)  # positions of the same piece, scored under another version
        tokens = torch.tensor(reading.token_ids, device=self._model.device)
        asked = TokensToScore(tokens[None, :-1], tokens[-reading.count :], reading.sampling, self._past(reading))
        with torch.no_grad():
            columns_CT: Tensor = self._model.policy(asked)[0]
        return columns_CT

    def _reshard(self) -> None:
        """Drops gathered parameters, which may belong to another version."""
        for module in self._model.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _past(self, reading: Reading) -> Any:
        return self._cache if reading.keeps else None

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(zip(self._model.names, self._model.parameters, strict=True))


class OwnScorer:
    """A `Scorer` on rank 0. `tell_begin`, `tell_end` and `ask` reach all ranks."""

    is_of_trainer = True

    def __init__(
        self, reader: RankReader, tell_begin: Callable[[Version], None], ask: Ask, tell_end: Callable[[], None]
    ) -> None:
        self._kept = reader.kept
        self._tell_begin, self._ask, self._tell_end = tell_begin, ask, tell_end

    @property
    def versions(self) -> list[Version]:
        return self._kept.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self._kept.keep(version, tensors)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._kept.held() as versions:
            self._tell_begin(versions[0])
            try:
                yield
            finally:
                self._tell_end()

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        readings = [reading_of(passage, piece, 0) for passage, piece in asked]
        if not readings:
            return []
        return [_scores(columns_CT) for columns_CT in self._ask(version, readings, True)]

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]:
        reading = reading_of(passage, piece, cache if isinstance(cache, int) else 0)
        (columns_CT,) = self._ask(version, (reading,), False)
        return _scores(columns_CT), int(passage.places[piece.stop - 1]) if reading.keeps else None


def reading_of(passage: Passage, piece: Piece, begin: int) -> Reading:
    """The reading of a piece, whose tokens are consecutive. `begin`: number of tokens already in the KV cache."""
    first, stop = int(passage.places[piece.start]), int(passage.places[piece.stop - 1]) + 1
    keeps = any(other.keeps_cache for other in passage.pieces)
    return Reading(
        passage.token_ids[begin:stop], stop - first, passage.sampling.without_seed(), begin if keeps else 0, keeps
    )


def _scores(columns_CT: Tensor) -> TokenScores:
    return TokenScores(*columns_CT.numpy())
