"""Large fleets: `python -m echo2.sim.broadcast_scenarios [--workers 64 256] [--mib 64]` prints time against the bound.

Same seed, same table: two versions of the code can be compared line by line.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.topology import NodeLink, chunk_bytes_for, degree_of, fluid_bound
from echo2.broadcast.trees import plan
from echo2.sim.broadcast_network import BroadcastNetwork

MBIT = 125_000.0
HETEROGENEOUS = ((50, 150), (200, 400), (75, 200), (100, 200), (150, 300), (50, 200), (100, 400), (75, 150))
RTTS_S = (0.02, 0.06, 0.08)


def wan_fleet(kind: str, workers: int) -> list[NodeLink]:
    """A 200 Mbit/s seed; workers of 100 up and 200 down, or of the heterogeneous mix; three regions."""
    nodes = [NodeLink(PeerId("seed"), "seed", ("seed:1",), 200 * MBIT, 400 * MBIT, 0.06)]
    for i in range(workers):
        up, down = (100, 200) if kind == "homogeneous" else HETEROGENEOUS[i % len(HETEROGENEOUS)]
        nodes.append(NodeLink(PeerId(f"w{i}"), f"w{i}", (f"w{i}:1",), up * MBIT, down * MBIT, RTTS_S[i % 3]))
    return nodes


@dataclass(frozen=True, slots=True)
class Outcome:
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


def broadcast(nodes: list[NodeLink], total_bytes: int, chunk_bytes: int, limit_s: float = 3600.0) -> Outcome:
    """One artifact to everyone, by the real session cores; chunks have at most `chunk_bytes`."""
    made = plan(nodes, 1, total_bytes, chunk_bytes)
    net = BroadcastNetwork(made)
    net.connect_all()
    net.publish(total_bytes, chunk_bytes_for(made, chunk_bytes))
    net.run(limit_s)
    return Outcome(
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
