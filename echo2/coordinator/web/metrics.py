"""Prometheus metrics, read from the hub at each scrape. The list is stable and documented (docs/reference/metrics.md).

Guarantees: every metric of `METRICS` is present at each scrape, 0 while unknown; the only label is `worker` (its name), so
the fleet's limit bounds the number of series.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.coordinator.hub import Hub
from echo2.coordinator.planning.corrections import PredictedQuantity

METRICS: dict[str, tuple[str, Callable[[Hub], float]]] = {
    "echo2_step": ("Completed optimiser steps.", lambda h: h.board.report.step),
    "echo2_version": ("Newest published version.", lambda h: h.board.newest_version if h.board.hello else 0),
    "echo2_reward_mean": ("Mean reward of the last batch.", lambda h: h.board.report.reward_mean),
    "echo2_learner_connected": ("1 while the learner's stream stands.", lambda h: float(h.board.is_connected)),
    "echo2_learner_utilisation": (
        "Measured share of time it trains.",
        lambda h: h.board.report.utilisation,
    ),
    "echo2_learner_utilisation_predicted": (
        "The plan's prediction of it.",
        lambda h: h.plan.predicted_utilisation if h.plan is not None else 0.0,
    ),
    "echo2_train_seconds": ("Seconds that a step trains, smoothed.", lambda h: h.board.train_s),
    "echo2_broadcast_seconds": (
        "Publication to live on the whole pool, last complete version.",
        lambda h: (h.board.newest_complete.complete_s or 0.0) if h.board.newest_complete else 0.0,
    ),
    "echo2_broadcast_seconds_predicted": (
        "Its prediction.",
        lambda h: h.board.newest_complete.predicted_s if h.board.newest_complete else 0.0,
    ),
    "echo2_utilisation_prediction_error": (
        "Mean distance of measured from predicted utilisation.",
        lambda h: h.corrections.log.mean_absolute_error(PredictedQuantity.UTILISATION) or 0.0,
    ),
    "echo2_broadcast_prediction_error_seconds": (
        "Mean distance of measured from predicted broadcast seconds.",
        lambda h: h.corrections.log.mean_absolute_error(PredictedQuantity.BROADCAST_S) or 0.0,
    ),
    "echo2_usd_per_hour_prediction_error": (
        "Mean distance of what the pool cost from what the plan said.",
        lambda h: h.corrections.log.mean_absolute_error(PredictedQuantity.USD_PER_HOUR) or 0.0,
    ),
    "echo2_over_stale_tokens_trained": (
        "Tokens trained over the staleness bound; must be 0.",
        lambda h: h.board.report.over_stale_tokens_trained,
    ),
    "echo2_rollouts_trained": ("Rollouts trained on.", lambda h: h.board.report.trained_rollouts),
    "echo2_rollouts_dropped_stale": ("Rollouts dropped as stale.", lambda h: h.board.report.dropped_stale_rollouts),
    "echo2_artifact_bytes_published": ("Bytes of all published versions.", lambda h: h.board.totals.artifact_bytes),
    "echo2_snapshot_bytes_published": ("What whole snapshots would have been.", lambda h: h.board.totals.full_bytes),
    "echo2_workers_alive": ("Workers that are alive.", lambda h: _count(h, Liveness.ALIVE)),
    "echo2_workers_suspect": ("Workers that are suspect.", lambda h: _count(h, Liveness.SUSPECT)),
    "echo2_workers_active": (
        "Workers that may be given leases.",
        lambda h: sum(m.last_activation is Activation.ACTIVE for m in h.membership.living()),
    ),
    "echo2_leases_open": ("Leases out.", lambda h: len(h.book.leases)),
    "echo2_groups_queued": ("Groups that wait for a worker.", lambda h: h.book.queued),
    "echo2_leases_granted": ("Leases granted since the start.", lambda h: h.book.counts.granted),
    "echo2_leases_continued": ("Of them, continuations.", lambda h: h.book.counts.continued),
    "echo2_leases_expired": ("Leases that expired without progress.", lambda h: h.book.counts.expired),
    "echo2_leases_moved": ("Stragglers moved to faster workers.", lambda h: h.book.counts.moved),
    "echo2_machines": (
        "Machines rented and not given back.",
        lambda h: sum(machine.is_open for machine in h.money.machines.values()),
    ),
    "echo2_usd_spent": ("The bill: all machines, those on standby too.", lambda h: h.money.sums().usd_spent),
    "echo2_usd_useful": ("Of the bill, what workers cost while they worked.", lambda h: h.money.sums().usd_useful),
    "echo2_usd_per_hour": ("What all machines that are there cost now.", lambda h: h.money.sums().usd_per_hour),
}

WORKER_METRICS: dict[str, tuple[str, Callable[[Hub, Member], float]]] = {
    "echo2_worker_tokens_per_second": ("Tokens per busy second.", lambda h, m: m.heartbeat.tokens_per_s),
    "echo2_worker_lag_versions": (
        "Newest version minus the worker's.",
        lambda h, m: h.board.newest_version - (m.heartbeat.version or 0),
    ),
    "echo2_worker_leases": ("Leases it holds.", lambda h, m: h.book.lease_count(m.peer_id)),
    "echo2_worker_usd_spent": ("What it has cost.", lambda h, m: m.usd_spent),
}


def _count(hub: Hub, state: Liveness) -> int:
    return sum(member.last_liveness is state for member in hub.membership.members.values())


def families_of(hub: Hub) -> list[Metric]:
    """All metrics with their present values."""
    families: list[Metric] = [
        GaugeMetricFamily(name, text, value=float(read(hub))) for name, (text, read) in METRICS.items()
    ]
    for name, (text, read_worker) in WORKER_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for member in hub.membership.living():
            family.add_metric([f"{member.name}/{member.peer_id[-6:]}"], float(read_worker(hub, member)))
        families.append(family)
    return families


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def exposition(families: list[Metric]) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    return generate_latest(registry)
