"""Large fleets: `python -m benchmarks.broadcast_model.scenarios [--workers 64 256] [--mib 64]` prints time against the bound.

Same seed, same table: two versions of the code can be compared line by line.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from benchmarks.broadcast_model.network import BroadcastNetwork
from echo2.base.ids import PeerId
from echo2.broadcast.plan import BroadcastPlan, NodeLink, chunk_bytes_for, degree_of, fluid_bound
from echo2.broadcast.trees import Needs, plan, weighted_plan

MBIT = 125_000.0
HETEROGENEOUS = ((50, 150), (200, 400), (75, 200), (100, 200), (150, 300), (50, 200), (100, 400), (75, 150))
RTTS_S = (0.02, 0.06, 0.08)
STANDBY_MBIT = (10, 30)


def wan_fleet(kind: str, workers: int) -> list[NodeLink]:
    """A seed with a 200 Mbit/s uplink; workers with 100 Mbit/s up and 200 down, or the heterogeneous mix; three regions."""
    nodes = [NodeLink(PeerId("seed"), "seed", ("seed:1",), 200 * MBIT, 400 * MBIT, 0.06)]
    for i in range(workers):
        up, down = (100, 200) if kind == "homogeneous" else HETEROGENEOUS[i % len(HETEROGENEOUS)]
        nodes.append(NodeLink(PeerId(f"w{i}"), f"w{i}", (f"w{i}:1",), up * MBIT, down * MBIT, RTTS_S[i % 3]))
    return nodes


def partly_needed_fleet(workers: int, standby: int, share: float) -> tuple[list[NodeLink], Needs]:
    """The heterogeneous mix as active workers with unequal weights, with `standby` workers of weight 0 on slow links among them."""
    nodes = wan_fleet("heterogeneous", workers)
    weights = [1.0 + 0.1 * (number % 5) for number in range(workers)]
    up, down = STANDBY_MBIT
    for number in range(1, workers + 1, max(1, workers // max(1, standby)))[:standby]:
        nodes[number] = replace(nodes[number], uplink_bytes_per_s=up * MBIT, downlink_bytes_per_s=down * MBIT)
        weights[number - 1] = 0.0
    return nodes, Needs(tuple(weights), share)


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of one broadcast in seconds: until the needed share of the workers held the artifact, and until all did."""

    needed_s: float
    all_s: float
    predicted_needed_s: float
    duplicate_bytes: int


def spread(made: BroadcastPlan, needs: Needs, total_bytes: int, chunk_bytes: int, limit_s: float = 3600.0) -> Spread:
    """Simulates one broadcast along the plan `made`, with the real session cores."""
    net = BroadcastNetwork(made)
    net.publish(total_bytes, chunk_bytes_for(made, chunk_bytes, total_bytes))
    net.run(limit_s)
    times = [math.inf if time_s is None else time_s for time_s in net.worker_times().values()]
    duplicates = sum(node.session.duplicates_bytes for node in net.nodes.values())
    return Spread(needs.needed_s(times), max(times), needs.needed_s(made.predicted_s), duplicates)


def weighted_and_alike(
    nodes: list[NodeLink], needs: Needs, total_bytes: int, chunk_bytes: int
) -> tuple[Spread, Spread]:
    """Broadcasts the same artifact twice: along the plan that weighs workers by `needs`, and along the unweighted plan."""
    weighted = weighted_plan(nodes, needs, 1, total_bytes, chunk_bytes)
    alike = plan(nodes, 1, total_bytes, chunk_bytes)
    return (
        spread(weighted, needs, total_bytes, chunk_bytes),
        spread(alike, needs, total_bytes, chunk_bytes),
    )


@dataclass(frozen=True, slots=True)
class BroadcastOutcome:
    topology: str
    slowest_s: float
    bound_s: float
    predicted_s: float
    seed_copies: float
    duplicate_bytes: int
    degree: int

    @property
    def ratio(self) -> float:
        return self.slowest_s / self.bound_s


def broadcast(nodes: list[NodeLink], total_bytes: int, chunk_bytes: int, limit_s: float = 3600.0) -> BroadcastOutcome:
    """Broadcasts one artifact to all nodes, with the real session cores; chunks have at most `chunk_bytes`."""
    made = plan(nodes, 1, total_bytes, chunk_bytes)
    net = BroadcastNetwork(made)
    net.publish(total_bytes, chunk_bytes_for(made, chunk_bytes, total_bytes))
    net.run(limit_s)
    return BroadcastOutcome(
        topology=made.topology,
        slowest_s=net.slowest_s,
        bound_s=total_bytes / fluid_bound(nodes).rate_bytes_per_s,
        predicted_s=made.predicted_all_s,
        seed_copies=net.nodes[net.seed_id].sent_bytes / total_bytes,
        duplicate_bytes=sum(node.session.duplicates_bytes for node in net.nodes.values()),
        degree=degree_of(made.trees, len(nodes)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--kind", nargs="+", default=["homogeneous", "heterogeneous"])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--chunk-kib", type=int, default=256)
    options = parser.parse_args()
    print("| links | workers | plan | slowest s | bound s | ratio | predicted s | seed sent / size | degree |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in options.kind:
        for workers in options.workers:
            got = broadcast(wan_fleet(kind, workers), options.mib << 20, options.chunk_kib << 10)
            print(
                f"| {kind} | {workers} | {got.topology} | {got.slowest_s:.2f} | {got.bound_s:.2f} | {got.ratio:.3f} | "
                f"{got.predicted_s:.2f} | {got.seed_copies:.2f} | {got.degree} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
