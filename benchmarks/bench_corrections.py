"""How much staleness each correction bears: reward after training when every rollout is exactly S steps old.

One process stands in for the whole system: a model of about 21,000 parameters learns to sort three digits from a start
that knows the format only, sampling from a copy of itself that is S optimiser steps behind. Weights are bf16 values for
sampling and training, masters float32, as in a real run. The learning rate is two thousand times that of a large model,
so staleness bites early: read the table for the order of the methods, not for the S that a large model bears.

    python -m benchmarks.bench_corrections              # 10 methods, S = 0 2 4 8 16, 3 seeds: a quarter of an hour on two cores
    python -m benchmarks.bench_corrections --quick      # 3 methods, S = 0 4, 1 seed: under a minute
    python -m benchmarks.bench_corrections --seconds 200  # begins no run after 200 s; the next call goes on from there

Finished runs are kept in results/corrections_runs.jsonl, so that an interrupted benchmark goes on where it stopped. Table,
plot and results/corrections.json are written once every run is there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from echo2.base.rng import derived_rng, derived_seed
from echo2.learner.training.loss import (
    BatchTotals,
    LossConfig,
    PackedTokens,
    Segments,
    group_advantages,
    learning_rate_scale,
    loss_metrics,
    minimum_variance_weights,
    policy_loss,
    score_norm_sq_proxy,
)
from echo2.learner.training.scoring import cache_name
from echo2.tasks.built_in import ALPHABET, SortDigits, format_only_target
from echo2.tasks.split import TaskSplit

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parents[1] / "docs" / "corrections.svg"
END = len(ALPHABET)
TASK = SortDigits(3)
PROMPT_TOKENS, COMPLETION_TOKENS = 4, 5
PROMPTS, ROLLOUTS = 12, 8
HELD_OUT = 256
LEARNING_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Method:
    """One line of the table."""

    loss: LossConfig
    advantage: str = "grpo"
    scales_learning_rate: bool = False


METHODS: Mapping[str, Method] = {
    "behaviour": Method(LossConfig()),
    # What `behaviour` is without its clip.
    "unclipped": Method(LossConfig(clip_low=1.0, clip_high=1e9)),
    "tis_token": Method(LossConfig(correction="tis_token")),
    "tis_sequence": Method(LossConfig(correction="tis_sequence")),
    "decoupled": Method(LossConfig(correction="decoupled")),
    "gspo": Method(LossConfig("gspo")),
    "gspo + luspo": Method(LossConfig("luspo")),  # what echo2 takes by itself where S is above 4
    "cispo": Method(LossConfig("cispo", clip_high=4.0)),
    "m2po": Method(LossConfig("m2po")),
    "vcpo": Method(LossConfig(correction="tis_sequence"), advantage="vcpo", scales_learning_rate=True),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a method at a staleness with a seed."""

    method: str
    staleness: int
    seed: int
    steps: int

    @property
    def key(self) -> str:
        return f"{self.method} S={self.staleness} seed={self.seed} steps={self.steps}"


@dataclass(frozen=True, slots=True)
class Samples:
    """B rollouts of equal prompt length: all tokens, and of the completions log-probabilities and mask."""

    tokens_BL: Tensor
    logprobs_BC: Tensor
    mask_BC: Tensor


