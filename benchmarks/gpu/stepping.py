"""One optimiser step of the real trainer: tokens a second, share of what the device's matrix products do, both attentions,
the layout's share of a step, TRL's step on the same batch, and whether the same batches give the same bits again.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from benchmarks.gpu.setup import QWEN3_06B, QWEN3_4B, SMALL, Row, Setup, Shape, not_measured, saved_model
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.config.run import OptimizerState, RunConfig
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.packing import Attention
from echo2.learner.training.scoring import add_up_in_order, choose_attention
from echo2.learner.training.trainer import StepResult, Trainer

BYTES_PER_PARAMETER = 18
"""Weights in bf16, their gradient, and master, gradient and two moments in float32."""
TRIALS = 3
COLLATION_SHARE_MAX = 0.05
TRL_ROWS = 8
"""Padded rows of TRL's micro-batches, which multiply its logits."""
TRL_RATIO = 1.5
"""That bench_learner asks for on a CPU."""


def batch_of(trainer: Trainer, shape: Shape, groups: int, each: int, prompt: int, mean: int) -> Batch:
    """Completions of geometric length, with the log-probabilities that the policy itself gives them."""
    rng = random.Random(3)
    made = []
    for number in range(groups):
        group_id = GroupId(f"g{number}")
        rollouts = []
        for index in range(each):
            length = min(4 * mean, 1 + int(rng.expovariate(1 / mean)))
            tokens = tuple(rng.randrange(shape.vocabulary) for _ in range(length))
            none = (0.0,) * length
            spans = (VersionSpan(Version(0), length),)
            rollouts.append(Rollout(group_id, index, tokens, none, none, spans, FinishReason.STOP))
        ids = tuple(rng.randrange(shape.vocabulary) for _ in range(prompt))
        spec = GroupSpec(group_id, ids, each, SamplingParams(max_new_tokens=4 * mean), 0)
        made.append(TrainGroup(spec, number, tuple(rollouts), tuple(rng.random() for _ in rollouts)))
    exact = iter(trainer.logprobs(made))
    own = [
        replace(group, rollouts=tuple(_as_sampled(rollout, next(exact)) for rollout in group.rollouts))
        for group in made
    ]
    return Batch(Step(0), tuple(own))


def _as_sampled(rollout: Rollout, logprobs_T: torch.Tensor) -> Rollout:
    told = tuple(logprobs_T.tolist())
    return replace(rollout, logprobs=told, raw_logprobs=told)


def trainer_of(
    setup: Setup,
    shape: Shape,
    attention: Literal["auto", "dense", "flex"],
    optimizer_state: OptimizerState = "float32",
) -> Trainer:
    path = str(saved_model(shape, setup.folder))
    budget = 512 if setup.is_small else 16_384
    learner = {"steps": 1000, "optimizer_state": optimizer_state, "loss": "dapo", "token_budget": budget}
    config = RunConfig.model_validate({"learner": learner | {"gradient_checkpointing": not setup.is_small}})
    model = PolicyModel(path, "bfloat16", setup.device, 1.0, masters_on_host=optimizer_state == "host")
    if attention == "dense":
        add_up_in_order()
    else:
        choose_attention(model.policy, setup.device)
    return Trainer(model, config)


def run(setup: Setup) -> Iterator[Row]:
    for shape in (SMALL,) if setup.is_small else (QWEN3_06B, QWEN3_4B):
        wanted = BYTES_PER_PARAMETER * shape.parameters
        if wanted > 0.9 * setup.free_bytes:
            why = f"{wanted / 1e9:.0f} GB of weights and optimiser, {setup.free_bytes / 1e9:.0f} GB free"
            yield not_measured(f"{shape.name}: step", "tokens/s", why, "higher")
            continue
        yield from _rows_of(setup, shape)


