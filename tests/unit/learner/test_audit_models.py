"""The audit on real models: who samples from what it claims is left alone, who does not is found out.

A policy with a history of small updates, as training makes them; workers sample from it with the noise of their own
precision and batch size. The last test says how large an alteration has to be to be seen.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
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

Alter = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Bench:
    model: PolicyModel
    snapshots: KeptSnapshots
    scorer: SnapshotScorer


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = make_tiny_model(tmp_path_factory.mktemp("audit") / "model")
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


def sampled(engine: Any, claimed: int, group: int, coldness: float = 1.0) -> list[Rollout]:
    """A group of siblings, sampled together."""
    generator = torch.Generator().manual_seed(group)
    tokens = torch.tensor([PROMPT] * SIBLINGS)
    logprobs = []
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = engine(input_ids=tokens, use_cache=False).logits[:, -1].float()
        logs = logits.log_softmax(-1)
        drawn = torch.multinomial((coldness * logits).softmax(-1), 1, generator=generator)
        logprobs.append(logs.gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    rows = torch.cat(logprobs, 1).clamp(max=0.0).tolist()
    return [rollout_of(group, n, tokens[n, len(PROMPT) :].tolist(), rows[n], claimed) for n in range(SIBLINGS)]


def rollout_of(group: int, index: int, tokens: list[int], logprobs: list[float], version: int) -> Rollout:
    numbers, spans = tuple(logprobs), (VersionSpan(Version(version), len(tokens)),)
    return Rollout(GroupId(f"g{group}"), index, tuple(tokens), numbers, numbers, spans, FinishReason.STOP)


def watched(bench: Bench, make: Callable[[int], list[Rollout]], groups: int) -> tuple[int, Accusation | None]:
    """Audits up to `groups` groups; returns after how many tokens the worker was accused, and of what."""
    suspicion = Suspicion(SuspicionConfig(), 0.0)
    for group in range(groups):
        rollouts = make(group)
        bench.scorer.prompts[rollouts[0].group_id] = PROMPT
        pieces = [p for r in rollouts for p in pieces_of(r, [(PeerId("w"), len(r.token_ids))])]
        found = examined(pieces, bench.snapshots.versions, bench.scorer)
        for evidence in found:
            suspicion.observe(evidence)
        suspicion.observe_copies(copies(rollouts, [e.exact.logprobs for e in found]))
        if (accusation := suspicion.accusation) is not None:
            return suspicion.tokens, accusation
    return suspicion.tokens, None


def test_honest_workers_of_another_dtype_and_batch_size_are_left_alone(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        engine = engine_of(bench, 6, dtype)
        assert watched(bench, lambda g, e=engine: sampled(e, 6, g), 24)[1] is None, dtype  # type: ignore[misc]
    alone = engine_of(bench, 6)
    assert watched(bench, lambda g: sampled(alone, 6, g)[:1], 60)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_on_the_previous_version_is_found_out(bench: Bench, dtype: torch.dtype) -> None:
    engine = engine_of(bench, 4, dtype)
    _, accusation = watched(bench, lambda g: sampled(engine, 6, g), 150)
    assert accusation is not None and accusation.bet == "version"


def test_a_worker_that_fabricates_its_numbers_is_found_out(bench: Bench) -> None:
    engine, rng = engine_of(bench, 6), random.Random(0)

    def make(group: int) -> list[Rollout]:
        honest = sampled(engine, 6, group)
        return [
            rollout_of(group, r.index, list(r.token_ids), [-rng.expovariate(0.5) for _ in r.token_ids], 6)
            for r in honest
        ]

    tokens, accusation = watched(bench, make, 20)
    assert accusation is not None and accusation.bet == "fabrication" and tokens <= 1024


def test_a_worker_that_cuts_its_completions_short_is_found_out(bench: Bench) -> None:
    """Ends them with the stop token after a third, with the honest log-probability of that token there."""
    engine = engine_of(bench, 6)

    def make(group: int) -> list[Rollout]:
        short = []
        for rollout in sampled(engine, 6, group):
            tokens = [*rollout.token_ids[: TOKENS // 3], STOP]
            with torch.no_grad():
                logits = engine(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -2]
            last = float(logits.log_softmax(-1)[STOP])
            short.append(rollout_of(group, rollout.index, tokens, [*rollout.logprobs[: TOKENS // 3], last], 6))
        return short

    _, accusation = watched(bench, make, 60)
    assert accusation is not None and accusation.bet == "length"


def test_a_worker_that_hands_completions_in_twice_is_found_out(bench: Bench) -> None:
    engine = engine_of(bench, 6)

    def make(group: int) -> list[Rollout]:
        first = sampled(engine, 6, group)[0]
        return [rollout_of(group, n, list(first.token_ids), list(first.logprobs), 6) for n in range(SIBLINGS)]

    tokens, accusation = watched(bench, make, 20)
    assert accusation is not None and accusation.bet == "copies" and tokens <= 4096


def test_a_worker_that_samples_greedily_is_found_out(bench: Bench) -> None:
    engine = engine_of(bench, 6)
    _, accusation = watched(bench, lambda g: sampled(engine, 6, g, coldness=8.0), 40)
    assert accusation is not None and accusation.bet in ("draw", "copies")


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


@pytest.mark.parametrize(("name", "alter"), [("4 bits", quantised(4)), ("perturbed by a tenth", perturbed(0.1))])
def test_an_altered_model_is_found_out(bench: Bench, name: str, alter: Alter) -> None:
    engine = engine_of(bench, 6, torch.float32, alter)
    _, accusation = watched(bench, lambda g: sampled(engine, 6, g), 100)
    assert accusation is not None, name
