"""Published versions as one model and the changes between them, and the forward pass under each: what an audit compares
claims with.

Guarantees: scores are of exactly the published weights; at most `versions_max` versions and `bytes_max` of changes are
held. Leaves to others: which rollouts to audit (auditor), what the numbers say (learner/suspicion). Costs one more copy of
the model, and for each version the places and bits of the weights that it changed: 6 bytes each of bf16 (2 a weight where
more than a third changed). At 8 billion weights of which 2 in a hundred change, 1 GB a version.

Not for the trainer's thread while a step runs, nor for the event loop's. Shapes: L tokens, V vocabulary, C of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo2.base.errors import StateError
from echo2.base.ids import Version
from echo2.learner.audit import Passage, Piece
from echo2.learner.runtime.adapter import published_name
from echo2.scoring.columns import scores_of
from echo2.scoring.request import TokenScores

BYTES_MAX_OF_MODEL = 2.0
"""All changes together hold at most this many times the bytes of a published version."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Change:
    """Of one tensor: the bits that differ, at `places`, or everywhere where that is None. Works in both directions."""

    places: Tensor | None
    bits: Tensor

    @property
    def size(self) -> int:
        return self.bits.nbytes + (self.places.nbytes if self.places is not None else 0)

    def turn(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Turns one version's values into the other's. `dtype`: that in which they are published."""
        flat = parameter.view(-1)
        old = flat if self.places is None else flat[self.places.long()]
        new = (old.to(dtype).view(self.bits.dtype) ^ self.bits).view(dtype).to(flat.dtype)
        if self.places is None:
            flat.copy_(new)
        else:
            flat[self.places.long()] = new


class KeptVersions:
    """The newest published versions in `hf_model`, whose weights are those of one of them at a time."""

    def __init__(self, hf_model: Any, versions_max: int):
        assert versions_max >= 1, "at least one version is kept"
        self.model = hf_model.eval()
        self._versions_max = versions_max
        self._own = dict(hf_model.named_parameters())
        self._own |= {published_name(name): parameter for name, parameter in self._own.items()}  # of an adapter
        self._changes: dict[Version, dict[str, _Change]] = {}  # from the version before
        self._order: list[Version] = []
        self._newest: Mapping[str, Tensor] = {}
        self._loaded: Version | None = None

    @property
    def versions(self) -> list[Version]:
        """Ascending."""
        return list(self._order)

    @property
    def held_bytes(self) -> int:
        return sum(change.size for changes in self._changes.values() for change in changes.values())

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: all that is published of it, never changed in place."""
        unknown = sorted(tensors.keys() - self._own.keys())
        if unknown:
            raise StateError(f"version {version}: expected tensors of the model that scores, got {unknown[0]}")
        if not self._order:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    self._own[name].copy_(tensor)
            self._loaded = version
        elif version > self._order[-1]:
            changes = {name: _change(self._newest[name], tensor) for name, tensor in tensors.items()}
            self._changes[version] = {name: change for name, change in changes.items() if change is not None}
        else:
            return
        self._order.append(version)
        self._newest = tensors
        limit = BYTES_MAX_OF_MODEL * sum(tensor.nbytes for tensor in tensors.values())
        while len(self._order) > self._versions_max or (self.held_bytes > limit and len(self._order) > 2):
            self._forget_oldest()

    def load(self, version: Version) -> Any:
        """The model with the weights of that version."""
        if version not in self._order:
            raise StateError(f"version {version}: expected a kept version among {', '.join(map(str, self._order))}")
        assert self._loaded is not None, "a version that is kept has been loaded"
        here, there = self._order.index(self._loaded), self._order.index(version)
        path = self._order[here + 1 : there + 1] if there > here else reversed(self._order[there + 1 : here + 1])
        with torch.no_grad():
            for step in path:
                for name, change in self._changes[step].items():
                    change.turn(self._own[name], self._newest[name].dtype)
        self._loaded = version
        return self.model

    def _forget_oldest(self) -> None:
        if self._loaded == self._order[0]:
            self.load(self._order[1])
        del self._order[0]
        del self._changes[self._order[0]]


def _change(old: Tensor, new: Tensor) -> _Change | None:
    integers = _INTEGERS[new.element_size()]
    bits = (old.contiguous().view(integers) ^ new.contiguous().view(integers)).view(-1)
    places = bits.nonzero()[:, 0]
    if not len(places):
        return None
    if 3 * len(places) > bits.numel():
        return _Change(None, bits)
    small = torch.int32 if bits.numel() < 1 << 31 else torch.int64
    return _Change(places.to(small), bits[places])


@dataclass(frozen=True, slots=True)
class _Cache:
    """What an engine's cache holds that has sampled up to here: `length` positions."""

    values: Any
    length: int


def scorer_of(config: Any, versions_max: int) -> VersionScorer:
    """Of a model of this configuration (transformers'), in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return VersionScorer(KeptVersions(AutoModelForCausalLM.from_config(config, dtype=torch.float32), versions_max))


class VersionScorer:
    """Scores pieces of passages under kept versions."""

    def __init__(self, kept: KeptVersions) -> None:
        self._kept = kept

    @property
    def versions(self) -> list[Version]:
        return self._kept.versions

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self._kept.keep(version, tensors)

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]:
        model = self._kept.load(version)
        device = next(model.parameters()).device
        places = torch.from_numpy(passage.places[piece.start : piece.stop])
        begin = cache.length if isinstance(cache, _Cache) else 0
        end = int(places[-1])
        if isinstance(cache, _Cache) and (later := cache.values.get_seq_length() - cache.length):
            cache.values.crop(-later)  # of the same piece under the version before
        tokens_L = torch.tensor(passage.token_ids[begin:end], device=device)
        needed = end - int(places[0]) + 1
        keeps = any(other.keeps_cache for other in passage.pieces)
        with torch.no_grad():
            out = model(
                input_ids=tokens_L[None],
                past_key_values=cache.values if isinstance(cache, _Cache) else None,
                use_cache=keeps,
                logits_to_keep=needed,
            )
            logits_LV = out.logits[0][(places - int(places[0])).to(device)]
            targets_L = torch.tensor([passage.token_ids[place] for place in places.tolist()], device=device)
            scores = scores_of(logits_LV, targets_L, passage.sampling)
        return scores, _Cache(out.past_key_values, end) if keeps else None
