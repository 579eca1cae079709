"""TRL's GRPOTrainer on a fleet that `echo2 serve` serves: tokens and weights by HTTP, nothing of echo2 in this process.

With workers joined to `echo2 serve run.toml`, in an environment with `trl` and `httpx`:

    python examples/trl_door.py MODEL runs/NAME/learner

TRL takes what its rollout hook returns for on-policy samples, so each call asks for the version that it has just published.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

GROUP, STEPS, NEW_TOKENS = 8, 20, 7


class Door:
    """`GRPOTrainer(rollout_func=…)`: the weights after the last step out, their tokens in."""

    def __init__(self, learner: Path, tokenizer: Any, weights: Path) -> None:
        url, key = ((learner / name).read_text().strip() for name in ("gateway.url", "gateway.key"))
        self.client = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600, trust_env=False
        )
        self.tokenizer, self.weights = tokenizer, weights.resolve()

    def publish(self, trainer: GRPOTrainer, *, is_last: bool = False) -> None:
        version = trainer.state.global_step
        folder = self.weights / f"step-{version}"
        trainer.model.save_pretrained(folder)
        body = {"version": version, "folder": str(folder), "is_last": is_last}
        self.client.post("/v1/versions", json=body).raise_for_status()

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        if trainer.state.global_step:
            self.publish(trainer)
        sampling = {"n": GROUP, "temperature": 1.0, "max_tokens": NEW_TOKENS, "logprobs": 1}

        def ask(prompt: str) -> tuple[list[int], list[dict[str, Any]]]:
            token_ids = self.tokenizer(prompt)["input_ids"]
            body = {"token_ids": token_ids, "sampling_params": sampling, "exact_version": trainer.state.global_step}
            answer = self.client.post("/inference/v1/generate", json=body)
            return token_ids, answer.raise_for_status().json()["choices"]

        with ThreadPoolExecutor(len(prompts)) as threads:  # the trainer names each prompt once for each completion
            told = [(ids, choice) for ids, choices in threads.map(ask, prompts[::GROUP]) for choice in choices]
        return {
            "prompt_ids": [ids for ids, _ in told],
            "completion_ids": [choice["token_ids"] for _, choice in told],
            "logprobs": [[entry["logprob"] for entry in choice["logprobs"]["content"]] for _, choice in told],
        }


def sorted_digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The part of the digits that stands where it belongs."""
    pairs = [
        ("".join(sorted(prompt[:-1])), completion) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return [sum(a == b for a, b in zip(want, got, strict=False)) / max(len(want), len(got)) for want, got in pairs]


def main() -> None:
    model, learner = sys.argv[1], Path(sys.argv[2])
    draw = random.Random(0)
    prompts = ["".join(draw.choices("0123456789", k=5)) + ">" for _ in range(512)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    door = Door(learner, tokenizer, learner / "trl")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=sorted_digits,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=door,
        args=GRPOConfig(
            output_dir=str(learner / "trl"), max_steps=STEPS, per_device_train_batch_size=12 * GROUP, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, learning_rate=1e-3, beta=0.0, logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=True,
        ),
    )  # fmt: skip
    trainer.train()
    door.publish(trainer, is_last=True)


if __name__ == "__main__":
    main()
