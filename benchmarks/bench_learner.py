"""The training step against TRL's GRPOTrainer: tokens per second and peak memory, same model, batch, precision, CPU.

Both sides make the same step on the same rollouts: forward, dapo loss, backward, clip, AdamW, in float32. TRL gets its
own micro-batches of padded rows, in an order that suits it (as they come); ours packs. Each side runs in a process of
its own, in turn, twice; the better round counts. TRL is looked for in this interpreter, else in $TRL_PYTHON. Long prompts are
also laid out in rows of four times the model's width, which share no prompt there: what sharing brings.

A third part measures what publishing costs the training: windows of `KAPPA` steps, in turn with a version leaving at the
window's start (copied between two steps, then diffed and encoded in a thread beside them, as in the learner) and without.

    TRL_PYTHON=... python -m benchmarks.bench_learner [--threads 1] [--steps 5]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo2.learner.rollouts.groups import Batch
    from echo2.learner.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "learner.json"
TARGET_COLLATION_PERCENT = 5.0
TARGET_RATIO = 1.5
TARGET_OVERHEAD_PERCENT = 3.0
TARGET_SHARED = 4.0
KAPPA = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch. Completion lengths: geometric with `mean`, cut at `longest`, as sampling gives them."""

    name: str
    hidden: int
    layers: int
    prompt: int
    mean: int
    longest: int
    groups: int
    rollouts_per_group: int
    micro_rows: int
    token_budget: int
    windows: int  # with and without publishing, each; 0: not measured
    steps_max: int = 100  # of long prompts few: one takes TRL most of a minute


SHAPES = (
    Shape("sort digits, 108k parameters", 64, 2, 6, 6, 6, 24, 8, 192, 4096, 12),
    Shape("long tail, 1.2M parameters", 128, 4, 64, 48, 256, 8, 8, 16, 5120, 2),
    Shape("equal lengths, 1.2M parameters", 128, 4, 64, 192, 192, 4, 8, 16, 5120, 0),
    Shape("long prompts, 2.5M parameters", 192, 4, 2048, 128, 128, 1, 16, 2, 4096, 0, 2),
)


def make_model(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_batch(shape: Shape, model: Path) -> dict[str, Any]:
    rng = random.Random(5)
    prompts, completions = [], []
    for _ in range(shape.groups):
        prompt = [rng.randrange(2, 1024) for _ in range(shape.prompt)]
        for _ in range(shape.rollouts_per_group):
            length = shape.longest if shape.mean == shape.longest else 1 + int(rng.expovariate(1 / shape.mean))
            prompts.append(prompt)
            completions.append([rng.randrange(2, 1024) for _ in range(min(length, shape.longest))])
    return {
        "model": str(model),
        "prompts": prompts,
        "completions": completions,
        "logprobs": [[-6.9] * len(c) for c in completions],
        "advantages": [rng.gauss(0, 1) for _ in completions],
        "rollouts_per_group": shape.rollouts_per_group,
        "longest": shape.longest,
        "micro_rows": shape.micro_rows,
        "token_budget": shape.token_budget,
    }


def trainer_and_batch(path: Path, threads: int) -> tuple[Trainer, Batch]:
    import torch

    from echo2.base.ids import GroupId, Step, Version
    from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
    from echo2.config.run import RunConfig
    from echo2.learner.rollouts.groups import Batch, TrainGroup
    from echo2.learner.training.model import PolicyModel
    from echo2.learner.training.trainer import Trainer

    torch.set_num_threads(threads)
    data = json.loads(path.read_text())
    n = data["rollouts_per_group"]
    groups = []
    for first in range(0, len(data["completions"]), n):
        group_id = GroupId(f"g{first}")
        rollouts = []
        for index in range(n):
            tokens, logprobs = tuple(data["completions"][first + index]), tuple(data["logprobs"][first + index])
            spans = (VersionSpan(Version(0), len(tokens)),)
            rollouts.append(Rollout(group_id, index, tokens, logprobs, logprobs, spans, FinishReason.STOP))
        sampling = SamplingParams(max_new_tokens=data["longest"])
        spec = GroupSpec(group_id, tuple(data["prompts"][first]), n, sampling, 0)
        rewards = tuple(data["advantages"][first : first + n])
        groups.append(TrainGroup(spec, first, tuple(rollouts), rewards))
    learner = {"steps": 1000, "lr": 1e-3, "loss": "dapo", "token_budget": data["token_budget"]}
    config = RunConfig.model_validate({"learner": learner | {"gradient_checkpointing": False}})
    trainer = Trainer(
        PolicyModel(data["model"], "float32", torch.device("cpu"), 1.0), config, threads, data.get("row_tokens", 0)
    )
    return trainer, Batch(Step(0), tuple(groups))


def run_ours(path: Path, steps: int, threads: int) -> None:
    """In a process of its own: prints seconds of each step and the peak of its memory."""
    trainer, batch = trainer_and_batch(path, threads)
    seconds, loads, positions = [], [], 0
    for _ in range(steps + 1):
        began = time.perf_counter()
        result = trainer.step(batch)
        positions = result.positions
        seconds.append(time.perf_counter() - began)
        loads.append(result.phases_s["load"])
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds[1:], "loads": loads[1:], "peak_kb": peak_kb, "positions": positions}))


