"""Rollouts, groups and batches made by hand, and a trainer for them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.config.run import RunConfig
from echo2.learner.rollouts.groups import Insertion, SentTokens, TrainGroup
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.trainer import Trainer

WORKER = PeerId("w")
Spans = Sequence[tuple[int, int]]  # versions, and how many tokens each sampled
RESOLVED: dict[str, Any] = {"loss": "dapo", "token_budget": 16_384, "gradient_checkpointing": False}
"""What rules make of "auto"."""


def rollout_of(
    tokens: Sequence[int], index: int = 0, *, name: str = "g", spans: Spans | None = None, logprobs: Sequence[float] = (),
    reason: FinishReason = FinishReason.STOP,
) -> Rollout:  # fmt: skip
    """Of version 0 unless `spans` say otherwise; both log-probabilities of a token are the same, by default -1."""
    spans = [(0, len(tokens))] if spans is None else spans
    told = tuple(VersionSpan(Version(version), count) for version, count in spans)
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


def groups_config(
    bound: int = 2, rollouts_per_step: int = 4, n: int = 2, *, drops: bool = False, is_driven: bool = False
) -> RunConfig:
    learner = {"prompts_per_step": rollouts_per_step // n, "rollouts_per_prompt": n, "drop_equal_groups": drops}
    agent = {"listen": "127.0.0.1:0"} if is_driven else {}
    return RunConfig.model_validate({"staleness": {"bound": bound}, "learner": learner, "agent": agent})


def config_of(
    path: Path | str, weights_dtype: str = "bfloat16", *, lora_rank: int = 0, supervised_steps: int = 0, **learner: Any
) -> RunConfig:
    """`learner`: options of that section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "weights_dtype": weights_dtype, "lora_rank": lora_rank},
        "learner": RESOLVED | {"device": "cpu", "lr": 1e-3, "steps": 100} | learner,
    }
    if supervised_steps:
        sections["sft"] = {"path": "not read", "steps": supervised_steps}
    return RunConfig.model_validate(sections)


def new_trainer(path: Path | str, weights_dtype: str = "bfloat16", temperature: float = 1.0, **given: Any) -> Trainer:
    """`given`: the trainer's own `row_tokens`, `grad_clip` and `nonfinite_steps_max`, and what `config_of` takes."""
    row_tokens = given.pop("row_tokens", 0)
    limits = {name: given.pop(name) for name in ("grad_clip", "nonfinite_steps_max") if name in given}
    config = config_of(path, weights_dtype, **given)
    torch.manual_seed(0)  # draws the adapter
    model = PolicyModel(
        str(path), weights_dtype, torch.device("cpu"), temperature, lora_rank=config.model.lora_rank,
        replays_routing=config.learner.replay_routing, masters_on_host=config.learner.optimizer_state == "host",
    )  # fmt: skip
    trainer = Trainer(model, config, row_tokens=row_tokens)
    for name, value in limits.items():
        setattr(trainer, name, value)
    return trainer
