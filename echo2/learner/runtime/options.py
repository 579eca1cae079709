"""Options of the learner daemon and its parts. Plain values; `cli` maps the config onto them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from echo2.base.errors import ConfigError
from echo2.base.rollout import SamplingParams
from echo2.broadcast.link_shape import LinkShape
from echo2.cost_model.checkpoint_interval import STEPS_MAX
from echo2.cost_model.sizing import longest_sequence
from echo2.learner.advantage import ADVANTAGES, AdvantageConfig
from echo2.learner.delta_setting import SettingWish
from echo2.learner.loss import PolicyLossConfig
from echo2.tasks.runtime.chat_format import ChatOptions
from echo2.tasks.task import TaskSpec


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
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    advantage: AdvantageConfig = ADVANTAGES["grpo"]
    token_budget: int = 16384
    row_tokens: int = 0  # 0: from the model's width
    gradient_checkpointing: bool | Literal["selective"] = False
    attention: Literal["auto", "dense", "flex"] = "auto"
    updates_per_batch: int = 1  # optimiser updates per step, each on its share of the groups
    trains_on_truncated: bool = True  # whether to train on completions cut off at the length limit
    scales_lr_by_ess: bool = False
    lr_scale_floor: float = 0.1
    nonfinite_steps_max: int = 5
    with_entropy: bool = True
    lora_rank: int = 0  # 0: train and publish all weights; else only a low-rank adapter
    lora_alpha: int = 0  # 0: twice the rank
    replicas: int = 1  # copies of the weights; each is sharded over its share of the ranks
    replays_routing: bool = False  # in a mixture of experts, train tokens through the experts that sampled them

    def __post_init__(self) -> None:
        if self.weights_dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"weights_dtype: expected bfloat16 or float32, got {self.weights_dtype!r}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule: expected constant, linear or cosine, got {self.schedule!r}")


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A further evaluation set. `prompts` 0: all prompts of a finite task. `temperature` 0: greedy."""

    name: str
    task: str
    args: Mapping[str, object] = field(default_factory=dict)
    prompts: int = 0
    samples: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Evaluations: the fleet answers prompts at the start, every `every_steps` steps and at the end, `samples` times each. The
    prompts are `prompts` held out of the run's own task, and those of further `sets`; if both are empty, evaluation is off. In a
    mixture each task sets its held-out prompts (`MixedTask`) and `prompts` is ignored. `patience_s`: an evaluation that gets no
    answer for so long is given up."""

    prompts: int = 64
    every_steps: int = 20
    samples: int = 1
    temperature: float = 0.0
    patience_s: float = 600.0
    sets: tuple[EvaluationSet, ...] = ()
    examples_kept: int = 8


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When to write checkpoints. `free_bytes_min`: disk space that must stay free beside a new checkpoint. `follows_cost`:
    checkpoint more often than every `every_steps` if that costs less (cost_model/checkpoint_interval)."""

    every_steps: int = STEPS_MAX
    kept: int = 2
    free_bytes_min: int = 64 << 20
    follows_cost: bool = False