def run_publishing(path: Path, windows: int, threads: int) -> None:
    """In a process of its own: prints the seconds of windows without and with a version on its way out."""
    from echo2.base.ids import Version
    from echo2.weights import CodecSetting, DeltaHeader, HostWeights, encode_delta

    trainer, batch = trainer_and_batch(path, threads)
    newest = HostWeights.from_tensors(trainer.model.snapshot(), Version(0), 1, copy=False)
    trainer.step(batch)
    without: list[float] = []
    publishing: list[float] = []
    copied: list[float] = []
    encoded: list[float] = []

    def encode(parent: HostWeights, target: HostWeights) -> None:
        began = time.perf_counter()
        header = DeltaHeader(target_version=target.version or Version(0), parent_version=parent.version,
                             parent_fingerprint=parent.fingerprint(), fingerprint_key=1, setting=CodecSetting.FAST)  # fmt: skip
        b"".join(encode_delta(parent.tensors(), target.tensors(), header))
        encoded.append(time.perf_counter() - began)

    encode(newest, newest)  # kernels are compiled once a process
    encoded.clear()
    for number in range(1, 2 * windows + 1):
        began = time.perf_counter()
        thread = None
        if number % 2 == 0:
            target = HostWeights.from_tensors(trainer.model.snapshot(), Version(number), 1, copy=False)
            copied.append(time.perf_counter() - began)
            thread = threading.Thread(target=encode, args=(newest, target))
            thread.start()
            newest = target
        for _ in range(KAPPA):
            trainer.step(batch)
        (publishing if number % 2 == 0 else without).append(time.perf_counter() - began)
        if thread is not None:
            thread.join()
    print(json.dumps({"without": without, "publishing": publishing, "copied": copied, "encoded": encoded}))


