"""Stores published versions as the newest one plus the changes between versions, loads them into a model one at a time, and runs
forward passes under each: an audit compares claims with those scores.

Guarantees: scores are computed with exactly the published weights; it holds at most `versions_max` versions, and changes of at most
BYTES_MAX_OF_MODEL times a version's bytes. Leaves to others: which rollouts to audit (auditor), judging the scores
(learner/audit). Each version costs the positions and bits of its changed weights: 6 bytes per changed bf16 weight (2 bytes per
weight of the tensor if more than a third changed); with 8 billion weights of which 2 % change, 1 GB per version. The model is the
one that trains, between two steps (`TrainerScorer`), or a separate copy (`VersionScorer`, with a user's own trainer).

Do not use it while a step runs on the trainer's thread, nor on the event loop's thread. Shapes: L tokens, V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from echo2.base.errors import StateError
from echo2.base.ids import Version
from echo2.base.rollout import SamplingParams
from echo2.learner.audit import Passage, Piece, TokenScores
from echo2.learner.training.adapter import published_name
from echo2.learner.training.model import PolicyModel, is_packable, reshard
from echo2.learner.training.packing import Attention
from echo2.learner.training.ranks import own_part
from echo2.learner.training.token_scores import COLUMNS, TokensToScore, columns_of
from echo2.weights.elements import published_tensors

BYTES_MAX_OF_MODEL = 2.0
"""Limit for all changes together, in bytes per byte of a published version."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one tensor between two versions. `bits`: XOR of the values at the flat positions `places` (None: all), so it
    applies in both directions."""

    places: Tensor | None
    bits: Tensor

    @property
    def size(self) -> int:
        return self.bits.nbytes + (self.places.nbytes if self.places is not None else 0)

    def turn(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Turns one version's values into the other's, in place. `dtype`: the published dtype."""
        flat, bits = parameter.view(-1), self.bits.to(parameter.device)
        places = None if self.places is None else self.places.to(parameter.device).long()
        old = flat if places is None else flat[places]
        new = (old.to(dtype).view(bits.dtype) ^ bits).view(dtype).to(flat.dtype)
        if places is None:
            flat.copy_(new)
        else:
            flat[places] = new


def rows_by_name(hf_model: Any) -> dict[str, Tensor]:
    """This rank's rows of a model's tensors, under both their own and their published names: an adapter's differ."""
    own = {name: own_part(tensor.detach()) for name, tensor in published_tensors(hf_model).items()}
    return own | {published_name(name): rows for name, rows in own.items()}


