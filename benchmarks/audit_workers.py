"""Workers for the audit to look at: a small real policy with a history, engines that alter it, and ways to lie about it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rng import derived_seed, rollout_seed, uniforms
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan, spans_of
from echo2.learner.audit import Habits, examine, passage_of
from echo2.learner.bets import MEASURED_TOKENS, Accusation, Bets, KindNoise
from echo2.learner.rollouts.admission import problem_of_end, problem_of_segment
from echo2.learner.rollouts.groups import SentTokens, TrainGroup
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.scoring import VersionScorer
from tests.unit.learner.tiny import make_tiny_model

PROMPT = (5, 6, 7)
TOKENS = 32
SIBLINGS = 8
TRIES = 4
TEMPERATURE = 1.0
STOP = 3
VOCABULARY = 1 << 16
UPDATE = 2e-3
"""Size of a step relative to the weights: what changes a log-probability by about a hundredth of a nat here."""

OLDEST, PREVIOUS, NEWEST = 2, 4, 6
SAMPLING = SamplingParams(temperature=TEMPERATURE, max_new_tokens=TOKENS, stop_token_ids=(STOP,))
Alter = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[int], list[Rollout]]
"""The rollouts of a group, by its number."""
REFUSED = Accusation("intake", "refused at intake", True)
SEEDED = Habits(True, kind="embedded none")


@dataclass(frozen=True, slots=True)
class Bench:
    model: PolicyModel
    snapshots: dict[Version, dict[str, torch.Tensor]]
    scorer: VersionScorer


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
    scorer, snapshots = VersionScorer(copy.deepcopy(model.hf_model), versions_max=3), {}
    for version in (OLDEST, PREVIOUS, NEWEST):
        snapshots[Version(version)] = dict(model.snapshot())
        scorer.keep(Version(version), snapshots[Version(version)])
        with torch.no_grad():
            for master in model.masters:
                master.add_(UPDATE * master.abs().mean() * torch.randn_like(master))
        model.round_to_policy()
    return Bench(model, snapshots, scorer)


def engine_of(bench: Bench, version: int, dtype: torch.dtype = torch.float32, alter: Alter | None = None) -> Any:
    engine = copy.deepcopy(bench.model.hf_model)
    weights = {name: tensor.float() for name, tensor in bench.snapshots[Version(version)].items()}
    if alter is not None:
        weights = {name: alter(tensor) if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    engine.load_state_dict({**engine.state_dict(), **weights})
    return engine.to(dtype).eval()


def spec_of(group: int) -> GroupSpec:
    """The lease of a group: its seed is nobody's choice."""
    sampling = SamplingParams(TEMPERATURE, 1.0, 0, TOKENS, (STOP,), derived_seed(7, "group", group))
    return GroupSpec(GroupId(f"g{group}"), PROMPT, SIBLINGS, sampling, 0)


def leased_numbers(group: int, count: int = SIBLINGS) -> torch.Tensor:
    """The random numbers of a lease, by rollout and position."""
    seed = spec_of(group).sampling.seed
    return torch.from_numpy(np.stack([uniforms(rollout_seed(seed, index), TOKENS) for index in range(count)]))


def own_numbers(group: int, count: int = SIBLINGS) -> torch.Tensor:
    return torch.rand(count, TOKENS, generator=torch.Generator().manual_seed(group), dtype=torch.float64)


Engines = Sequence[tuple[Any, int, int]]
"""Whose weights sample, of which version they are said to be, and for how many tokens."""


