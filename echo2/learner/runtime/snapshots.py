"""Published versions as one model and the changes between them, and the forward pass under each: what an audit compares
claims with.

Guarantees: scores are of the very bits that were published; at most `versions_max` versions and `bytes_max` of changes are
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
from echo2.base.rollout import SamplingParams
from echo2.learner.audit import FLOOR_NATS, Passage, Piece, TokenScores
from echo2.learner.runtime.adapter import published_name

CHUNK_LOGITS = 1 << 25
"""Logits held at a time: their softmax and what is sorted of them take about ten times as many bytes."""
GREEDY_NATS = 1.0
"""How far below the likeliest token a greedy one may be: engines of another precision pick another of nearly equal ones."""
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
            rows = max(1, CHUNK_LOGITS // logits_LV.shape[-1])
            chunks = zip(torch.split(logits_LV, rows), torch.split(targets_L, rows), strict=True)
            parts = [_scores(logits_CV, targets_C, passage.sampling) for logits_CV, targets_C in chunks]
        columns = (torch.cat(column).double().cpu().numpy() for column in zip(*parts, strict=True))
        return TokenScores(*columns), _Cache(out.past_key_values, end) if keeps else None


def _scores(logits_CV: Tensor, targets_C: Tensor, sampling: SamplingParams) -> tuple[Tensor, ...]:
    """The columns of `TokenScores`."""
    if sampling.temperature == 0:
        return _greedy_scores(logits_CV, targets_C, sampling)
    plain_CV = (logits_CV.float() / sampling.temperature).log_softmax(-1)
    drawn_CV = _filtered(plain_CV, sampling) if sampling.is_filtered else plain_CV
    probabilities_CV = drawn_CV.exp()
    drawn_C = drawn_CV.gather(-1, targets_C[:, None])[:, 0]
    trained_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    if sampling.is_filtered and sampling.temperature != 1.0:  # a token at the filter's edge counts as let through
        passed_C = torch.where(drawn_CV.isinf(), -torch.inf, plain_CV).logsumexp(-1)
        trained_C = trained_C - passed_C
    stops = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.long, device=logits_CV.device)
    ids_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    below_C = torch.where(ids_V < targets_C[:, None], probabilities_CV, 0.0).sum(-1)
    return (
        trained_C,
        drawn_C.clamp(min=2 * FLOOR_NATS),
        (probabilities_CV * drawn_CV.clamp(min=FLOOR_NATS)).sum(-1),
        probabilities_CV[:, stops].sum(-1),
        torch.isin(targets_C, stops),
        below_C,
        probabilities_CV.square().sum(-1),
    )


def _greedy_scores(logits_CV: Tensor, targets_C: Tensor, sampling: SamplingParams) -> tuple[Tensor, ...]:
    """Of completions that were not drawn: what is claimed is the raw model's number, and a token that is further from the
    likeliest than engines differ counts as one that could not come."""
    plain_CV = logits_CV.float().log_softmax(-1)
    plain_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    drawn_C = torch.where(plain_CV.amax(-1) - plain_C > GREEDY_NATS, FLOOR_NATS, 0.0)
    stopped_C = torch.isin(targets_C, torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=targets_C.device))
    nothing_C = torch.zeros_like(plain_C)
    return plain_C, drawn_C, nothing_C, stopped_C.float(), stopped_C, nothing_C, torch.ones_like(plain_C)


def _filtered(logprobs_CV: Tensor, sampling: SamplingParams) -> Tensor:
    """Renormalised, with what top-k and then top-p cut at minus infinity, as the embedded engine cuts."""
    kept_CV = logprobs_CV
    if 0 < sampling.top_k < kept_CV.shape[-1]:
        threshold_C = torch.topk(kept_CV, sampling.top_k).values[:, -1:]
        kept_CV = kept_CV.masked_fill(kept_CV < threshold_C, -torch.inf)
    if sampling.top_p < 1.0:
        ordered_CV, order_CV = torch.sort(kept_CV, descending=True, stable=True)
        odds_CV = torch.softmax(ordered_CV, dim=-1, dtype=torch.float64)
        before_CV = odds_CV.cumsum(dim=-1) - odds_CV
        cut_CV = torch.zeros_like(kept_CV, dtype=torch.bool).scatter(-1, order_CV, before_CV >= sampling.top_p)
        kept_CV = kept_CV.masked_fill(cut_CV, -torch.inf)
    return kept_CV.log_softmax(-1)
