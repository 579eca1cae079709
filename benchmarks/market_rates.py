"""How often intervals of learned rates hold, on kinds and runs that are made up: laws that the model does not have, and liars.

A kind differs from its data sheet by a heavy-tailed factor, a machine from its kind by a uniform one. Some runs see the kind, with
few or many workers, of which at times one claims what it likes; what the product would keep of them (`agreed_ratios`, records)
makes the belief, and the next machine of the kind lies in its interval or does not.
"""

from __future__ import annotations

import math
import random
import time

from echo2.cost_model.experience import (
    MACHINES_OF_A_RUN,
    RATIO_LEAST,
    RATIO_MOST,
    Experience,
    KindRecord,
    agreed_ratios,
)
from echo2.cost_model.next_actions import Candidate, NextActions, Situation, next_actions
from echo2.cost_model.offers import MarketOffer
from echo2.cost_model.snapshot import FleetSnapshot, LearnerEstimate, LinkEstimate, PlanConfig, WorkerEstimate

KIND = "RTX4090"


def kind_factor(rng: random.Random) -> float:
    """Student's t with five degrees of freedom, scaled, in logarithms; within what a data sheet allows."""
    drawn = 0.75 * math.exp(0.2 * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(2.5, 1 / 2.5)))
    return min(RATIO_MOST * 0.8, max(RATIO_LEAST * 2, drawn))


def one_kind(rng: random.Random, has_liars: bool) -> bool:
    """Whether the next machine of a kind lies in its interval."""
    kind, records = kind_factor(rng), []
    for run in range(rng.randint(0, 4)):
        workers = [kind * math.exp(rng.uniform(-0.25, 0.25)) for _ in range(rng.choice([1, 3, 5, 12, 30]))]
        is_rented = rng.random() < 0.5
        if has_liars and len(workers) >= 3:
            workers[0] = rng.choice([RATIO_LEAST, 0.1, 1.3, RATIO_MOST, 5.0])
        # A machine that the run rented is of its kind; its rate may still be a claim of up to twice what it delivered.
        ratios = agreed_ratios((), workers) if is_rented else agreed_ratios(workers, ())
        assert len(ratios) <= MACHINES_OF_A_RUN
        records.append(KindRecord(f"run{run}", KIND, "", False, 0.0, ratios))
    told = Experience(tuple(records)).belief(KIND)
    return told.low <= kind * math.exp(rng.uniform(-0.25, 0.25)) <= told.high


def coverage(kinds: int, has_liars: bool) -> float:
    rng = random.Random(20602)
    return sum(one_kind(rng, has_liars) for _ in range(kinds)) / kinds


# ---- what to do next, from ten thousand offers


def offers_of_the_world(count: int) -> list[MarketOffer]:
    rng, kinds = (
        random.Random(3),
        (("RTX4090", 24.0, 0.35), ("L40S", 45.0, 0.8), ("H100", 80.0, 2.4), ("A100", 80.0, 1.3)),
    )
    found = []
    for index in range(count):
        gpu, memory, usd = rng.choice(kinds)
        price = usd * rng.uniform(0.5, 2.0)
        found.append(
            MarketOffer(
                f"provider{rng.randrange(20)}",
                f"i{index}",
                f"r{rng.randrange(40)}",
                gpu,
                1,
                memory,
                price,
                rng.random() < 0.5,
            )
        )
    return found


def starved_fleet(workers: int) -> Situation:
    """That makes three quarters of what its learner needs."""
    link = LinkEstimate(2e7, 1e8, 0.05)
    fleet = tuple(
        WorkerEstimate(f"w{index:03d}", 1.0, 0.35, link, 18.0, 36.0, 1000.0, 45.0)  # type: ignore[arg-type]
        for index in range(workers)
    )
    batch = workers * 80 // 16 * 16
    learner = LearnerEstimate(batch, batch / (workers / 0.75), LinkEstimate(1e8, 1e8, 0.02), 1.2e8, 1.6e10, 16)
    snapshot = FleetSnapshot(0.0, learner, fleet, steps_left=500)
    pool = frozenset(one.worker_id for one in fleet)
    return Situation(snapshot, PlanConfig(4), 1, pool, (), 0.35 * workers, 0.0, 1000.0, 0.02, 0.0, 0.05)


def next_actions_ms(candidates: list[Candidate], workers: int) -> tuple[float, NextActions]:
    begun = time.process_time()
    found = next_actions(starved_fleet(workers), candidates)
    return (time.process_time() - begun) * 1000, found
