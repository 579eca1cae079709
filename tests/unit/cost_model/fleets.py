"""Fleets for the tests: seeded, mixed, small."""

import random

from echo2.base.ids import PeerId
from echo2.cost_model.plan import Limit, Plan, Term
from echo2.cost_model.snapshot import FleetSnapshot, LearnerEstimate, LinkEstimate, WorkerEstimate


def worker(name: str, rate: float = 1.0, price: float = 0.4, **others: object) -> WorkerEstimate:
    """A worker with a fast link, unless `others` say so."""
    fields: dict[str, object] = {
        "link": LinkEstimate(2e7, 1e8, 0.05), "rollout_s_mean": 30.0, "rollout_s_tail": 60.0,
        **others,
    }  # fmt: skip
    return WorkerEstimate(PeerId(name), rate, price, **fields)  # type: ignore[arg-type]


def learner(**others: object) -> LearnerEstimate:
    """R = 256 in groups of 16, 64 s a step, 40 MB/s up, 120 MB deltas."""
    fields: dict[str, object] = {
        "rollouts_per_step": 256, "train_s": 64.0, "link": LinkEstimate(4e7, 1e8, 0.02), "delta_bytes": 1.2e8,
        "full_snapshot_bytes": 1.6e10, "rollouts_per_group": 16,
        **others,
    }  # fmt: skip
    return LearnerEstimate(**fields)  # type: ignore[arg-type]


def plan_of(
    value: float,
    limit: float,
    kind: Limit = Limit.THROUGHPUT,
    remedy: str = "",
    pool: tuple[str, ...] = (),
    **others: object,
) -> Plan:
    """A plan of this pool, with one term."""
    term = Term(kind, value, limit, "rollouts/s", value / limit - 1, remedy)
    fields: dict[str, object] = {
        "in_flight_cap_rollouts": 64, "predicted_utilisation": 0.98, "usd_per_hour": 7.36, "is_feasible": value >= limit,
        "reason": "because", **others,
    }  # fmt: skip
    return Plan(
        2, tuple(map(PeerId, pool)), (), (), broadcast_s=1.0, transfer_s=0.5, throughput_rollouts_per_s=value,
        usd_per_useful_rollout=0.1, terms=(term,), binding=kind, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def random_workers(count: int, seed: int) -> tuple[WorkerEstimate, ...]:
    """Mixed rates, prices, links, tails and hazards."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        link = LinkEstimate(rng.choice([2e6, 5e6, 2e7, 6e7]), rng.choice([1e7, 2e7, 1e8]), rng.uniform(0.01, 0.1))
        rate = rng.choice([0.5, 1.0, 1.6, 3.0]) * rng.uniform(0.8, 1.2)
        made.append(
            worker(
                f"w{index:05d}", rate, rate * rng.uniform(0.2, 0.6),
                link=link, rollout_s_tail=rng.choice([50.0, 60.0, 75.0, 90.0]), rollout_s_max=120.0,
                hazard_per_hour=rng.choice([0.0, 0.1, 0.5]),
            )
        )  # fmt: skip
    return tuple(made)


def snapshot(workers: tuple[WorkerEstimate, ...], **others: object) -> FleetSnapshot:
    """At time 0, with the learner above unless `learner` is among `others`."""
    fields: dict[str, object] = {"now_s": 0.0, "learner": learner(), **others}
    return FleetSnapshot(workers=workers, **fields)  # type: ignore[arg-type]