class KeptVersions:
    """Keeps the newest published versions and loads them into `rows`: a model's parameters, or this rank's rows of them.

    `keep` may be called from a different thread. With several ranks, rank 0 (`is_leader`) decides which versions to forget.
    """

    def __init__(self, rows: Mapping[str, Tensor], versions_max: int, *, is_leader: bool = True):
        assert versions_max >= 1, "at least one version is kept"
        self._versions_max = versions_max
        self._rows = dict(rows)
        self._is_leader = is_leader
        self._lock = threading.RLock()
        self._changes: dict[Version, dict[str, _Change]] = {}  # from the previous version
        self._order: list[Version] = []
        self._newest: dict[str, Tensor] = {}
        self._loaded: Version | None = None

    @property
    def versions(self) -> list[Version]:
        with self._lock:
            return list(self._order)

    @property
    def held_bytes(self) -> int:
        return sum(change.size for changes in self._changes.values() for change in changes.values())

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a version; ignores one that is not newer. `tensors`: its published weights, this rank's rows, never changed in
        place. Raises `StateError` for tensors that the model does not have."""
        rows = {name: own_part(tensor) for name, tensor in tensors.items()}
        unknown = sorted(rows.keys() - self._rows.keys())
        if unknown:
            raise StateError(f"version {version}: expected tensors of the model that scores, got {unknown[0]}")
        if self._order and version <= self._order[-1]:
            return
        found = {name: _change(self._newest[name], tensor) for name, tensor in rows.items()} if self._order else {}
        with self._lock:
            if self._order:
                self._changes[version] = {name: change for name, change in found.items() if change is not None}
            self._order.append(version)
            before, self._newest = self._newest, rows
            if not before or not self._is_leader:
                return
            limit = BYTES_MAX_OF_MODEL * sum(tensor.nbytes for tensor in rows.values())
            while len(self._order) > self._versions_max or (self.held_bytes > limit and len(self._order) > 2):
                self._forget_oldest()

    @contextmanager
    def held(self) -> Iterator[list[Version]]:
        """Yields the kept versions; none is forgotten within the context."""
        with self._lock:
            yield list(self._order)

    def forget_before(self, version: Version) -> None:
        with self._lock:
            while len(self._order) > 1 and self._order[0] < version:
                self._forget_oldest()

    def load(self, version: Version) -> None:
        """Loads the weights of a version into the rows; raises `StateError` if it is not kept."""
        with self._lock, torch.no_grad():
            if version not in self._order:
                raise StateError(f"version {version}: expected a kept version among {', '.join(map(str, self._order))}")
            if self._loaded is None:
                for name, tensor in self._newest.items():
                    self._rows[name].copy_(tensor)
                self._loaded = self._order[-1]
            here, there = self._order.index(self._loaded), self._order.index(version)
            path = self._order[here + 1 : there + 1] if there > here else reversed(self._order[there + 1 : here + 1])
            for step in path:
                for name, change in self._changes[step].items():
                    change.turn(self._rows[name], self._newest[name].dtype)
            self._loaded = version

    def changed_elsewhere(self) -> None:
        """Notes that something else has changed the rows, so that the next `load` copies all weights."""
        self._loaded = None

    def _forget_oldest(self) -> None:
        if self._loaded == self._order[0]:
            self.load(self._order[1])
        del self._order[0]
        del self._changes[self._order[0]]


def _change(old: Tensor, new: Tensor) -> _Change | None:
    integers = _INTEGERS[new.element_size()]
    bits = (old.contiguous().view(integers) ^ new.contiguous().view(integers)).view(-1)
    count = int(torch.count_nonzero(bits))
    if not count:
        return None
    if 3 * count > bits.numel():  # their int64 positions would take four times as much memory for a moment
        return _Change(None, bits)
    places = bits.nonzero()[:, 0]
    small = torch.int32 if bits.numel() < 1 << 31 else torch.int64
    return _Change(places.to(small), bits[places])


@dataclass(frozen=True, slots=True)
class Reading:
    """Scores the last `count` of `token_ids`; the very last token is only a target, not an input. `numbers`: the random numbers of
    the scored tokens. `begin`: earlier tokens that are already in the KV cache. `keeps`: keep the cache, because a later reading
    may continue this one."""

    token_ids: tuple[int, ...]
    count: int
    sampling: SamplingParams
    numbers: tuple[float, ...]
    begin: int = 0
    keeps: bool = False


def reading_of(passage: Passage, piece: Piece, cached: int | None) -> Reading:
    first, stop, begin = int(passage.places[piece.start]), int(passage.places[piece.stop - 1]) + 1, cached or 0
    return Reading(
        passage.token_ids[begin:stop],
        stop - first,
        passage.sampling.without_seed(),
        tuple(passage.uniforms[piece.start : piece.stop].tolist()),
        begin,
        cached is not None,
    )


class _TokenReader:
    """Scores one reading after another by `forward`, and keeps the KV cache that the next may continue."""

    def __init__(self, forward: Callable[[TokensToScore], Tensor], device: torch.device, config: Any) -> None:
        self._forward, self._device = forward, device
        # Layers that carry a state along need a cache of their kinds.
        self._config = None if is_packable(config) else config
        self._cache: DynamicCache | None = None

    def columns(self, reading: Reading) -> Tensor:
        if reading.keeps and (reading.begin == 0 or self._cache is None):
            self._cache = DynamicCache(config=self._config)
        tokens = torch.tensor(reading.token_ids, device=self._device)
        numbers = torch.tensor(reading.numbers, dtype=torch.float64, device=self._device)
        past = self._cache if reading.keeps else None
        with torch.no_grad():
            return self._forward(
                TokensToScore(tokens[None, :-1], tokens[-reading.count :], numbers, reading.sampling, past)
            )

    def forget(self) -> None:
        self._cache = None


class VersionScorer:
    """A `Scorer` with its own model."""

    is_of_trainer = False

    def __init__(self, hf_model: Any, versions_max: int) -> None:
        self._model = hf_model.eval()
        self.kept = KeptVersions(rows_by_name(hf_model), versions_max)
        self._reader = _TokenReader(self._forward, next(hf_model.parameters()).device, hf_model.config)

    def _forward(self, asked: TokensToScore) -> Tensor:
        logits_TV = self._model(**asked.arguments, logits_to_keep=len(asked.target_T)).logits[0]
        return columns_of(asked, logits_TV, logits_TV.shape[-1], lambda rows_TV: rows_TV)

    @property
    def versions(self) -> list[Version]:
        return self.kept.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self.kept.keep(version, tensors)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.kept.held():
            yield

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        self.kept.load(version)
        readings = [reading_of(passage, piece, cached) for passage, piece in asked]
        return [TokenScores(*self._reader.columns(reading).numpy()) for reading in readings]


def readings_to_bytes(readings: Sequence[Reading]) -> bytes:
    return json.dumps([asdict(reading) for reading in readings]).encode()


def readings_from_bytes(data: bytes) -> list[Reading]:
    """The inverse of `readings_to_bytes`. JSON has lists for tuples, of which a reading and its sampling hold some."""

    def with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    return [
        Reading(**with_tuples({**fields, "sampling": SamplingParams(**with_tuples(fields["sampling"]))}))
        for fields in json.loads(data)
    ]


class TrainerScorer:
    """A `Scorer` that uses the model that trains. On several ranks each keeps its rows of the versions and runs the forward passes
    of its share: rank 0 calls `turn` and `score`, the others what these tell them."""

    is_of_trainer = True

    def __init__(self, model: PolicyModel, versions_max: int) -> None:
        self._model = model
        self._ranks = model.ranks
        self.kept = KeptVersions(rows_by_name(model.hf_model), versions_max, is_leader=model.ranks.is_leader)
        self._reader = _TokenReader(lambda asked: model.policy(asked)[0], model.device, model.config)
        self._trained: dict[str, Tensor] = {}
        self._was_training = False
        self._attention = model.policy.attention

    @property
    def versions(self) -> list[Version]:
        return self.kept.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self.kept.keep(version, tensors)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.kept.held() as versions:
            self._ranks.tell({"command": "begin_scoring", "oldest": versions[0]})
            self.begin()
            try:
                yield
            finally:
                self._ranks.tell({"command": "end_scoring"})
                self.end()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        readings = [reading_of(passage, piece, cached) for passage, piece in asked]
        if self._ranks.count > 1:
            self._ranks.tell({"command": "score", "version": version}, readings_to_bytes(readings))
        return [TokenScores(*columns_CT.numpy()) for columns_CT in self.columns(version, readings)]

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
        self._reader.forget()
        with torch.no_grad():
            for name, parameter in self._parameters() if self._trained else ():
                own_part(parameter.detach()).copy_(self._trained[name])
        self._trained = {}
        self._model.round_to_policy()
        self.kept.changed_elsewhere()
        reshard(self._model.policy)
        self._model.hf_model.train(self._was_training)
        if self._attention is not Attention.DENSE:
            self._model.policy.attend_by(self._attention)

    def columns(self, version: Version, readings: Sequence[Reading]) -> list[Tensor]:
        """Returns columns_CT of each reading, on every rank. The ranks divide the readings; one that keeps its cache is read by all
        of them, because the next may continue it."""
        reshard(self._model.policy)
        self.kept.load(version)
        is_shared = not any(reading.keeps for reading in readings)
        count, rank = (self._ranks.count, self._ranks.rank) if is_shared else (1, 0)
        found = [torch.zeros(COLUMNS, reading.count, dtype=torch.float64) for reading in readings]
        for begin in range(0, len(readings), count):
            own = min(begin + rank, len(readings) - 1)  # without one, the last again: all must join the forward pass
            columns_CT = self._reader.columns(readings[own])
            if begin + rank < len(readings):
                found[own] = columns_CT
        if count == 1:
            return found
        together = self._ranks.sum(torch.cat([columns_CT.flatten() for columns_CT in found]))
        parts = torch.split(together, [columns_CT.numel() for columns_CT in found])
        return [part.view(columns_CT.shape) for part, columns_CT in zip(parts, found, strict=True)]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(zip(self._model.names, self._model.parameters, strict=True))