def tiny_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(derived_seed(seed, "model"))
    config = Qwen3Config(
        vocab_size=END + 1, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def encoded(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text]


@functools.cache
def warmed_up(seed: int) -> PreTrainedModel:
    """Knows the format: the prompt's digits in any order, then the end. Made once a process and seed."""
    model, rng = tiny_model(seed), derived_rng(seed, "warm-up")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(120):
        instances = [TASK.sample(rng.randrange(TASK.size)) for _ in range(64)]
        rows = [[*encoded(str(i.prompt) + format_only_target(i, rng)), END] for i in instances]
        tokens_BL = torch.tensor(rows)
        logits_BCV = model(input_ids=tokens_BL, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits_BCV.flatten(0, 1), tokens_BL[:, PROMPT_TOKENS:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@torch.no_grad()
def sampled(model: PreTrainedModel, prompts_BP: Tensor, generator: torch.Generator) -> Samples:
    tokens_BL, ended_B = prompts_BP, torch.zeros(len(prompts_BP), dtype=torch.bool)
    logprobs, mask, cache, unread_BL = [], [], None, prompts_BP
    for _ in range(COMPLETION_TOKENS):
        done = model(input_ids=unread_BL, use_cache=True, logits_to_keep=1, **{cache_name(): cache})
        logprobs_BV, cache = done.logits[:, -1].log_softmax(-1), done[cache_name()]
        chosen_B1 = unread_BL = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        logprobs.append(logprobs_BV.gather(1, chosen_B1)[:, 0])
        mask.append(~ended_B)
        ended_B = ended_B | (chosen_B1[:, 0] == END)
        tokens_BL = torch.cat([tokens_BL, chosen_B1], 1)
    return Samples(tokens_BL, torch.stack(logprobs, 1), torch.stack(mask, 1))


def rewards_of(samples: Samples, indices: Iterable[int]) -> list[float]:
    rewards = []
    for index, row, kept in zip(indices, samples.tokens_BL.tolist(), samples.mask_BC.tolist(), strict=True):
        tokens = [token for token, is_kept in zip(row[PROMPT_TOKENS:], kept, strict=True) if is_kept]
        # A completion that did not end is one character too long to be right.
        text = "".join("." if token == END else ALPHABET[token] for token in tokens)
        rewards.append(TASK.score(TASK.sample(index), text.removesuffix(".")).value)
    return rewards


class Learner:
    """Policy in bf16 values, masters in float32, one optimiser step a batch."""

    def __init__(self, trial: Trial):
        self.method = METHODS[trial.method]
        self.model = copy.deepcopy(warmed_up(trial.seed))
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.optimiser = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        self._round()

    def step(self, samples: Samples, rewards: list[float]) -> None:
        logits_BCV = self.model(input_ids=samples.tokens_BL, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
        chosen_BC1 = samples.tokens_BL[:, PROMPT_TOKENS:, None]
        logprobs_T = logits_BCV.log_softmax(-1).gather(2, chosen_BC1).flatten()
        mask_T, behaviour_T = samples.mask_BC.flatten(), samples.logprobs_BC.flatten()
        count = len(rewards)
        sequence_T = torch.arange(count).repeat_interleave(COMPLETION_TOKENS)
        segments = Segments(sequence_T, mask_T, count)
        weight_R = minimum_variance_weights(
            segments.sum_R(logprobs_T.detach() - behaviour_T), score_norm_sq_proxy(logprobs_T, segments)
        )
        group_R = torch.arange(count) // ROLLOUTS
        advantages = group_advantages(torch.tensor(rewards), group_R, self.method.advantage, weight_R)
        tokens = PackedTokens(logprobs_T, behaviour_T, advantages.values_R, sequence_T, mask_T)
        loss = policy_loss(tokens, self.method.loss, BatchTotals(int(mask_T.sum()), count, COMPLETION_TOKENS))
        for master, gradient in zip(
            self.masters, torch.autograd.grad(loss.loss, list(self.model.parameters())), strict=True
        ):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        fraction = loss_metrics(loss.sums_M, float(loss.ratio_max))["ratio/rollout_ess"]
        scale = learning_rate_scale(fraction) if self.method.scales_learning_rate else 1.0
        self.optimiser.param_groups[0]["lr"] = LEARNING_RATE * scale
        self.optimiser.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master.bfloat16())


def run(trial: Trial) -> float:
    """Held-out reward at temperature 1 after training."""
    torch.set_num_threads(1)
    learner = Learner(trial)
    generator = torch.Generator().manual_seed(derived_seed(trial.seed, "sampling"))
    split = TaskSplit(TASK.size, HELD_OUT, trial.seed)
    behind = copy.deepcopy(learner.model)
    kept = {0: copy.deepcopy(learner.model.state_dict())}
    for step in range(trial.steps):
        behind.load_state_dict(kept[max(0, step - trial.staleness)])
        indices = [split.train_index(step * PROMPTS + place) for place in range(PROMPTS) for _ in range(ROLLOUTS)]
        samples = sampled(behind, prompts_of(indices), generator)
        learner.step(samples, rewards_of(samples, indices))
        kept[step + 1] = copy.deepcopy(learner.model.state_dict())
        kept.pop(step - trial.staleness, None)
    held_out = [split.held_out_index(position) for position in range(HELD_OUT)]
    return statistics.fmean(rewards_of(sampled(learner.model, prompts_of(held_out), generator), held_out))


def prompts_of(indices: Iterable[int]) -> Tensor:
    return torch.tensor([encoded(str(TASK.sample(index).prompt)) for index in indices])


def run_all(trials: list[Trial], processes: int, seconds: float) -> dict[str, float]:
    """Rewards by trial, of those that were done in time; each is written down as soon as it is known."""
    began = time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    store = RESULTS / "corrections_runs.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    done: dict[str, float] = {row["run"]: row["reward"] for row in map(json.loads, lines)}
    waiting = [trial for trial in trials if trial.key not in done]
    with ProcessPoolExecutor(processes) as pool:
        running: dict[Future[float], Trial] = {}
        while running or (waiting and time.monotonic() - began < seconds):
            while waiting and len(running) < processes and time.monotonic() - began < seconds:
                trial = waiting.pop(0)
                running[pool.submit(run, trial)] = trial
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                trial = running.pop(future)
                done[trial.key] = future.result()
                with store.open("a") as file:
                    file.write(json.dumps({"run": trial.key, "reward": done[trial.key]}) + "\n")
                print(f"{trial.key}: {done[trial.key]:.3f}", flush=True)
    return {trial.key: done[trial.key] for trial in trials if trial.key in done}


def rows_of(trials: list[Trial], rewards: Mapping[str, float]) -> list[dict[str, object]]:
    found: dict[tuple[str, int], list[float]] = {}
    for trial in trials:
        found.setdefault((trial.method, trial.staleness), []).append(rewards[trial.key])
    return [
        {
            "name": f"reward {method} S={staleness}",
            "value": round(statistics.fmean(values), 4),
            "lowest": round(min(values), 4),
            "highest": round(max(values), 4),
            "unit": "reward",
            "target": None,
            "better": "higher",
        }
        for (method, staleness), values in found.items()
    ]


RECOMMENDED, LOSS_MAX = "gspo + luspo", 0.05


def loss_of_recommended(rows: list[dict[str, object]], bounds: list[int]) -> list[dict[str, object]]:
    """What the method taken for large bounds loses from no staleness to the most."""
    means = {str(row["name"]): float(str(row["value"])) for row in rows}
    first, last = (means.get(f"reward {RECOMMENDED} S={bound}") for bound in (bounds[0], bounds[-1]))
    if first is None or last is None or bounds[0] == bounds[-1]:
        return []
    return [
        {
            "name": f"reward lost by {RECOMMENDED} from S={bounds[0]} to S={bounds[-1]}",
            "value": round(first - last, 4),
            "unit": "reward",
            "target": LOSS_MAX,
            "better": "lower",
        }
    ]


def print_table(rows: list[dict[str, object]], methods: list[str], bounds: list[int]) -> None:
    cell = {str(row["name"]): row for row in rows}
    print("\n| method | " + " | ".join(f"S={s}" for s in bounds) + " |")
    print("|---|" + "---|" * len(bounds))
    for method in methods:
        cells = [cell[f"reward {method} S={s}"] for s in bounds]
        print(
            f"| {method} | "
            + " | ".join(f"{c['value']:.2f} ({c['lowest']:.2f}-{c['highest']:.2f})" for c in cells)
            + " |"
        )


def plot(rows: list[dict[str, object]], methods: list[str], bounds: list[int]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "corrections"  # the same file from the same numbers
    from matplotlib import pyplot

    cell = {str(row["name"]): row for row in rows}
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for method in methods:
        cells = [cell[f"reward {method} S={s}"] for s in bounds]
        axes.plot(range(len(bounds)), [c["value"] for c in cells], marker="o", label=method)
        axes.fill_between(range(len(bounds)), [c["lowest"] for c in cells], [c["highest"] for c in cells], alpha=0.12)
    axes.set_xticks(range(len(bounds)), [str(s) for s in bounds])
    axes.set_xlabel("age of every rollout, in optimiser steps")
    axes.set_ylabel("held-out reward after training")
    axes.set_ylim(0, 1)
    axes.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"plot: {FIGURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=86_400.0, help="begin no run later than this")
    parser.add_argument("--quick", action="store_true", help="a trial: no results file, no plot")
    options = parser.parse_args()
    if options.quick:
        options.methods, options.staleness, options.seeds = ["none", "behaviour", "tis_token"], [0, 4], 1
    trials = [
        Trial(method, staleness, seed, options.steps)
        for seed in range(options.seeds)
        for staleness in options.staleness
        for method in options.methods
    ]
    rewards = run_all(trials, options.processes, options.seconds)
    if len(rewards) < len(trials):
        print(f"{len(rewards)} of {len(trials)} runs done; the same command goes on from there")
        return
    rows = rows_of(trials, rewards)
    print_table(rows, options.methods, options.staleness)
    lost = loss_of_recommended(rows, options.staleness)
    for row in lost:
        print(f"\n{row['name']}: {row['value']} (target: at most {row['target']})")
    if not options.quick:
        (RESULTS / "corrections.json").write_text(json.dumps(rows + lost, indent=1) + "\n")
        plot(rows, options.methods, options.staleness)


if __name__ == "__main__":
    main()
