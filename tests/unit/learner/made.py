"""Rollouts, groups and batches made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.rollouts.groups import Batch, Insertion, SentTokens, TrainGroup

WORKER = PeerId("w")
Spans = Sequence[tuple[int, int]]  # versions, and how many tokens each sampled


def rollout_of(
    tokens: Sequence[int], index: int = 0, *, name: str = "g", spans: Spans | None = None, logprobs: Sequence[float] = (),
    reason: FinishReason = FinishReason.STOP,
) -> Rollout:  # fmt: skip
    """Of version 0 unless `spans` say otherwise; both log-probabilities of a token are the same, by default -1."""
    told = tuple(
        VersionSpan(Version(version), count) for version, count in ([(0, len(tokens))] if spans is None else spans)
    )
    numbers = tuple(logprobs) or (-1.0,) * len(tokens)
    return Rollout(GroupId(name), index, tuple(tokens), numbers, numbers, told, reason)


def group_of(
    prompt: Sequence[int], rollouts: Sequence[Rollout], rewards: Sequence[float] = (), *, cursor: int = 0,
    said: Sequence[Sequence[Insertion]] = (), senders: Sequence[tuple[PeerId, int]] = (), **sampling: Any,
) -> TrainGroup:  # fmt: skip
    """`senders`: of each rollout alike; without them, `WORKER` sent all."""
    spec = GroupSpec(rollouts[0].group_id, tuple(prompt), len(rollouts), SamplingParams(**sampling), 0)
    sent = [tuple(SentTokens(*one) for one in senders or [(WORKER, len(r.token_ids))]) for r in rollouts]
    return TrainGroup(
        spec, cursor, tuple(rollouts), tuple(rewards) or (0.0,) * len(rollouts), tuple(map(tuple, said)), tuple(sent)
    )


def random_groups(seed: int, count: int = 3, temperature: float = 1.0, logprob: float = -4.2) -> tuple[TrainGroup, ...]:
    rng, groups = random.Random(seed), []
    for number in range(count):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(3, 12))]
        rollouts = []
        for index in range(4):
            tokens = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 9))]
            numbers = [logprob + 0.1 * rng.random() for _ in tokens]
            rollouts.append(rollout_of(tokens, index, name=f"g{number}", logprobs=numbers))
        rewards = [rng.random() for _ in rollouts]
        groups.append(group_of(prompt, rollouts, rewards, cursor=number, temperature=temperature, max_new_tokens=16))
    return tuple(groups)


def batch_of(step: int, seed: int | None = None, count: int = 3) -> Batch:
    return Batch(Step(step), random_groups(step if seed is None else seed, count))
