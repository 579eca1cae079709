"""TRL's side of bench_learner, in whatever environment has TRL: the loss, backward pass and optimiser step of its
GRPOTrainer on a given batch, in float32 on a CPU, in bf16 over float32 weights on a GPU. Imports nothing of echo2.

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
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def padded(rows: list[list[float]], width: int, left: bool, dtype: torch.dtype) -> torch.Tensor:
    full = [([0] * (width - len(r)) + r) if left else (r + [0] * (width - len(r))) for r in rows]
    return torch.tensor(full, dtype=dtype)


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """GRPOTrainer wants one; nothing is tokenized."""
    words = {text: number for number, text in enumerate(["<pad>", "<eos>", *"0123456789>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def trainer_for(data: dict[str, Any], micro_rows: int, folder: str, device: torch.device) -> GRPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(data["model"], dtype=torch.float32, attn_implementation="sdpa")
    on_gpu = device.type == "cuda"
    args = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=micro_rows, num_generations=data["rollouts_per_group"],
        gradient_accumulation_steps=len(data["completions"]) // micro_rows, max_completion_length=data["longest"],
        report_to=[], use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=on_gpu, loss_type="dapo", beta=0.0,
        learning_rate=1e-3, max_grad_norm=1.0, adam_beta2=0.99,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=args, reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=digits_tokenizer(), train_dataset=Dataset.from_list([{"prompt": "1"}] * len(data["completions"])),
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
        device = torch.device(data.get("device", "cpu"))
        trainer = trainer_for(data, data["micro_rows"], folder, device)
        trainer.create_optimizer()
        model, optimizer = trainer.model, trainer.optimizer
        assert optimizer is not None
        model.train()
        trainer.current_gradient_accumulation_steps = rows // data["micro_rows"]
        if device.type == "cuda":  # what the trainer's own loop does around a step
            model.to(device)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        whole = {name: tensor.to(device) for name, tensor in inputs_of(data).items()}
        tokens = whole["completion_mask"].sum()
        seconds = []
        for _ in range(steps + 1):
            began = time.perf_counter()
            for start in range(0, rows, data["micro_rows"]):
                part = {k: v[start : start + data["micro_rows"]] for k, v in whole.items()}
                part["num_items_in_batch"] = tokens
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = trainer._compute_loss(model, part)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"seconds": seconds[1:], "peak_kb": peak_kb, "device_bytes": on_device}))


if __name__ == "__main__":
    main()
