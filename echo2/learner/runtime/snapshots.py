"""Stores published versions as the newest one plus the changes between versions, loads them into a model one at a time, and runs
forward passes under each: an audit compares claims with those scores.

Guarantees: scores are computed with exactly the published weights; it holds at most `versions_max` versions, and changes of at most
BYTES_MAX_OF_MODEL times a version's bytes. Leaves to others: which rollouts to audit (auditor), judging the scores
(learner/suspicion). Each version costs the positions and bits of its changed weights: 6 bytes per changed bf16 weight (2 bytes per
weight of the tensor if more than a third changed); with 8 billion weights of which 2 % change, 1 GB per version. The model is the
one that trains, between two steps (own_scoring), or a separate copy (`VersionScorer`, with a user's own trainer).

Do not use it while a step runs on the trainer's thread, nor on the event loop's thread. Shapes: L tokens, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo2.base.errors import StateError
from echo2.base.ids import Version
from echo2.learner.audit import Passage, Piece
from echo2.learner.runtime.adapter import published_name
from echo2.learner.runtime.ranks import own_part
from echo2.learner.runtime.reading import cache_name
from echo2.scoring.columns import scores_of
from echo2.scoring.request import TokenScores

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
    """This rank's rows of a model's parameters, under both their own and their published names."""
    own = {name: own_part(parameter.detach()) for name, parameter in hf_model.named_parameters()}
    return own | {published_name(name): rows for name, rows in own.items()}  # names of an adapter's tensors


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
        """Kept versions, ascending."""
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
class _Cache:
    """The KV cache that an engine has after sampling up to here: `length` positions."""

    values: Any
    length: int


def scorer_of(config: Any, versions_max: int) -> VersionScorer:
    """Makes a scorer with a model of this transformers configuration, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return VersionScorer(AutoModelForCausalLM.from_config(config, dtype=torch.float32), versions_max)


class VersionScorer:
    """A `Scorer` with its own model."""

    is_of_trainer = False

    def __init__(self, hf_model: Any, versions_max: int) -> None:
        self._model = hf_model.eval()
        self.kept = KeptVersions(rows_by_name(hf_model), versions_max)

    @property
    def versions(self) -> list[Version]:
        return self.kept.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self.kept.keep(version, tensors)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.kept.held():
            yield

    def together(self, version: Version, asked: Sequence[tuple[Passage, Piece]]) -> list[TokenScores]:
        return [self(version, passage, piece, None)[0] for passage, piece in asked]

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]:
        self.kept.load(version)
        device = next(self._model.parameters()).device
        places = torch.from_numpy(passage.places[piece.start : piece.stop])
        begin = cache.length if isinstance(cache, _Cache) else 0
        end = int(places[-1])
        if isinstance(cache, _Cache) and (later := cache.values.get_seq_length() - cache.length):
            cache.values.crop(-later)  # positions of the same piece, scored under another version
        tokens_L = torch.tensor(passage.token_ids[begin:end], device=device)
        needed = end - int(places[0]) + 1
        keeps = any(other.keeps_cache for other in passage.pieces)
        with torch.no_grad():
            out = self._model(
                input_ids=tokens_L[None],
                use_cache=keeps,
                logits_to_keep=needed,
                **({cache_name(): cache.values} if isinstance(cache, _Cache) else {}),
            )
            logits_LV = out.logits[0][(places - int(places[0])).to(device)]
            targets_L = torch.tensor([passage.token_ids[place] for place in places.tolist()], device=device)
            scores = scores_of(logits_LV, targets_L, passage.sampling)
        return scores, _Cache(out[cache_name()], end) if keeps else None
