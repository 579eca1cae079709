"""Options of one learner process: the run file as it is, what its rules made of "auto" for the training step, and what only this
process or its machine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from echo2.config.run import RunConfig
from echo2.cost_model.sizing import longest_sequence
from echo2.learner.training.loss import LossConfig


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What the training step takes beside the run file: what rules made of "auto" on this machine, and limits of ours.
    `row_tokens`: length of rows with a mask; 0: from the model's width. `model_path`, `lr`: as the run file has them, for own
    trainers' scripts."""

    loss: LossConfig = field(default_factory=LossConfig)
    token_budget: int = 16384
    gradient_checkpointing: bool | Literal["selective"] = False
    threads: int = 1
    row_tokens: int = 0
    grad_clip: float = 1.0
    nonfinite_steps_max: int = 5
    model_path: str = ""
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class LearnerLimits:
    checkpoints_kept: int = 2
    free_bytes_min: int = 64 << 20  # disk space that stays free beside a new checkpoint
    keyframe_chain_max: int = 16  # deltas after which a keyframe is published
    linger_s: float = 20.0  # longest time that a finished learner serves its last version
    evaluation_patience_s: float = 600.0  # an evaluation that gets no answer for so long is given up


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`turns_max`: most completions in one rollout, by the task.
    `join_link`: needed until the folder has the run's credentials; if `link_file` is set, the link is read from it again when the
    coordinator cannot be reached. `metrics_port`: of the Prometheus endpoint; 0: none. `left_out`: prompts, by index, whose
    reference cannot be judged.
    """

    folder: Path
    config: RunConfig
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
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
