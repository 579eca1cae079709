"""TRL's side of bench_learner, in whatever environment has TRL: the loss, backward pass and optimiser step of its
GRPOTrainer on a given batch. Imports nothing of echo2.

    python benchmarks/trl_step.py BATCH.json STEPS THREADS     -> one line of JSON
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def padded(rows: list[list[float]], width: int, left: bool, dtype: torch.dtype) -> torch.Tensor:
    full = [([0] * (width - len(r)) + r) if left else (r + [0] * (width - len(r))) for r in rows]
    return torch.tensor(full, dtype=dtype)


def trainer_for(data: dict[str, Any], micro_rows: int, folder: str) -> GRPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(data["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(data["model"])
    args = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=micro_rows, num_generations=data["rollouts_per_group"],
        gradient_accumulation_steps=len(data["completions"]) // micro_rows, max_completion_length=data["longest"],
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="dapo", beta=0.0,
        learning_rate=1e-3, max_grad_norm=1.0, adam_beta2=0.99,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=args, reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=tokenizer, train_dataset=Dataset.from_list([{"prompt": "1"}] * len(data["completions"])),
    )  # fmt: skip


def inputs_of(data: dict[str, Any]) -> dict[str, torch.Tensor]:
    prompts, completions = data["prompts"], data["completions"]
    wide, long = max(map(len, prompts)), max(map(len, completions))
    ones = [[1] * len(p) for p in prompts]
    return {
        "prompt_ids": padded(prompts, wide, True, torch.long),
        "prompt_mask": padded(ones, wide, True, torch.long),
        "completion_ids": padded(completions, long, False, torch.long),
        "completion_mask": padded([[1] * len(c) for c in completions], long, False, torch.long),
        "advantages": torch.tensor(data["advantages"]),
        "old_per_token_logps": padded(data["logprobs"], long, False, torch.float32),
    }


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    steps, threads = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    rows = len(data["completions"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(data, data["micro_rows"], folder)
        trainer.create_optimizer()
        model, optimizer = trainer.model, trainer.optimizer
        assert optimizer is not None
        model.train()
        trainer.current_gradient_accumulation_steps = rows // data["micro_rows"]
        whole = inputs_of(data)
        tokens = whole["completion_mask"].sum()
        seconds = []
        for _ in range(steps + 1):
            began = time.perf_counter()
            for start in range(0, rows, data["micro_rows"]):
                part = {k: v[start : start + data["micro_rows"]] for k, v in whole.items()}
                part["num_items_in_batch"] = tokens
                trainer._compute_loss(model, part).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[1:], "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


if __name__ == "__main__":
    main()
