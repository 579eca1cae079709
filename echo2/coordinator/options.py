"""All options of a coordinator, set by the command line and the config; every option has a default that works.

Guarantees: an option out of range is refused by name before anything starts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.base.ids import RunId


class PlannerMode(enum.Enum):
    """What happens with the planner's proposals: shown, shown with a button, or carried out within the budget."""

    ADVISE = "advise"
    APPROVE = "approve"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    """Limits on sizes, counts and rates; beyond them a message, a node or a caller is refused or slowed down."""

    workers_max: int = 20_000
    tokens_max: int = 10_000
    send_queue_max: int = 1024  # orders waiting for one node; a node that falls further behind is disconnected
    messages_per_s: float = 200.0  # per stream; beyond it the stream is read more slowly
    enrolments_per_s: float = 5.0  # per address, after a burst of `enrolments_burst`
    enrolments_burst: int = 30
    events_kept: int = 5_000


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Options of the coordinator process.

    `folder`: the run's folder, for state and join links. A port of 0: any free port. `database_url` empty: SQLite in the folder.
    `dashboard_host` empty: same as `host`. `plan_interval_s`: the planner runs again at least this often. `offers_file`: machines
    that may be rented; None: only `manual` and `local`, on request. `machines_file`: what machines of each kind did in earlier
    runs; this run adds to it; None: nothing is saved. `over_provision` above 1: admit so many times the groups that the plan asks
    for, and recall a step's stragglers once it has begun, to continue elsewhere (long_tail). `quantised_workers`: workers may
    generate with quantised weights, which they state in their hello. `model_path`: the base checkpoint (hub id or folder) that
    join commands name: a worker that has it fetches one delta instead of a keyframe. `exit_when_finished`: the process exits once
    the learner has finished, all workers have gone and all rented machines are released; else the page stays up.
    """

    run_id: RunId
    folder: Path
    staleness_bound: int = 4
    fixed_kappa: int = 0
    host: str = "127.0.0.1"
    advertise_host: str = ""
    enrol_port: int = 8418
    port: int = 8419
    dashboard_port: int = 8420
    relay_port: int = 8423
    dashboard_host: str = ""
    database_url: str = ""
    heartbeat_interval_s: float = 5.0
    suspect_after_s: float = 15.0
    gone_after_s: float = 45.0
    lease_timeout_s: float = 120.0
    report_interval_s: float = 2.0
    target_utilisation: float = 0.98
    usd_per_hour_cap: float = 0.0
    usd_budget: float = 0.0
    planner_mode: PlannerMode = PlannerMode.AUTO
    offers_file: Path | None = None
    machines_file: Path | None = None
    model_path: str = ""
    over_provision: float = 1.0
    quantised_workers: bool = False
    plan_interval_s: float = 5.0
    exit_when_finished: bool = False
    limits: CoordinatorLimits = field(default_factory=CoordinatorLimits)

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.suspect_after_s < self.gone_after_s:
            raise ConfigError(
                "heartbeat_interval_s < suspect_after_s < gone_after_s: expected that order, got "
                f"{self.heartbeat_interval_s}, {self.suspect_after_s}, {self.gone_after_s}"
            )
        if not 0 <= self.staleness_bound <= 64:
            raise ConfigError(f"staleness_bound: expected 0 (synchronous) to 64, got {self.staleness_bound}")
        kappa_max = max(1, self.staleness_bound)
        if not 0 <= self.fixed_kappa <= kappa_max:
            raise ConfigError(f"fixed_kappa: expected 0 (choose) to {kappa_max}, got {self.fixed_kappa}")
        for name in ("lease_timeout_s", "report_interval_s", "plan_interval_s"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name}: expected above 0 and at most a day, got {getattr(self, name)}")
        if not 1 <= self.over_provision <= 4:
            raise ConfigError(f"over_provision: expected 1 (off) to 4, got {self.over_provision}")
        for name in ("enrol_port", "port", "dashboard_port", "relay_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ConfigError(f"{name}: expected 0 (any) to 65535, got {getattr(self, name)}")
        if not 1 <= len(self.run_id) <= 64:
            raise ConfigError(f"run_id: expected 1 to 64 characters, got {len(self.run_id)}")

    @property
    def link_host(self) -> str:
        """The host named in join links and in the replies that carry certificates."""
        host = (self.advertise_host or self.host).strip("[]")
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
