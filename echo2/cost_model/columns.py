"""A fleet as numeric columns, so that ten thousand workers are evaluated in milliseconds.

Guarantees: row i of every column is worker i of the snapshot. Leaves to others: choosing workers (pool, planner).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo2.cost_model.snapshot import DownloadMode, FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64] | slice
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class FleetColumns:
    """The columns that do not depend on kappa. `rate` (rollouts/s) is discounted by the expected loss of spot machines."""

    rate: Floats
    price: Floats
    uplink: Floats
    downlink: Floats
    latency_s: Floats  # encode + round trips of two hops + apply
    tail_s: Floats  # of a group: one long rollout, plus earlier rounds if the worker has too few slots
    rollout_tail_s: Floats
    mean_s: Floats
    slots: npt.NDArray[np.int64]
    longest_s: Floats  # infinite if unknown
    swap_s: Floats
    is_available: Flags
    is_pinned: Flags
    provider: npt.NDArray[np.int64]  # index into the config's limits; -1: no limit

    @classmethod
    def of(cls, snapshot: FleetSnapshot, config: PlanConfig) -> FleetColumns:
        workers, learner = snapshot.workers, snapshot.learner
        limits = {name: index for index, (name, _) in enumerate(config.provider_workers_max)}
        table = np.array(
            [
                (
                    availability(worker, config.preemption_loss_s) * worker.rollouts_per_s,
                    worker.price_usd_per_hour, worker.link.uplink_bytes_per_s, worker.link.downlink_bytes_per_s,
                    worker.link.rtt_s + worker.apply_s, worker.rollout_s_tail, worker.rollout_s_mean, worker.swap_s,
                    worker.rollout_s_max or np.inf, worker.rollouts_per_s,
                )
                for worker in workers
            ]
        ).T  # fmt: skip
        slots = np.maximum(1, np.round(table[9] * table[6])).astype(np.int64)
        turns_s = table[6] * np.maximum(0.0, learner.rollouts_per_group / slots - 1.0)
        is_available = np.array([worker.state is not WorkerState.UNAVAILABLE for worker in workers])
        return cls(
            rate=table[0], price=table[1], uplink=table[2], downlink=table[3],
            latency_s=table[4] + learner.encode_s + learner.link.rtt_s,
            tail_s=table[5] + turns_s, rollout_tail_s=table[5], mean_s=table[6], swap_s=table[7], longest_s=table[8],
            slots=slots,
            is_available=is_available,
            is_pinned=np.array([worker.is_pinned for worker in workers]) & is_available,
            provider=np.array([limits.get(worker.provider, -1) for worker in workers], dtype=np.int64),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.price)


def availability(worker: WorkerEstimate, preemption_loss_s: float) -> float:
    """The share of its rate that a worker keeps if each loss costs a join and the work since the last report."""
    return 1.0 / (1.0 + worker.hazard_per_hour * (worker.join_s + preemption_loss_s) / 3600.0)


@dataclass(frozen=True, slots=True)
class PeriodColumns:
    """The columns that depend on kappa: transfer times of one version, in seconds, with the efficiency applied."""

    kappa: int
    period_s: float
    staleness_budget_s: float
    artifact_bytes: float
    efficiency: float
    seed_s: float  # over the learner's uplink
    own_s: Floats  # the larger of the seed's time and the worker's own downlink time

    @classmethod
    def of(
        cls, snapshot: FleetSnapshot, config: PlanConfig, columns: FleetColumns, kappa: int, efficiency: float
    ) -> PeriodColumns:
        learner = snapshot.learner
        artifact_bytes = learner.artifact_bytes(kappa)
        seed_s = artifact_bytes / (learner.link.uplink_bytes_per_s * efficiency)
        return cls(
            kappa=kappa,
            period_s=kappa * learner.train_s,
            staleness_budget_s=(config.staleness_bound - kappa + 1) * learner.train_s,
            artifact_bytes=artifact_bytes,
            efficiency=efficiency,
            seed_s=seed_s,
            own_s=np.maximum(seed_s, artifact_bytes / (columns.downlink * efficiency)),
        )

    def swarm_s(self, count: int, uplinks: float) -> float:
        """Third term of the fluid bound, in seconds: `count` copies over the sum of all uplinks, including the seed's."""
        return count * self.artifact_bytes / (uplinks * self.efficiency)

    def rate(self, columns: FleetColumns, transfer_s: Floats, download: DownloadMode, rows: Rows = ALL_ROWS) -> Floats:
        """Rollouts/s of `rows`, less the share of each period in which a worker pauses to swap (and to download, if downloads
        stall it). `transfer_s`: the transfer times of these rows."""
        swap_s = columns.swap_s[rows]
        still_s = swap_s if download is DownloadMode.BACKGROUND else swap_s + transfer_s
        return columns.rate[rows] * np.maximum(0.0, 1.0 - still_s / self.period_s)
