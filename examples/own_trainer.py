"""A trainer of one's own on echo2's rollouts: REINFORCE with a group baseline, in plain torch.

With a coordinator and workers running for `run.toml`:

    python examples/own_trainer.py run.toml @runs/NAME/links/learner.link

Killed, it goes on from its newest checkpoint when it is started again with the same command.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import echo2


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    config_path, link = sys.argv[1:]
    with echo2.Run(config_path, link) as run:
        config = run.options.config
        torch.set_num_threads(run.options.trainer.threads)
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        optimiser = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, betas=(0.9, 0.99))
        mine = run.options.folder / "mine"
        if run.resume_step:
            kept = torch.load(mine / f"{run.resume_step}.pt", weights_only=True)
            model.load_state_dict(kept["model"])
            optimiser.load_state_dict(kept["optimiser"])

        publisher, rollouts = echo2.Publisher(run), echo2.Rollouts(run)
        publisher.publish(run.resume_step, echo2.published_tensors(model))
        for batch in rollouts:
            reward = train(model, optimiser, batch)
            print(f"step {batch.step + 1}: reward {reward:.3f}", flush=True)
            publisher.publish(batch.step + 1, echo2.published_tensors(model))
            if run.checkpoint_is_due:
                save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, mine / f"{run.step}.pt")


def train(model: torch.nn.Module, optimiser: torch.optim.Optimizer, batch: echo2.TrainingBatch) -> float:
    """One step on the whole batch; returns its mean reward."""
    b = batch.padded()
    advantage_B = torch.empty_like(b.rewards_B)
    for group in b.groups_B.unique():
        rewards = b.rewards_B[b.groups_B == group]
        advantage_B[b.groups_B == group] = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    logits_BLV = model(input_ids=b.token_ids_BL).logits[:, :-1]
    logprobs_BL = -torch.nn.functional.cross_entropy(
        logits_BLV.transpose(1, 2), b.token_ids_BL[:, 1:], reduction="none"
    )
    mask_BL, behaviour_BL = b.is_sampled_BL[:, 1:], b.logprobs_BL[:, 1:]
    ratio_BL = (logprobs_BL - behaviour_BL).exp()
    advantage_B1 = advantage_B[:, None]
    surrogate_BL = torch.minimum(ratio_BL * advantage_B1, ratio_BL.clamp(0.8, 1.28) * advantage_B1)
    optimiser.zero_grad()
    (-(surrogate_BL * mask_BL).sum() / mask_BL.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return float(b.rewards_B.mean())


def save(state: dict[str, object], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)


if __name__ == "__main__":
    main()
