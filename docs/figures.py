"""Draws the figures of docs/concepts.md from the project's own simulators.

    python docs/figures.py

`overlap.svg`: what a larger staleness bound buys on a slow uplink, by the fleet model. `broadcast.svg`: how a version reaches
eight workers, from the learner alone and by the plan that echo2 makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.broadcast_model.network import BroadcastNetwork
from benchmarks.broadcast_model.scenarios import wan_fleet
from benchmarks.fleet_model.run import reports_of
from echo2.broadcast.plan import BroadcastPlan, NodeLink, fluid_bound
from echo2.broadcast.trees import plan, star

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "figures"
VERSION_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10


def overlap() -> None:
    """Utilisation and cost against S, simulated with the real planner."""
    bounds = (1, 2, 3, 4, 6, 8, 11)
    rows = [row for _, row in reports_of(ROOT / "benchmarks" / "scenarios" / "slow-uplink.toml", bounds, steps=60)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(bounds, [row.utilisation for row in rows], "o-", label="simulated")
    left.plot(bounds, [row.predicted_utilisation for row in rows], "x--", label="predicted")
    left.set(xlabel="staleness bound S, steps", ylabel="utilisation of the learner", ylim=(0, 1.05))
    left.legend(frameon=False)
    right.plot(bounds, [row.usd_per_step for row in rows], "o-")
    right.set(xlabel="staleness bound S, steps", ylabel="USD per step for workers", ylim=(0, None))
    for row, bound in zip(rows, bounds, strict=True):
        left.annotate(f"κ={row.kappa}", (bound, row.utilisation), (0, -14), textcoords="offset points", fontsize=7)
        right.annotate(f"{row.pool} workers", (bound, row.usd_per_step), (2, 5), textcoords="offset points", fontsize=7)
    figure.savefig(TARGET / "overlap.svg", metadata={"Date": None})


def _arrivals(made: BroadcastPlan, nodes: list[NodeLink], step_s: float) -> tuple[list[float], list[list[float]]]:
    """Share of the version that each worker holds, every `step_s`."""
    net = BroadcastNetwork(made)
    net.publish(VERSION_BYTES, CHUNK_BYTES)
    times: list[float] = []
    shares: list[list[float]] = [[] for _ in nodes[1:]]

    def look(now: float) -> None:
        times.append(now)
        for node, held in zip(list(net.nodes.values())[1:], shares, strict=True):
            held.append(min(1.0, node.received_bytes / VERSION_BYTES))
        if not net.is_done:
            net.at(now + step_s, lambda: look(now + step_s))

    net.at(0.0, lambda: look(0.0))
    net.run(600.0)
    return times, shares


def broadcast() -> None:
    """One version to eight workers of mixed links, by the real session cores on a virtual clock."""
    nodes = wan_fleet("heterogeneous", 8)
    ours = plan(nodes, 1, VERSION_BYTES, CHUNK_BYTES)
    alone = BroadcastPlan(1, tuple(nodes), star(nodes), "star")
    bound_s = VERSION_BYTES / fluid_bound(nodes).rate_bytes_per_s
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True, sharex=True)
    for panel, made, title in ((panels[0], alone, "from the learner alone"), (panels[1], ours, "echo2's plan")):
        times, shares = _arrivals(made, nodes, 0.25)
        for held in shares:
            panel.plot(times, held, linewidth=1)
        panel.axvline(bound_s, color="black", linestyle=":", linewidth=1)
        panel.set(title=title, xlabel="seconds since publication")
    panels[0].set(ylabel="share of the version held")
    panels[1].annotate("no way could be faster", (bound_s, 0.04), (6, 0), textcoords="offset points", fontsize=7)
    figure.savefig(TARGET / "broadcast.svg", metadata={"Date": None})


def main() -> int:
    plt.rcParams.update({"svg.hashsalt": "echo2", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    TARGET.mkdir(exist_ok=True)
    overlap()
    broadcast()
    return 0


if __name__ == "__main__":
    sys.exit(main())
