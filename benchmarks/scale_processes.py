"""Memory and seconds of real processes: a learner and two workers train random weights of a real model's shape for two steps.

    python -m benchmarks.scale_processes MODEL      prints what it found as one JSON line

Peaks are the kernel's (VmHWM), of all memory that a process maps, with what it shares with others of this machine. Of WAYS the
first is taken for which the memory that the sizing rule asks for is free, and the line says which; where none fits, nothing is
started, and the line says what is missing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench_scale import PROMPT, SEQUENCES, TOKENS, config_of
from echo2.cost_model.sizing import (
    CPU_PROCESS_BYTES,
    PROCESS_BYTES,
    LearnerRun,
    Quantisation,
    checkpointing_of,
    learner_memory,
    model_size,
)
from tests.e2e.cluster import Cluster, small_run

STEPS, WITHIN_S = 2, 850.0
SPARE_BYTES = 2 << 30
"""Left to whoever else is on this machine."""


@dataclass(frozen=True)
class Way:
    """How the two steps are run: `rank` 0 trains all weights, else an adapter of that rank over a base from the disk."""

    told: str
    workers: int
    prompts: int
    rollouts: int
    budget: int
    is_checkpointed: bool = False
    rank: int = 0

    @property
    def options(self) -> str:
        return f"""
correction = "behaviour"
token_budget = {self.budget}
gradient_checkpointing = {str(self.is_checkpointed).lower()}
[worker]
slots = {SEQUENCES}
"""


WAYS = {
    "smollm2-135m": [Way("all weights, 64 rollouts a step", 2, 8, 8, 1024)],
    "qwen3-0.6b": [
        Way("all weights, 8 rollouts a step", 2, 2, 4, 1024),
        Way("an adapter of rank 8 over the base, checkpointed, 8 rollouts a step", 2, 2, 4, 512, True, 8),
    ],
}


@dataclass
class Needed:
    """Bytes of memory, by the sizing rule."""

    learner: int
    worker: int
    together: int


@dataclass
class Found:
    """Peaks in bytes, by process."""

    peaks: dict[str, int] = field(default_factory=dict)

    def look(self, cluster: Cluster) -> None:
        for name, process in cluster.processes.items():
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            if "VmHWM:" in text:
                peak = int(text.split("VmHWM:")[1].split()[0]) << 10
                self.peaks[name] = max(peak, self.peaks.get(name, 0))


def needed_by(model: str, way: Way) -> Needed:
    size = model_size(config_of(model))
    keeps = checkpointing_of(way.is_checkpointed, size, way.budget, 4)
    found = learner_memory(size, way.budget, keeps, gpu_count=0, run=LearnerRun(adapter_rank=way.rank))
    learner = found.device_bytes + PROCESS_BYTES
    cache = Quantisation.NONE.cpu_bytes * size.kv_values_per_token * SEQUENCES * TOKENS
    worker = (Quantisation.NONE.cpu_bytes + 2) * size.parameters + cache + CPU_PROCESS_BYTES
    return Needed(learner, worker, learner + way.workers * worker)


def free_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


def make_model(folder: Path, model: str) -> None:
    """Random weights in bf16 and a tokenizer of characters, whose ids are the first ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from echo2.cli.demo.model import _save_tokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(model))
    _save_tokenizer(folder)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)


def measured(model: str) -> dict[str, object]:
    free, ways = free_bytes(), WAYS[model]
    way = next((one for one in ways if needed_by(model, one).together + SPARE_BYTES <= free), None)
    needed = needed_by(model, way or ways[-1])
    told: dict[str, object] = {
        "needed": {"learner": needed.learner, "worker": needed.worker, "together": needed.together},
        "way": (way or ways[-1]).told, "workers": (way or ways[-1]).workers, "rank": (way or ways[-1]).rank,
        "missed": [f"{one.told}: {needed_by(model, one).together / 1e9:.1f} GB" for one in ways[: ways.index(way)]] if way else [],
    }  # fmt: skip
    if way is None:
        return told | {"missing": needed.together + SPARE_BYTES - free, "free": free}
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCALE_FOLDER")) as name:
        folder, found = Path(name), Found()
        maker = os.fork()  # what made the model is not to weigh on what is measured
        if not maker:
            make_model(folder / "model", model)
            os._exit(0)
        assert os.waitpid(maker, 0)[1] == 0, "the model was made"
        config = small_run(
            folder, folder / "model", steps=STEPS, prompts=way.prompts, rollouts=way.rollouts, eval_prompts=0
        )
        config = config.replace(
            "max_new_tokens = 7", f"max_new_tokens = {TOKENS - PROMPT}\nmax_prompt_tokens = {PROMPT}"
        )
        config = config.replace('correction = "behaviour"\n', "") + way.options
        if way.rank:
            config = config.replace("[model]\n", f"[model]\nlora_rank = {way.rank}\n")
        with Cluster(folder, config, way.workers) as cluster:
            began = time.monotonic()
            cluster.start_all()

            def has_ended() -> bool:
                found.look(cluster)
                return cluster.processes["learner"].poll() is not None

            cluster.wait_until(has_ended, WITHIN_S, f"{STEPS} steps")
            wall_s = time.monotonic() - began
            steps = [row["step"] for row in cluster.metrics()]
    return told | {"peaks": found.peaks, "wall_s": wall_s, "steps": max(steps, default=0), "load": os.getloadavg()[0]}


def main() -> None:
    print(json.dumps(measured(sys.argv[1])))


if __name__ == "__main__":
    main()