def sampled(engines: Engines, group: int, numbers: torch.Tensor, coldness: float = 1.0) -> list[Rollout]:
    """Siblings, sampled together by these numbers; `coldness` above 1 samples likelier tokens than the numbers say."""
    count = len(numbers)
    tokens, logprobs = torch.tensor([PROMPT] * count), []
    for engine in [engine for engine, _, length in engines for _ in range(length)]:
        with torch.no_grad():
            logits = engine(input_ids=tokens, use_cache=False).logits[:, -1].float()
        sums = (coldness * logits).softmax(-1).double().cumsum(-1)
        at = len(logprobs)
        drawn = torch.searchsorted(sums, numbers[:, at : at + 1] * sums[:, -1:], right=True).clamp(
            max=logits.shape[1] - 1
        )
        logprobs.append(logits.log_softmax(-1).gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    rows = torch.cat(logprobs, 1).clamp(max=0.0).tolist()
    versions = [version for _, version, length in engines for _ in range(length)]
    return [rollout_of(group, n, tokens[n, len(PROMPT) :].tolist(), rows[n], versions) for n in range(count)]


def rollout_of(group: int, index: int, tokens: list[int], logprobs: list[float], versions: Sequence[int]) -> Rollout:
    """Up to its first stop token, or to its limit."""
    length = tokens.index(STOP) + 1 if STOP in tokens else len(tokens)
    numbers = tuple(np.float32(logprobs[:length]).tolist())
    reason = FinishReason.STOP if STOP in tokens else FinishReason.LENGTH
    spans = spans_of(Version(version) for version in versions[:length])
    return Rollout(GroupId(f"g{group}"), index, tuple(tokens[:length]), numbers, numbers, spans, reason)


def recomputed(bench: Bench, engine: Any, one: Rollout, version: int, index: int | None = None) -> Rollout:
    """The same tokens with the honest numbers of a version."""
    tokens, group = list(one.token_ids), int(one.group_id[1:])
    with torch.no_grad():
        logits = engine(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    rows = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].clamp(max=0.0).tolist()
    return rollout_of(group, one.index if index is None else index, tokens, rows, [version] * len(tokens))


def problem_of(rollout: Rollout, spec: GroupSpec) -> str | None:
    """What the learner's intake says of it."""
    published = [Version(version) for version in (OLDEST, PREVIOUS, NEWEST)]
    return problem_of_segment(rollout, spec, VOCABULARY, published) or problem_of_end(rollout, 0, spec)


def fleet_noise(kind: str, nats: float, count: int = 4) -> KindNoise:
    """What the learner has measured of the other workers of this kind."""
    noise, rng = KindNoise(), np.random.default_rng(0)
    for number in range(count):
        noise.observe(PeerId(f"other{number}"), kind, nats * rng.standard_normal(MEASURED_TOKENS))
    return noise


def watched(
    bench: Bench,
    make: Maker,
    groups: int,
    first_group: int = 0,
    habits: Habits = SEEDED,
    noise: KindNoise | None = None,
) -> tuple[Bets, int, Accusation | None]:
    """Looks at all rollouts of up to `groups` groups: what is held against the worker, after how many, and of what it is
    accused. `noise`: what is known of the others of its kind; None: nothing."""
    bets, rollouts_seen, noise = Bets(0.0), 0, noise or KindNoise()
    worker, scorer = PeerId("w"), bench.scorer
    for number in range(first_group, first_group + groups):
        rollouts = make(number)
        spec = spec_of(int(rollouts[0].group_id[1:]))
        if any(problem_of(rollout, spec) for rollout in rollouts):
            return bets, rollouts_seen + 1, REFUSED
        senders = tuple((SentTokens(worker, len(rollout.token_ids)),) for rollout in rollouts)
        group = TrainGroup(spec, number, tuple(rollouts), (0.0,) * len(rollouts), (), senders)
        passages = [passage_of(group, member, lambda peer: habits) for member in range(len(rollouts))]
        for evidence in examine(passages, scorer):
            rollouts_seen += 1
            for piece in evidence:
                bets.observe(piece, habits.kind, noise)
                noise.observe(worker, habits.kind, piece.claimed - piece.exact.logprobs)
            if (accusation := bets.accusation) is not None:
                return bets, rollouts_seen, accusation
    return bets, rollouts_seen, None


# ---- workers: what each hands in for a group


def honest(bench: Bench, dtype: torch.dtype = torch.float32, siblings: int = SIBLINGS) -> Maker:
    """`siblings`: how many it samples, in one batch."""
    return altered(bench, None, dtype, siblings)


def honest_over_a_swap(bench: Bench) -> Maker:
    """Its weights change in the midst of each rollout; it computes its cache anew."""
    first, second = engine_of(bench, PREVIOUS), engine_of(bench, NEWEST)
    engines = ((first, PREVIOUS, TOKENS // 3), (second, NEWEST, TOKENS - TOKENS // 3))
    return lambda group: sampled(engines, group, leased_numbers(group))


def altered(
    bench: Bench,
    alter: Alter | None,
    dtype: torch.dtype = torch.float32,
    siblings: int = SIBLINGS,
    coldness: float = 1.0,
) -> Maker:
    """Of changed weights; `coldness` above 1 samples likelier tokens than it says."""
    engine = engine_of(bench, NEWEST, dtype, alter)
    return lambda group: sampled([(engine, NEWEST, TOKENS)], group, leased_numbers(group, siblings), coldness)


def one_behind(bench: Bench, dtype: torch.dtype = torch.float32) -> Maker:
    """Runs the version before the one that it claims."""
    engine = engine_of(bench, PREVIOUS, dtype)
    return lambda group: sampled([(engine, NEWEST, TOKENS)], group, leased_numbers(group))


def others_tokens(bench: Bench, version: int) -> Maker:
    """The tokens of an older version, drawn by the lease's numbers, with the honest numbers of the newest."""
    engine, newest = engine_of(bench, version), engine_of(bench, NEWEST)
    return lambda group: [
        recomputed(bench, newest, one, NEWEST)
        for one in sampled([(engine, version, TOKENS)], group, leased_numbers(group))
    ]


def best_of(bench: Bench, value: Callable[[Rollout], float], version: int = NEWEST, tries: int = TRIES) -> Maker:
    """The best of several completions for each rollout, of which the first is honest."""
    engine = engine_of(bench, version)

    def best(group: int) -> list[Rollout]:
        numbers = [leased_numbers(group), *(own_numbers(tries * group + n) for n in range(1, tries))]
        made = [sampled([(engine, version, TOKENS)], group, each) for each in numbers]
        return [max((one[index] for one in made), key=value) for index in range(SIBLINGS)]

    return best


def near_misses(bench: Bench, band: float, share: float = 1.0, tries: int = 16, noise_nats: float = 0.0) -> Maker:
    """Selects within what noise may explain: moves a `share` of the lease's numbers by up to `band` standard deviations of a number
    (as noise of `band` nats would at most), and keeps the best by reward of some tries. Its numbers are honest but for noise
    that it adds, as engines of its kind have."""
    engine = engine_of(bench, NEWEST)

    def best(group: int) -> list[Rollout]:
        rng = torch.Generator().manual_seed(group)
        exact, made = leased_numbers(group), []
        for _ in range(tries):
            moved = band * (exact * (1.0 - exact)).sqrt() * (2.0 * torch.rand(exact.shape, generator=rng) - 1.0)
            chosen = torch.rand(exact.shape, generator=rng) < share
            numbers = (exact + torch.where(chosen, moved, 0.0)).clamp(0.0, 1.0 - 1e-9)
            made.append(sampled([(engine, NEWEST, TOKENS)], group, numbers))
        kept = [max((one[index] for one in made), key=by_reward) for index in range(SIBLINGS)]
        return [_with_noise(one, noise_nats, group) for one in kept]

    return best


def _with_noise(one: Rollout, nats: float, group: int) -> Rollout:
    noise = np.random.default_rng([group, one.index]).normal(0.0, nats, len(one.logprobs)) if nats else 0.0
    numbers = np.minimum(0.0, np.array(one.logprobs) + noise).tolist()
    return rollout_of(group, one.index, list(one.token_ids), numbers, [NEWEST] * len(one.token_ids))


def by_reward(one: Rollout) -> float:
    """A stand-in for a reward that a worker can compute: how many tokens are odd."""
    return sum(token % 2 for token in one.token_ids) / len(one.token_ids)


def by_likelihood(one: Rollout) -> float:
    return sum(one.logprobs) / len(one.logprobs)


def hands_back_hard_prompts(bench: Bench) -> Maker:
    """Gives back every group whose first completion is worth less than most; the rest is honest."""
    make = honest(bench)

    def easy(group: int) -> list[Rollout]:
        while by_reward((rollouts := make(group))[0]) < 0.5:
            group += 100_000
        return rollouts

    return easy


def memorised(bench: Bench) -> Maker:
    """One of the siblings is the likeliest completion, kept ready, with honest numbers; the others are honest."""
    make, engine = honest(bench), engine_of(bench, NEWEST)
    ready = sampled([(engine, NEWEST, TOKENS)], 0, own_numbers(0, 1), coldness=1e4)[0]

    def with_one(group: int) -> list[Rollout]:
        rollouts, place = make(group), group % SIBLINGS
        rollouts[place] = rollout_of(group, place, list(ready.token_ids), list(ready.logprobs), [NEWEST] * TOKENS)
        return rollouts

    return with_one


def fabricated(bench: Bench) -> Maker:
    """Honest tokens with log-probabilities that it made up."""
    make, rng = honest(bench), random.Random(0)

    def lie(one: Rollout, group: int) -> Rollout:
        numbers = [-rng.expovariate(0.5) for _ in one.token_ids]
        return rollout_of(group, one.index, list(one.token_ids), numbers, [NEWEST] * TOKENS)

    return lambda group: [lie(one, group) for one in make(group)]


def forged_raw(bench: Bench) -> Maker:
    """One of the two numbers of each token is honest, and the other is made up."""
    make = honest(bench)

    def lie(one: Rollout) -> Rollout:
        raw = tuple(number - 15.0 for number in one.raw_logprobs)
        return Rollout(
            one.group_id, one.index, one.token_ids, one.logprobs, raw, one.version_spans, FinishReason.STOP
        )  # fmt: skip

    return lambda group: [lie(one) for one in make(group)]


def one_token(bench: Bench) -> Maker:
    """Ends after its first token, for its length as it says."""
    make = honest(bench)

    def cut(one: Rollout) -> Rollout:
        spans = (VersionSpan(Version(NEWEST), 1),)
        return Rollout(
            one.group_id,
            one.index,
            one.token_ids[:1],
            one.logprobs[:1],
            one.raw_logprobs[:1],
            spans,
            FinishReason.LENGTH,
        )

    return lambda group: [cut(one) for one in make(group)]


def dishonest_tail(bench: Bench) -> Maker:
    """Honest up to a change of versions; what stands behind it is sampled by numbers of its own, with honest log-probabilities."""
    first, second = engine_of(bench, PREVIOUS), engine_of(bench, NEWEST)
    cut = TOKENS // 3

    def tail(group: int) -> list[Rollout]:
        numbers = leased_numbers(group)
        numbers[:, cut:] = own_numbers(group)[:, cut:]
        return sampled([(first, PREVIOUS, cut), (second, NEWEST, TOKENS - cut)], group, numbers)

    return tail


def cut_short(bench: Bench) -> Maker:
    """Ends its completions after a third with the stop token, with the honest log-probability of that token there."""
    engine = engine_of(bench, NEWEST)

    def cut(one: Rollout) -> Rollout:
        tokens = [*[token for token in one.token_ids if token != STOP][: TOKENS // 3], STOP]
        given = Rollout(one.group_id, one.index, tuple(tokens), (0.0,) * len(tokens), (0.0,) * len(tokens),
                        (VersionSpan(Version(NEWEST), len(tokens)),), FinishReason.STOP)  # fmt: skip
        return recomputed(bench, engine, given, NEWEST)

    return lambda group: [cut(one) for one in sampled([(engine, NEWEST, TOKENS)], group, leased_numbers(group))]


def copied(bench: Bench) -> Maker:
    """Hands one completion in for all siblings."""
    make = honest(bench)

    def all_alike(group: int) -> list[Rollout]:
        first = make(group)[0]
        return [
            rollout_of(group, n, list(first.token_ids), list(first.logprobs), [NEWEST] * TOKENS)
            for n in range(SIBLINGS)
        ]

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