@dataclass(frozen=True, slots=True)
class MixedTask:
    """One task of a mixture. `weight`: its share of the prompts, relative to the sum of all weights. `held_out`: how many of its
    prompts are kept for evaluation, as a set of the same name."""

    name: str
    task: str
    args: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0
    held_out: int = 0


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The task by name, with its arguments (tasks/), and its curriculum. `mixture`: several tasks instead of that one."""

    name: str = "sort_digits"
    args: Mapping[str, object] = field(default_factory=dict)
    curriculum: str = "in_order"  # in_order | success_band
    epochs: int = 0  # passes over a finite data set; 0: as many as the steps need
    trusted_rewards: bool = False  # run rewards with this process's rights
    readable: tuple[str, ...] = ()  # paths that contained rewards may read besides the task's own
    reward_processes: int = 0  # 0: from the number of cores
    ray: str = ""  # Ray cluster that computes rewards; empty: this machine
    chat: ChatOptions = field(default_factory=ChatOptions)
    mixture: tuple[MixedTask, ...] = ()

    def specs(self, seed: int) -> tuple[TaskSpec, ...]:
        """The tasks to train on."""
        mixed = tuple(TaskSpec(one.task, one.args, seed) for one in self.mixture)
        return mixed or (TaskSpec(self.name, self.args, seed),)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Prompts come from agents that use OpenAI's API. `harness`: module:function, or a command, that plays an episode; empty:
    outside harnesses ask for episodes. `listen`: HOST:PORT; empty: any loopback port. An episode that makes no call for `idle_s`,
    takes longer than `episode_s` or breaks is restarted up to `restarts_max` times, then dropped. `at_once`: episodes that echo2
    plays concurrently."""

    harness: str = ""
    listen: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    idle_s: float = 600.0
    episode_s: float = 3600.0
    restarts_max: int = 2
    at_once: int = 64
    model_name: str = "policy"


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """One run of the learner.

    `sampling`: temperature, filters and length; seed and stop tokens are filled in later. `kappa` None: the coordinator's plan
    chooses it. `advertise`: address given to workers; empty: the listening address. `join_link`: needed until the folder has the
    run's credentials; if `link_file` is set, the link is read from it again when the coordinator cannot be reached.
    """

    folder: Path
    run_id: str
    steps: int
    rollouts_per_step: int
    rollouts_per_group: int
    staleness_bound: int
    trainer: TrainerOptions
    task: TaskOptions = field(default_factory=TaskOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    kappa: int | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    relay_port: int = 0
    join_link: str = ""
    link_file: Path | None = None
    chunk_bytes: int = 256 << 10
    delta_setting: SettingWish = "auto"
    keyframe_chain_max: int = 16
    store_bytes: int = 0  # disk space for chunks; 0: from the model
    uplink_limit_bytes_per_s: float = 0.0  # 0: none
    link: LinkShape = field(default_factory=LinkShape)  # emulated link, for experiments
    drops_equal_rewards: bool = False
    prunes_hopeless: bool = False  # end repetitive or hopeless rollouts early
    metrics_port: int = 0  # port of the Prometheus endpoint; 0: none
    overlong_buffer_tokens: int = 0  # the last so many tokens before the limit cost reward; 0: off
    prompt_tokens_max: int = 1024
    turns_max: int = 1  # most completions in one rollout, one after another
    linger_s: float = 20.0  # longest time that a finished learner serves its last version; see lingering
    audit_share: float = 0.0  # share of rollouts scored again to detect cheating workers; 0: off
    audit_fleet_share: float = (
        0.0  # tokens that workers may read for audits, per sampled token; 0: the learner scores all
    )
    requires_seeds: bool = False  # refuse reports from engines that do not draw by their leases' seeds
    agent: AgentOptions | None = None
    sinks: tuple[str, ...] = ()  # tensorboard | wandb | trackio, in addition to metrics.jsonl

    def __post_init__(self) -> None:
        if self.rollouts_per_step % self.rollouts_per_group or self.rollouts_per_step < 1:
            raise ConfigError(
                f"rollouts per step: expected a multiple of {self.rollouts_per_group} (the rollouts of one prompt), "
                f"got {self.rollouts_per_step}"
            )
        if self.staleness_bound < 0:
            raise ConfigError(f"staleness bound: expected 0 or more, got {self.staleness_bound}")
        if self.kappa is not None and not 1 <= self.kappa <= max(1, self.staleness_bound):
            raise ConfigError(f"kappa: expected 1 to {max(1, self.staleness_bound)}, got {self.kappa}")
        if self.sampling.temperature == 0:
            raise ConfigError("temperature: expected above 0, for greedy rollouts of one prompt are all the same")
        if self.steps < 1:
            raise ConfigError(f"steps: expected at least 1, got {self.steps}")

    @property
    def longest_tokens(self) -> int:
        """Longest sequence of the run in tokens, unless the model's context is shorter."""
        return longest_sequence(self.prompt_tokens_max, self.sampling.max_new_tokens, self.turns_max)


def chunk_folder(options: LearnerOptions) -> Path:
    """Folder of the chunk store, which holds published artifacts."""
    return options.folder / "chunks"
