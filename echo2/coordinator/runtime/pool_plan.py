"""Makes a plan of the pool. The module imports little, so that a process of its own starts fast.

Guarantees: nothing is written to standard output. Leaves to others: what a good plan is (cost_model), where it is made (aside).
"""

from __future__ import annotations

from echo2.coordinator.runtime.quiet import quiet_solver
from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig


def make_plan(snapshot: FleetSnapshot, config: PlanConfig, previous: Plan | None) -> Plan:
    """Makes the next plan. Loads the libraries on first use, because that takes longer than the daemon's start."""
    from echo2.coordinator.tree_predictor import TreeBroadcast
    from echo2.cost_model.egress import next_plan_with_egress

    with quiet_solver():
        return next_plan_with_egress(snapshot, config, previous, TreeBroadcast(config.broadcast_efficiency))
