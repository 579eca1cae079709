"""Makes tests/fixtures/trl_grpo.json: what TRL's GRPOTrainer computes on one small batch under many settings.

Run by hand, in an environment of its own (`pip install trl torch`), whenever TRL changes:

    python -P tests/make_trl_fixtures.py

TRL's own code computes rewards to advantages, importance ratios, loss and gradient. Only the model's forward pass is
scripted: the log-probabilities are given numbers, so that both sides start from the same ones. Rollouts come through
TRL's `rollout_func`; the switch `use_vllm` is turned on after construction, for TRL corrects for a mismatch of the
sampler only then.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

TARGET = Path(__file__).parent / "fixtures" / "trl_grpo.json"
GROUPS, ROLLOUTS, LONGEST = 3, 4, 6
ROWS = GROUPS * ROLLOUTS
FIRST_PROMPT_TOKEN = 4


def batch() -> dict[str, Any]:
    """Ragged completions with environment tokens inside, policies that disagree enough to clip and to truncate."""
    generator = torch.Generator().manual_seed(20)
    lengths = [int(n) for n in torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)]
    lengths[0] = LONGEST
    base = -2.5 * torch.rand(ROWS, LONGEST, generator=generator) - 0.2

    def near(spread: float) -> list[list[float]]:
        noise = spread * torch.randn(ROWS, LONGEST, generator=generator)
        return [row[:n] for row, n in zip((base + noise).clamp(max=-0.01).tolist(), lengths, strict=True)]

    rewards = torch.rand(ROWS, generator=generator)
    rewards[ROLLOUTS : 2 * ROLLOUTS] = 0.5
    masks = [[1 if i == 0 or not (r % 3 == 0 and i == 2) else 0 for i in range(n)] for r, n in enumerate(lengths)]
    return {
        "lengths": lengths, "rewards": rewards.tolist(), "group_size": ROLLOUTS, "completion_tokens_max": LONGEST,
        "mask": masks, "current": near(0.0), "proximal": near(0.15), "behaviour": near(0.4), "reference": near(0.3),
    }  # fmt: skip


def cases() -> Iterator[dict[str, Any]]:
    """TRL's settings, by the names of TRL's options. `old` says whose log-probabilities TRL takes for the old ones."""
    for loss_type in ("dapo", "dr_grpo", "grpo"):
        yield {"loss_type": loss_type, "old": "proximal"}
        yield {"loss_type": loss_type, "old": "proximal", "accumulation": 2}
    yield {"loss_type": "dapo", "old": "behaviour"}
    yield {"loss_type": "dapo", "old": "none"}
    yield {"loss_type": "grpo", "old": "proximal", "importance_sampling_level": "sequence", "epsilon": 0.05}
    yield {"loss_type": "dapo", "old": "proximal", "beta": 0.1, "use_bias_correction_kl": True}
    for mode, most in (("token_truncate", 1.3), ("sequence_truncate", 1.3), ("token_truncate", 1e6)):
        yield {"loss_type": "dapo", "old": "proximal", "mode": mode, "clip_min": None, "clip_max": most}
    yield {"loss_type": "dapo", "old": "proximal", "scale_rewards": "none"}
    for old in ("proximal", "behaviour"):
        yield {"loss_type": "cispo", "old": old, "epsilon_high": 1.1}
    yield {"loss_type": "cispo", "old": "proximal", "epsilon_high": 5.0, "accumulation": 2}
    yield {"loss_type": "luspo", "old": "proximal", "importance_sampling_level": "sequence", "epsilon": 0.05}
    yield {"loss_type": "luspo", "old": "behaviour", "importance_sampling_level": "sequence", "accumulation": 2}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "x": 3, **{f"p{i}": FIRST_PROMPT_TOKEN + i for i in range(ROWS)}}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trainer_for(case: dict[str, Any], data: dict[str, Any], folder: str) -> GRPOTrainer:
    accumulation = case.get("accumulation", 1)
    options = {
        key: case[key]
        for key in (
            "loss_type", "epsilon", "epsilon_high", "beta", "use_bias_correction_kl", "scale_rewards",
            "importance_sampling_level",
        )
        if key in case
    }  # fmt: skip
    args = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=ROWS // accumulation, gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation, num_generations=ROLLOUTS, num_iterations=2,
        max_completion_length=LONGEST, report_to=[], use_cpu=True, bf16=False,
        **{"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, **options},
    )  # fmt: skip
    tiny = Qwen2Config(
        vocab_size=FIRST_PROMPT_TOKEN + ROWS, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    # TRL loads the reference model from where the policy came from, so it must have come from somewhere.
    Qwen2ForCausalLM(tiny).save_pretrained(f"{folder}/base")
    model = Qwen2ForCausalLM.from_pretrained(f"{folder}/base")

    def rollouts(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        rows = [int(prompt[1:]) for prompt in prompts]
        return {
            "prompt_ids": [[FIRST_PROMPT_TOKEN + row] for row in rows],
            "completion_ids": [[3] * data["lengths"][row] for row in rows],
            "logprobs": [data["behaviour"][row] for row in rows],
            "env_mask": [data["mask"][row] for row in rows],
        }

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [data["rewards"][int(prompt[1:])] for prompt in prompts]

    return GRPOTrainer(
        model=model, args=args, reward_funcs=[reward], processing_class=tokenizer(), rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": f"p{i}"} for i in range(ROWS)]),
    )  # fmt: skip


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[*row, *([0.0] * (LONGEST - len(row)))] for row in rows])


def run(case: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """TRL's advantages, loss and gradient with respect to the current log-probabilities."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(case, data, folder)
    trainer.model.train()
    accumulation = case.get("accumulation", 1)
    trainer.current_gradient_accumulation_steps = accumulation
    current = padded(data["current"]).requires_grad_()
    old = current.detach() if case["old"] == "none" else padded(data[case["old"]])

    def scripted(model: Any, input_ids: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, Any, None]:
        rows = input_ids[:, 0] - FIRST_PROMPT_TOKEN
        if options.get("compute_entropy"):
            source = current
        elif model is trainer.ref_model:
            source = padded(data["reference"])
        else:
            source = old
        return source[rows], torch.zeros(len(rows), LONGEST), None

    trainer._get_per_token_logps_and_entropies = scripted
    if "mode" in case:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer._last_loaded_step = trainer.state.global_step
        trainer.vllm_importance_sampling_mode = case["mode"]
        trainer.vllm_importance_sampling_clip_min = case["clip_min"]
        trainer.vllm_importance_sampling_clip_max = case["clip_max"]
    inputs = trainer._generate_and_score_completions([{"prompt": f"p{i}"} for i in range(ROWS)])
    size = ROWS // accumulation
    loss = 0.0
    for start in range(0, ROWS, size):
        rows = slice(start, start + size)
        part = {k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in inputs.items()}
        piece = trainer._compute_loss(trainer.model, part)
        piece.backward()
        loss += float(piece.detach())
    assert current.grad is not None
    gradient = [row[:n] for row, n in zip(current.grad.tolist(), data["lengths"], strict=True)]
    return {**case, "advantages": inputs["advantages"].tolist(), "loss": loss, "gradient": gradient}


def main() -> None:
    data = batch()
    results = {"trl": trl.__version__, "batch": data, "cases": [run(case, data) for case in cases()]}
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {len(results['cases'])} cases of TRL {trl.__version__}, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
