"""Memory and seconds of real processes: a learner and two workers train random weights of a real model's shape for two steps.

    python -m benchmarks.scale_processes MODEL      prints what it found as one JSON line

Peaks are the kernel's (VmHWM), of all memory that a process maps, with what it shares with others of this machine. Where the
memory that the sizing rule asks for is not free, nothing is started, and the line says what is missing.
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
from echo2.cost_model.memory import PROCESS_BYTES, learner_memory
from echo2.cost_model.sizing import CPU_BYTES, CPU_PROCESS_BYTES, model_size
from tests.e2e.cluster import Cluster, small_run

STEPS, WORKERS, BUDGET, WITHIN_S = 2, 2, 2048, 1500.0
OPTIONS = f"""
correction = "none"
token_budget = {BUDGET}
threads = 1
[worker]
slots = {SEQUENCES}
"""


@dataclass
class Needed:
    """Bytes of memory, by the sizing rule."""

    learner: int
    worker: int

    @property
    def together(self) -> int:
        return self.learner + WORKERS * self.worker


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


def needed_by(model: str) -> Needed:
    size = model_size(config_of(model))
    learner = learner_memory(size, BUDGET, is_checkpointed=False, gpu_count=0, checkpoints_kept=1)
    cache = CPU_BYTES * size.kv_values_per_token * SEQUENCES * TOKENS
    worker = (CPU_BYTES + 2) * size.parameters + cache + CPU_PROCESS_BYTES
    return Needed(learner.device_bytes + PROCESS_BYTES, worker)


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
    needed = needed_by(model)
    told: dict[str, object] = {"needed": {"learner": needed.learner, "worker": needed.worker}}
    if needed.together > free_bytes():
        return told | {"missing": needed.together - free_bytes(), "free": free_bytes()}
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCALE_FOLDER")) as name:
        folder, found = Path(name), Found()
        maker = os.fork()  # what made the model is not to weigh on what is measured
        if not maker:
            make_model(folder / "model", model)
            os._exit(0)
        assert os.waitpid(maker, 0)[1] == 0, "the model was made"
        config = small_run(folder, folder / "model", steps=STEPS, prompts=8, rollouts=8, eval_prompts=0)
        config = config.replace(
            "max_new_tokens = 7", f"max_new_tokens = {TOKENS - PROMPT}\nmax_prompt_tokens = {PROMPT}"
        )
        config = config.replace('correction = "behaviour"\n', "") + OPTIONS
        with Cluster(folder, config, WORKERS) as cluster:
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
