"""Options of one learner process: the run file as it is, what its rules made of "auto" for the training step, and what only this
process or its machine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from echo2.config.run import OptimizerState, RunConfig
from echo2.cost_model.sizing import longest_sequence
from echo2.learner.training.loss import LossConfig


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Options of the training step. `schedule`: shape of the learning rate after warm-up. `emulated_step_s`: minimum duration of a
    step, to emulate a larger model on a small machine.
    """

    model_path: str
    weights_dtype: str = "bfloat16"
    device: str = "auto"
    threads: int = 1
    emulated_step_s: float = 0.0
    lr: float = 1e-6
    warmup_steps: int = 0
    schedule: str = "constant"  # constant | linear | cosine
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: str = "grpo"
    token_budget: int = 16384
    row_tokens: int = 0  # 0: from the model's width
    gradient_checkpointing: bool | Literal["selective"] = False
    optimizer_state: OptimizerState = "float32"
    updates_per_batch: int = 1  # optimiser updates per step, each on its share of the groups
    trains_on_truncated: bool = True  # whether to train on completions cut off at the length limit
    nonfinite_steps_max: int = 5
    lora_rank: int = 0  # 0: train and publish all weights; else only a low-rank adapter
    lora_alpha: int = 0  # 0: twice the rank
    replicas: int = 1  # copies of the weights; each is sharded over its share of the ranks
    teacher_path: str = ""  # a model whose log-probabilities are the advantage, instead of rewards
    supervised_steps: int = 0  # the run's first steps, which learn the tokens as given
    supervised_lr: float = 0.0  # 0: lr
    replays_routing: bool = False  # in a mixture of experts, train tokens through the experts that sampled them


@dataclass(frozen=True, slots=True)
class LearnerLimits:
    checkpoints_kept: int = 2
    free_bytes_min: int = 64 << 20  # disk space that stays free beside a new checkpoint
    keyframe_chain_max: int = 16  # deltas after which a keyframe is published
    linger_s: float = 20.0  # longest time that a finished learner serves its last version
    evaluation_patience_s: float = 600.0  # an evaluation that gets no answer for so long is given up


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`trainer`: what the learner section comes to on this machine. `turns_max`: most completions in one rollout, by the task.
    `join_link`: needed until the folder has the run's credentials; if `link_file` is set, the link is read from it again when the
    coordinator cannot be reached. `metrics_port`: of the Prometheus endpoint; 0: none. `left_out`: prompts, by index, whose
    reference cannot be judged.
    """

    folder: Path
    config: RunConfig
    trainer: TrainerOptions
    turns_max: int = 1
    host: str = "127.0.0.1"
    join_link: str = ""
    link_file: Path | None = None
    metrics_port: int = 0
    limits: LearnerLimits = field(default_factory=LearnerLimits)
    left_out: frozenset[int] = frozenset()

    @property
    def longest_tokens(self) -> int:
        """Longest sequence of the run in tokens, unless the model's context is shorter."""
        sampling = self.config.sampling
        return longest_sequence(sampling.max_prompt_tokens, sampling.max_new_tokens, self.turns_max)


def chunk_folder(options: LearnerOptions) -> Path:
    return options.folder / "chunks"
