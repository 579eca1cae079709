"""Workers for the audit to look at: a small real policy with a history, engines that alter it, and ways to lie about it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.audit import copies, examined, pieces_of
from echo2.learner.runtime.model import PolicyModel
from echo2.learner.runtime.snapshots import KeptSnapshots, SnapshotScorer
from echo2.learner.suspicion import Accusation, Suspicion, SuspicionConfig
from tests.unit.learner.tiny import make_tiny_model

PROMPT = (5, 6, 7)
TOKENS = 32
SIBLINGS = 8
TEMPERATURE = 1.0
STOP = 3
UPDATE = 2e-3
"""Size of a step relative to the weights: what changes a log-probability by about a hundredth of a nat here."""

PREVIOUS, NEWEST = 4, 6
Alter = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[int], list[Rollout]]
"""The rollouts of a group, by its number."""


@dataclass(frozen=True, slots=True)
class Bench:
    model: PolicyModel
    snapshots: KeptSnapshots
    scorer: SnapshotScorer


def make_bench(folder: Path) -> Bench:
    """A small policy, with three versions a few updates apart."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = make_tiny_model(folder / "model")
    model = PolicyModel(str(path), "bfloat16", torch.device("cpu"), TEMPERATURE)
    with torch.no_grad():  # a policy with something to say: sharper than a fresh one
        for name, master in model.masters_by_name().items():
            master.mul_(1.0 if "norm" in name else 3.0)
    model.round_to_policy()
    snapshots = KeptSnapshots(versions_max=3)
    for version in (2, 4, 6):
        snapshots.keep(Version(version), model.snapshot())
        with torch.no_grad():
            for master in model.masters:
                master.add_(UPDATE * master.abs().mean() * torch.randn_like(master))
        model.round_to_policy()
    return Bench(model, snapshots, SnapshotScorer(copy.deepcopy(model.hf_model), snapshots, TEMPERATURE, [STOP]))


def engine_of(bench: Bench, version: int, dtype: torch.dtype = torch.float32, alter: Alter | None = None) -> Any:
    engine = copy.deepcopy(bench.model.hf_model)
    weights = {name: tensor.float() for name, tensor in bench.snapshots.of(Version(version)).items()}
    if alter is not None:
        weights = {name: alter(tensor) if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    engine.load_state_dict({**engine.state_dict(), **weights})
    return engine.to(dtype).eval()


def sampled(engine: Any, claimed: int, group: int, coldness: float = 1.0, siblings: int = SIBLINGS) -> list[Rollout]:
    """A group of siblings, sampled together."""
    generator = torch.Generator().manual_seed(group)
    tokens = torch.tensor([PROMPT] * siblings)
    logprobs = []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = engine(input_ids=tokens, use_cache=False).logits[:, -1].float()
        logs = logits.log_softmax(-1)
        drawn = torch.multinomial((coldness * logits).softmax(-1), 1, generator=generator)
        logprobs.append(logs.gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    rows = torch.cat(logprobs, 1).clamp(max=0.0).tolist()
    return [rollout_of(group, n, tokens[n, len(PROMPT) :].tolist(), rows[n], claimed) for n in range(siblings)]


def rollout_of(group: int, index: int, tokens: list[int], logprobs: list[float], version: int) -> Rollout:
    numbers, spans = tuple(logprobs), (VersionSpan(Version(version), len(tokens)),)
    return Rollout(GroupId(f"g{group}"), index, tuple(tokens), numbers, numbers, spans, FinishReason.STOP)


def watched(bench: Bench, make: Maker, groups: int, first_group: int = 0) -> tuple[Suspicion, int, Accusation | None]:
    """Audits up to `groups` groups: what is held against the worker, after how many rollouts, and of what it is accused."""
    suspicion, rollouts_seen = Suspicion(SuspicionConfig(), 0.0), 0
    for group in range(first_group, first_group + groups):
        rollouts = make(group)
        rollouts_seen += len(rollouts)
        bench.scorer.prompts[rollouts[0].group_id] = PROMPT
        pieces = [p for r in rollouts for p in pieces_of(r, [(PeerId("w"), len(r.token_ids))])]
        found = examined(pieces, bench.snapshots.versions, bench.scorer)
        for evidence in found:
            suspicion.observe(evidence)
        suspicion.observe_copies(copies(rollouts, [e.exact.logprobs for e in found]))
        if (accusation := suspicion.accusation) is not None:
            return suspicion, rollouts_seen, accusation
    return suspicion, rollouts_seen, None


# ---- workers: what each hands in for a group


def honest(bench: Bench, dtype: torch.dtype = torch.float32, siblings: int = SIBLINGS) -> Maker:
    """`siblings`: how many it samples, in one batch."""
    return altered(bench, None, dtype, siblings)


def altered(
    bench: Bench,
    alter: Alter | None,
    dtype: torch.dtype = torch.float32,
    siblings: int = SIBLINGS,
    coldness: float = 1.0,
) -> Maker:
    """Of changed weights; `coldness` above 1 samples likelier tokens than it says."""
    engine = engine_of(bench, NEWEST, dtype, alter)
    return lambda group: sampled(engine, NEWEST, group, coldness, siblings)


def one_behind(bench: Bench, dtype: torch.dtype = torch.float32) -> Maker:
    """Runs the version before the one that it claims."""
    engine = engine_of(bench, PREVIOUS, dtype)
    return lambda group: sampled(engine, NEWEST, group)


def fabricated(bench: Bench) -> Maker:
    """Honest tokens with log-probabilities that it made up."""
    make, rng = honest(bench), random.Random(0)

    def lie(one: Rollout, group: int) -> Rollout:
        return rollout_of(group, one.index, list(one.token_ids), [-rng.expovariate(0.5) for _ in one.token_ids], NEWEST)

    return lambda group: [lie(one, group) for one in make(group)]


def cut_short(bench: Bench) -> Maker:
    """Ends its completions after a third with the stop token, with the honest log-probability of that token there."""
    engine = engine_of(bench, NEWEST)

    def cut(one: Rollout, group: int) -> Rollout:
        tokens = [*one.token_ids[: TOKENS // 3], STOP]
        with torch.no_grad():
            logits = engine(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -2]
        last = min(0.0, float(logits.log_softmax(-1)[STOP]))
        return rollout_of(group, one.index, tokens, [*one.logprobs[: TOKENS // 3], last], NEWEST)

    return lambda group: [cut(one, group) for one in sampled(engine, NEWEST, group)]


def copied(bench: Bench) -> Maker:
    """Hands one completion in for all siblings."""
    make = honest(bench)

    def all_alike(group: int) -> list[Rollout]:
        first = make(group)[0]
        return [rollout_of(group, n, list(first.token_ids), list(first.logprobs), NEWEST) for n in range(SIBLINGS)]

    return all_alike


def quantised(bits: int) -> Alter:
    def alter(weight: torch.Tensor) -> torch.Tensor:
        """By row, symmetric, rounded to nearest."""
        scale = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weight / scale).round() * scale

    return alter


def perturbed(size: float) -> Alter:
    """By noise of this size relative to the mean weight."""
    generator = torch.Generator().manual_seed(1)
    return lambda weight: weight + size * weight.abs().mean() * torch.randn(weight.shape, generator=generator)


def float8(weight: torch.Tensor) -> torch.Tensor:
    """e4m3, scaled by row."""
    scale = weight.abs().amax(-1, keepdim=True) / 448.0
    rounded: torch.Tensor = (weight / scale).to(torch.float8_e4m3fn).float()
    return rounded * scale
