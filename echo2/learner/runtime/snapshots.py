"""Published versions kept in host memory, and the forward pass under them: what an audit compares claims with.

Guarantees: at most `versions_max` snapshots are held, the newest; scores are of the very bits that were published.
Leaves to others: which rollouts to audit (auditor), what the numbers say (learner/suspicion). Costs one more copy of the
model, on the device it is made on; not for the trainer's thread while a step runs.

Shapes: L tokens of prompt and completion, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echo2.base.errors import StateError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import Rollout
from echo2.learner.audit import FLOOR_NATS, TokenScores
from echo2.learner.runtime.adapter import published_name

CHUNK_TOKENS = 512
"""Log-probabilities of the whole vocabulary are held for this many positions at a time."""


class KeptSnapshots:
    """The newest `versions_max` published versions, as `PolicyModel.snapshot` gives them."""

    def __init__(self, versions_max: int):
        assert versions_max >= 1, "at least one version is kept"
        self._versions_max = versions_max
        self._kept: OrderedDict[Version, Mapping[str, Tensor]] = OrderedDict()

    def keep(self, version: Version, snapshot: Mapping[str, Tensor]) -> None:
        self._kept[version] = snapshot
        self._kept.move_to_end(version)
        while len(self._kept) > self._versions_max:
            self._kept.popitem(last=False)

    def __contains__(self, version: Version) -> bool:
        return version in self._kept

    @property
    def versions(self) -> list[Version]:
        """Ascending."""
        return sorted(self._kept)

    def of(self, version: Version) -> Mapping[str, Tensor]:
        if version not in self._kept:
            raise StateError(f"version {version}: expected a kept snapshot among {', '.join(map(str, self._kept))}")
        return self._kept[version]


class SnapshotScorer:
    """Scores tokens under kept versions. `hf_model` is the scorer's own: weights are loaded into it. Groups' prompts are
    told before."""

    def __init__(self, hf_model: Any, snapshots: KeptSnapshots, temperature: float, stop_token_ids: Sequence[int]):
        self._model = hf_model.eval()
        self._snapshots = snapshots
        self._temperature = temperature
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.long)
        self._loaded: Version | None = None
        self.prompts: dict[GroupId, tuple[int, ...]] = {}

    def __call__(self, version: Version, rollout: Rollout, start: int, stop: int) -> TokenScores:
        self._load(version)
        prompt = self.prompts[rollout.group_id]
        device = next(self._model.parameters()).device
        tokens_L = torch.tensor([*prompt, *rollout.token_ids[:stop]], device=device)
        with torch.no_grad():
            kept = stop - start + 1
            logits_LV = self._model(input_ids=tokens_L[None], use_cache=False, logits_to_keep=kept).logits[0, :-1]
            logits = torch.split(logits_LV / self._temperature, CHUNK_TOKENS)
            targets = torch.split(tokens_L[len(prompt) + start :], CHUNK_TOKENS)
            stops = self._stop_token_ids.to(device)
            pieces = [_scores(one, other, stops) for one, other in zip(logits, targets, strict=True)]
        columns = (tuple(torch.cat(column).tolist()) for column in zip(*pieces, strict=True))
        return TokenScores(*columns)

    def _load(self, version: Version) -> None:
        if version == self._loaded:
            return
        snapshot = self._snapshots.of(version)
        own = dict(self._model.named_parameters())
        own |= {published_name(name): parameter for name, parameter in own.items()}  # of an adapter
        unknown = sorted(snapshot.keys() - own.keys())
        if unknown:
            raise StateError(f"version {version}: expected tensors of the model that scores, got {unknown[0]}")
        with torch.no_grad():
            for name, tensor in snapshot.items():
                own[name].copy_(tensor)
        self._loaded = version


def _scores(logits_LV: Tensor, target_L: Tensor, stops: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four columns of `TokenScores`."""
    logprobs_LV = logits_LV.float().log_softmax(-1)
    probabilities_LV = logprobs_LV.exp()
    expected_L = (probabilities_LV * logprobs_LV.clamp(min=FLOOR_NATS)).sum(-1)
    chosen_L = logprobs_LV.gather(-1, target_L[:, None])[:, 0]
    return chosen_L, expected_L, probabilities_LV[:, stops].sum(-1), torch.isin(target_L, stops)
