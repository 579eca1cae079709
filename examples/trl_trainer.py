"""TRL's GRPOTrainer on echo2's rollouts, through its rollout hook.

With a coordinator and workers running for `run.toml`, in an environment with `trl`:

    python examples/trl_trainer.py run.toml @runs/NAME/links/learner.link

Prompts and rewards are those of the run's task, so TRL's own data set only counts. Without vLLM's colocated mode TRL takes
samples for on-policy ones; keep `staleness.bound = 1`, or use a trainer that reads the behaviour log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import echo2


class Hook:
    """`GRPOTrainer(rollout_func=…)`: the weights after the last step out, the next batch in."""

    def __init__(self, run: echo2.Run) -> None:
        self.run, self.publisher, self.rollouts = run, echo2.Publisher(run), iter(echo2.Rollouts(run))
        self.rollouts_per_group = run.options.config.learner.rollouts_per_prompt

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        assert trainer.model.training, "the run's batches are to be trained on: expected TRL's eval_strategy to be 'no'"
        self.publish(trainer)
        samples = list(self._whole_groups(next(self.rollouts)))
        assert len(samples) == len(prompts), f"expected {len(prompts)} rollouts a step in run.toml, got {len(samples)}"
        return {
            "prompt_ids": [list(sample.prompt_token_ids) for sample, _ in samples],
            "completion_ids": [list(sample.token_ids) for sample, _ in samples],
            "logprobs": [list(sample.logprobs) for sample, _ in samples],
            "echo2_reward": [reward for _, reward in samples],
        }

    def publish(self, trainer: GRPOTrainer) -> None:
        """A step of the run is a batch, on which TRL makes `num_iterations` of its own."""
        step = self.run.step + 1 if self.run.is_started else self.run.resume_step
        self.publisher.publish(step, echo2.published_tensors(trainer.model))

    def _whole_groups(self, batch: echo2.TrainingBatch) -> Iterator[tuple[echo2.Sample, float | None]]:
        """Groups of equal size: where a reward failed, a sibling stands in without one."""
        for group in range(1 + max(sample.group for sample in batch.samples)):
            found = [sample for sample in batch.samples if sample.group == group]
            yield from ((sample, sample.reward) for sample in found)
            yield from ((found[0], None) for _ in range(self.rollouts_per_group - len(found)))


def main() -> None:
    config_path, link = sys.argv[1:3]
    with echo2.Run(config_path, link) as run:
        config = run.options.config
        path = config.model.path
        size = config.learner.rollouts_per_step
        hook = Hook(run)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(path),
            reward_funcs=[lambda echo2_reward, **_: echo2_reward],
            train_dataset=Dataset.from_dict({"prompt": ["echo2"] * size}),
            rollout_func=hook,
            args=GRPOConfig(
                output_dir=str(run.options.folder / "trl"),
                max_steps=config.learner.steps,
                per_device_train_batch_size=size,
                num_generations=config.learner.rollouts_per_prompt,
                max_completion_length=config.sampling.max_new_tokens,
                learning_rate=config.learner.lr,
                beta=0.0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
        )
        trainer.train()
        hook.publish(trainer)


if __name__ == "__main__":
    main()
