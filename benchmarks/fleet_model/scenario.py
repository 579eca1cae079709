"""Input of a fleet simulation: learner, lengths, workers, prices and their changes, as frozen checked values.

Guarantees: bad values raise `ConfigError` naming the field, the value and the range. Leaves to others: running it (fleet),
reading files (cli).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.fleet_model.lengths import LengthDistribution
from echo2.cost_model.snapshot import DownloadMode, LearnerEstimate, LinkEstimate, PlanConfig, checked, checked_positive

STEPS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class WorkerTruth:
    """The true properties of one machine. `sequence_tokens_per_s`: per slot, with all `slots` full."""

    name: str
    slots: int
    sequence_tokens_per_s: float
    price_usd_per_hour: float
    link: LinkEstimate
    gpu: str = "cpu"
    hazard_per_hour: float = 0.0
    join_s: float = 60.0
    apply_s: float = 0.0
    swap_s: float = 0.0

    def __post_init__(self) -> None:
        whose = f"worker {self.name}"
        checked(whose, "slots", self.slots, 1, 65536)
        checked_positive(whose, "sequence_tokens_per_s", self.sequence_tokens_per_s)
        for name in ("price_usd_per_hour", "hazard_per_hour", "join_s", "apply_s", "swap_s"):
            checked(whose, name, getattr(self, name), 0.0)


@dataclass(frozen=True, slots=True)
class PriceChange:
    """From `at_s` on, machines of `gpu` cost `factor` times their initial price."""

    at_s: float
    gpu: str
    factor: float

    def __post_init__(self) -> None:
        checked("price change", "at_s", self.at_s, 0.0)
        checked("price change", "factor", self.factor, 0.0, 1000.0)


@dataclass(frozen=True, slots=True)
class ColocatedCluster:
    """Baseline: a co-located cluster that alternates between generating and training on the same GPUs."""

    gpu_count: int
    gpu_usd_per_hour: float
    step_s: float

    def __post_init__(self) -> None:
        checked("baseline", "gpu_count", self.gpu_count, 1)
        checked_positive("baseline", "gpu_usd_per_hour", self.gpu_usd_per_hour)
        checked_positive("baseline", "step_s", self.step_s)

    @property
    def usd_per_step(self) -> float:
        return self.gpu_count * self.gpu_usd_per_hour * self.step_s / 3600


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """One simulation. The first `warmup_steps` are not measured. `estimate_noise`: relative standard deviation of
    every estimate that the planner gets; `train_cv`: that of the learner's step time."""

    name: str
    learner: LearnerEstimate
    config: PlanConfig
    lengths: LengthDistribution
    workers: tuple[WorkerTruth, ...]
    steps: int = 60
    warmup_steps: int = 15
    seed: int = 0
    train_cv: float = 0.0
    estimate_noise: float = 0.0
    price_changes: tuple[PriceChange, ...] = ()
    baseline: ColocatedCluster | None = None
    origin: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked("scenario", "steps", self.steps, 1, STEPS_MAX)
        checked("scenario", "warmup_steps", self.warmup_steps, 0, self.steps - 1)
        checked("scenario", "train_cv", self.train_cv, 0.0, 1.0)
        checked("scenario", "estimate_noise", self.estimate_noise, 0.0, 1.0)
        checked("scenario", "workers", len(self.workers), 1, 100_000)

    @property
    def is_stalled(self) -> bool:
        """Whether workers pause while a version arrives."""
        return self.config.download is DownloadMode.STALLED