def publication_rows(shape: Shape, path: Path, windows: int, threads: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.bench_learner", "--publishing", str(path), str(windows), str(threads)]
    found = {name: statistics.median(values) for name, values in child(command).items()}
    percent = 100 * (found["publishing"] / found["without"] - 1)
    copy_percent = 100 * found["copied"] / found["without"]
    return [
        {"name": f"{shape.name}: publishing, share of step time", "value": percent, "unit": "%",
         "target": TARGET_OVERHEAD_PERCENT, "better": "lower"},
        {"name": f"{shape.name}: of it the copy between two steps", "value": copy_percent, "unit": "%",
         "target": None, "better": "lower"},
        {"name": f"{shape.name}: diff and encode, beside the steps", "value": found["encoded"], "unit": "s",
         "target": None, "better": "lower"},
    ]  # fmt: skip


def trl_python() -> str | None:
    if importlib.util.find_spec("trl") is not None:
        return sys.executable
    return os.environ.get("TRL_PYTHON")


def child(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} {command[1]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def compare(shape: Shape, steps: int, threads: int, python: str | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", shape)
        path = folder / "batch.json"
        batch = make_batch(shape, folder / "model")
        path.write_text(json.dumps(batch))
        tokens = sum(len(c) for c in batch["completions"])
        published = publication_rows(shape, path, shape.windows, threads) if shape.windows else []
        numbers = [str(path), str(min(steps, shape.steps_max)), str(threads)]
        short = folder / "short.json"
        short.write_text(json.dumps(batch | {"row_tokens": 4 * shape.hidden}))
        ours, theirs, unshared = [], [], []
        for _ in range(2):
            if shape.prompt > 4 * shape.hidden:
                at = [str(short), *numbers[1:]]
                unshared.append(child([sys.executable, "-m", "benchmarks.bench_learner", "--child", *at]))
            ours.append(child([sys.executable, "-m", "benchmarks.bench_learner", "--child", *numbers]))
            if python is not None:
                theirs.append(child([python, str(Path(__file__).parent / "trl_step.py"), *numbers]))
    our_rate = tokens / min(statistics.median(run["seconds"]) for run in ours)
    our_mb = min(run["peak_kb"] for run in ours) / 1000
    row = {"name": f"{shape.name}: tokens/s", "value": our_rate, "unit": "tokens/s", "target": None, "better": "higher"}
    memory = {"name": f"{shape.name}: peak memory", "value": our_mb, "unit": "MB", "target": None, "better": "lower"}
    padded = len(batch["completions"]) * (shape.prompt + max(map(len, batch["completions"])))
    share = ours[0]["positions"] / padded
    rows = [row, memory]
    waited = min(100 * statistics.median(run["loads"]) / statistics.median(run["seconds"]) for run in ours)
    rows.append({"name": f"{shape.name}: laying out micro-batches, share of the step", "value": waited, "unit": "%",
                 "target": TARGET_COLLATION_PERCENT, "better": "lower"})  # fmt: skip
    rows.append({"name": f"{shape.name}: positions, packed over padded", "value": share, "unit": "", "target": None,
                 "better": "lower"})  # fmt: skip
    if unshared:
        before = tokens / min(statistics.median(run["seconds"]) for run in unshared)
        rows.append({"name": f"{shape.name}: tokens/s, prompt shared over not shared", "value": our_rate / before, "unit": "x",
                     "target": TARGET_SHARED, "better": "higher"})  # fmt: skip
    if theirs:
        their_rate = tokens / min(statistics.median(run["seconds"]) for run in theirs)
        their_mb = min(run["peak_kb"] for run in theirs) / 1000
        rows.append({"name": f"{shape.name}: TRL tokens/s", "value": their_rate, "unit": "tokens/s", "target": None,
                     "better": "higher"})  # fmt: skip
        rows.append({"name": f"{shape.name}: tokens/s, ours over TRL", "value": our_rate / their_rate, "unit": "x",
                     "target": TARGET_RATIO, "better": "higher"})  # fmt: skip
        rows.append({"name": f"{shape.name}: peak memory, ours over TRL", "value": our_mb / their_mb, "unit": "x",
                     "target": 1.0, "better": "lower"})  # fmt: skip
    return rows + published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--child", nargs=3, metavar=("BATCH", "STEPS", "THREADS"))
    parser.add_argument("--publishing", nargs=3, metavar=("BATCH", "WINDOWS", "THREADS"))
    arguments = parser.parse_args()
    if arguments.publishing:
        run_publishing(Path(arguments.publishing[0]), int(arguments.publishing[1]), int(arguments.publishing[2]))
        return
    if arguments.child:
        run_ours(Path(arguments.child[0]), int(arguments.child[1]), int(arguments.child[2]))
        return
    python = trl_python()
    if python is None:
        print("TRL is not installed and TRL_PYTHON is not set: ours alone")
    rows = [row for shape in SHAPES for row in compare(shape, arguments.steps, arguments.threads, python)]
    for row in rows:
        target = "" if row["target"] is None else f"(target {row['target']:g})"
        print(f"{row['name']:<62} {row['value']:>12.2f} {row['unit']:<9} {target}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