def _rows_of(setup: Setup, shape: Shape) -> Iterator[Row]:
    groups = 16 if shape is QWEN3_06B else 8
    sizes = (4, 4, 24, 16) if setup.is_small else (groups, 8, 256, 512)
    batch: Batch | None = None
    rates: dict[Attention, float] = {}
    wishes: tuple[Literal["auto", "dense"], ...] = ("auto", "dense") if setup.device.type != "cpu" else ("auto",)
    for wish in wishes:
        trainer = trainer_of(setup, shape, wish)
        attention = trainer.model.policy.attention
        if attention in rates:
            yield not_measured(f"{shape.name}: step by FlexAttention", "tokens/s", "its trial failed here", "higher")
            continue
        batch = batch or batch_of(trainer, shape, *sizes)
        found: list[StepResult] = []
        seconds = setup.seconds(lambda t=trainer, b=batch, f=found: f.append(t.step(b)), TRIALS, 1)  # type: ignore[misc]
        last = found[-1]
        rates[attention] = last.sampled_tokens / seconds
        name = f"{shape.name}: step, {attention.value} attention"
        flops = trainer.model.flops_per_position * last.positions / seconds
        yield Row(name, rates[attention], "tokens/s", None, "higher")
        yield Row(f"{name}, of a matrix product's rate", flops / setup.matmul_flops(), "share", None, "higher")
        yield Row(f"{name}, waiting for the layout", _share(found[1:], "load"), "share", COLLATION_SHARE_MAX)
        if setup.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(setup.device)
            yield Row(f"{name}, peak memory a parameter", peak / shape.parameters, "bytes")
        del trainer
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setup.device)
    if len(rates) == 2:
        faster = rates[Attention.FLEX] / rates[Attention.DENSE]
        yield Row(f"{shape.name}: step, FlexAttention over dense", faster, "x", 1.0, "higher")
    assert batch is not None
    yield from _beside_trl(setup, shape, batch, max(rates.values()))
    yield _replayed(setup, shape, sizes)


def _beside_trl(setup: Setup, shape: Shape, batch: Batch, our_rate: float) -> list[Row]:
    """TRL's loss, backward pass and AdamW on the same rollouts, in padded rows."""
    name = f"{shape.name}: step, ours over TRL"
    if importlib.util.find_spec("trl") is None:
        return [not_measured(name, "x", "not installed: trl", "higher")]
    rollouts = [(group.spec, rollout, reward) for group in batch.groups
                for rollout, reward in zip(group.rollouts, group.rewards, strict=True)]  # fmt: skip
    data: dict[str, Any] = {
        "model": str(saved_model(shape, setup.folder)), "device": str(setup.device), "micro_rows": TRL_ROWS,
        "prompts": [spec.prompt_token_ids for spec, _, _ in rollouts],
        "completions": [rollout.token_ids for _, rollout, _ in rollouts],
        "logprobs": [rollout.logprobs for _, rollout, _ in rollouts],
        "advantages": [reward - 0.5 for _, _, reward in rollouts],
        "rollouts_per_group": len(batch.groups[0].rollouts),
        "longest": max(len(rollout.token_ids) for _, rollout, _ in rollouts),
    }  # fmt: skip
    path = setup.folder / "trl.json"
    path.write_text(json.dumps(data))
    command = [sys.executable, "-m", "benchmarks.trl_step", str(path), "2", str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [not_measured(name, "x", f"TRL failed: {done.stderr.strip().splitlines()[-1]}", "higher")]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    their_rate = sum(len(tokens) for tokens in data["completions"]) / statistics.median(found["seconds"])
    rows = [
        Row(f"{shape.name}: TRL's step", their_rate, "tokens/s", None, "higher"),
        Row(name, our_rate / their_rate, "x", None if setup.is_small else TRL_RATIO, "higher"),
    ]
    if found["device_bytes"]:
        rows.append(
            Row(f"{shape.name}: TRL's step, peak memory a parameter", found["device_bytes"] / shape.parameters, "bytes")
        )
    return rows


def _share(results: list[StepResult], phase: str) -> float:
    return sum(r.phases_s.get(phase, 0.0) for r in results) / sum(sum(r.phases_s.values()) for r in results)


def _replayed(setup: Setup, shape: Shape, sizes: tuple[int, int, int, int]) -> Row:
    """1 where a learner that is started again and trains the recorded batches has the bits that it had."""
    name = f"{shape.name}: two steps trained again give the same bits"
    if setup.device.type == "cuda" and shape is not QWEN3_06B:
        return not_measured(name, "", "tried at 0.6B", "higher")
    ends: list[dict[str, torch.Tensor]] = []
    batch: Batch | None = None
    for _ in range(2):
        trainer = trainer_of(setup, shape, "auto")
        batch = batch or batch_of(trainer, shape, *sizes)
        for _step in range(2):
            trainer.step(batch)
        ends.append(trainer.model.snapshot())
        del trainer
    same = all(torch.equal(ends[0][key].view(torch.int16), ends[1][key].view(torch.int16)) for key in ends[0])
    return Row(name, float(same), "", None, "higher")
