"""Whose version matters first: the plan by the time until the part of the pool that is needed holds it.

`weighted_plan(nodes, needs, epoch)` is `trees.plan` where all matter alike. Else it makes some workers late, those without
which the pool still has the rate that it needs and the others are done sooner: the trees are built for the others, and a
late worker hangs below some of them only to have peers to pull from, which serve it when nothing else waits. Guarantees:
pure, deterministic; late workers hold at most the rate that can be spared; nobody is late where that does not bring the
needed part forward by `GAIN_MIN`; the reason says when weighting decided. Leaves to others: what a late worker is
served when (session), weights (the coordinator).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from echo2.broadcast.regions import egress_usd
from echo2.broadcast.topology import DEGREE_MAX, BroadcastPlan, NodeLink, Tree, can_connect, fluid_bound, is_sound
from echo2.broadcast.trees import PLAN_ARTIFACT_BYTES, PLAN_CHUNK_BYTES, plan

GAIN_MIN = 1.01
HOSTS = 4  # of a late worker, where not all are connected to all; the others' trees leave room for so many
KEPT_WITHIN = 1.05  # a plan stays while another choice of late workers would not be faster by more


@dataclass(frozen=True, slots=True)
class Needs:
    """`weights`: what each worker, in the order of the nodes after the seed, gives the pool, in rollouts/s; 0: it gives
    nothing now. `share` of their sum is needed."""

    weights: tuple[float, ...]
    share: float = 1.0

    @property
    def are_alike(self) -> bool:
        return len(set(self.weights)) <= 1

    @property
    def spare(self) -> float:
        """The weight that may be late."""
        total = sum(self.weights)
        return max(0.0, 1.0 - self.share) * total + 1e-9 * total

    def needed_s(self, worker_s: Sequence[float]) -> float:
        """When workers of the needed share of the weight hold what each holds at its time; all, where all weigh alike."""
        if self.are_alike:
            return max(worker_s, default=0.0)
        missing, at_s = sum(self.weights) - self.spare, 0.0
        for time_s, weight in sorted(zip(worker_s, self.weights, strict=True)):
            if missing <= 0:
                break
            if weight > 0:
                missing, at_s = missing - weight, time_s
        return at_s


def late_of(nodes: Sequence[NodeLink], needs: Needs) -> frozenset[int]:
    """Numbers of the nodes without which the others could be fastest, by the fluid bound; empty if by hardly more."""
    best, best_rate = frozenset[int](), fluid_bound(nodes).rate_bytes_per_s * GAIN_MIN
    if needs.are_alike:
        return best
    removed: set[int] = set()
    for number, rate in _removals(nodes, needs):
        removed.add(number)
        if rate > best_rate * (1 + 1e-9):
            best, best_rate = frozenset(removed), rate
    return best


def _removals(nodes: Sequence[NodeLink], needs: Needs) -> Iterator[tuple[int, float]]:
    """One worker after the other that limits the rest and can be spared; with the bound of those then left."""
    spare, weight_of = needs.spare, (0.0, *needs.weights)
    by_down = deque(sorted(range(1, len(nodes)), key=lambda i: (nodes[i].down, weight_of[i], i)))
    by_up = deque(sorted(range(1, len(nodes)), key=lambda i: (nodes[i].up, weight_of[i], i)))
    uplinks, gone = sum(node.up for node in nodes), set[int]()
    for left in range(len(nodes) - 2, 0, -1):
        while by_up and (by_up[0] in gone or weight_of[by_up[0]] > spare):
            by_up.popleft()
        is_by_downlink = nodes[by_down[0]].down <= uplinks / (left + 1)
        number = by_down[0] if is_by_downlink else by_up[0] if by_up else 0
        if number == 0 or weight_of[number] > spare:
            return
        spare -= weight_of[number]
        gone.add(number)
        uplinks -= nodes[number].up
        while by_down[0] in gone:
            by_down.popleft()
        yield number, min(nodes[0].up, nodes[by_down[0]].down, uplinks / left)


def is_fit(known: BroadcastPlan, nodes: Sequence[NodeLink], needs: Needs) -> bool:
    """Whether a plan for the same nodes may stay: its late workers can be spared, and others would hardly be better."""
    if [replace(node, is_late=False, deferred_share=0.0, turn=0) for node in known.nodes] != list(nodes):
        return False
    late = frozenset(number for number, node in enumerate(known.nodes) if node.is_late)
    if sum(needs.weights[number - 1] for number in late) > needs.spare:
        return False
    return _rate_without(nodes, late_of(nodes, needs)) <= KEPT_WITHIN * _rate_without(nodes, late)


def _rate_without(nodes: Sequence[NodeLink], late: frozenset[int]) -> float:
    return fluid_bound([node for number, node in enumerate(nodes) if number not in late]).rate_bytes_per_s


def weighted_plan(
    nodes: Sequence[NodeLink],
    needs: Needs,
    epoch: int,
    artifact_bytes: int = PLAN_ARTIFACT_BYTES,
    chunk_bytes: int = PLAN_CHUNK_BYTES,
    usd_per_s: float = 0.0,
) -> BroadcastPlan:
    """The plan with which the needed part is predicted to be done first; of such, with which all are. `nodes[0]` is the
    seed; `usd_per_s`: what a second is worth where traffic is charged (trees.plan)."""
    weights = () if needs.are_alike else needs.weights  # a mean by equal weights would differ in its last digit
    for_all = plan(nodes, epoch, artifact_bytes, chunk_bytes, weights=weights, usd_per_s=usd_per_s)
    late = late_of(nodes, needs)
    if not late:
        return for_all
    are_all_connected = len(nodes) <= DEGREE_MAX + 1
    needed = [node for number, node in enumerate(nodes) if number not in late]
    kept = [weight for number, weight in enumerate(needs.weights, start=1) if number not in late]
    degree_max = DEGREE_MAX - (0 if are_all_connected else HOSTS)
    first = plan(needed, epoch, artifact_bytes, chunk_bytes, degree_max, kept, usd_per_s=usd_per_s)
    trees = _with_late(nodes, late, first)
    assert is_sound(nodes, trees), "late workers hang where they can connect"
    times = _times(nodes, late, first)
    # Who can be spared need not have a pace kept for it: a version counts as spread when all others have it.
    rival = plan(nodes, epoch, artifact_bytes, chunk_bytes, is_paced=False)
    needed_s, alike_s = needs.needed_s(times), needs.needed_s(rival.predicted_s)
    if needed_s * GAIN_MIN > alike_s:
        return for_all  # all are done sooner
    reason = (
        f"{first.reason}; weighting decided: {len(late)} of {len(nodes) - 1} workers come later ({max(times):.2f} s), "
        f"because the pool needs {needs.share:.0%} of its rate and with all alike that would take {alike_s:.2f} s"
    )
    paced = iter(first.nodes)
    marked = tuple(replace(node, is_late=True) if number in late else next(paced) for number, node in enumerate(nodes))
    usd = egress_usd(nodes, trees, artifact_bytes)
    return BroadcastPlan(epoch, marked, trees, first.topology, times, artifact_bytes, reason, usd)


def _with_late(nodes: Sequence[NodeLink], late: frozenset[int], first: BroadcastPlan) -> tuple[Tree, ...]:
    """The trees with each late worker below some others, whose turn it is; below the seed if none can meet it."""
    needed = [number for number in range(len(nodes)) if number not in late]
    neighbours: list[set[int]] = [set() for _ in nodes]
    found: list[list[int]] = []
    for tree in first.trees:
        parents = [0] * (len(nodes) - 1)
        for child, parent in enumerate(tree.parents, start=1):
            parents[needed[child] - 1] = needed[parent]
            neighbours[needed[child]].add(needed[parent])
            neighbours[needed[parent]].add(needed[child])
        found.append(parents)
    hosts = deque(needed[1:])
    for number in sorted(late):
        mine = [_host_for(nodes, number, hosts, neighbours) for _ in found[:HOSTS]]
        for parents, host in zip(found, cycle(mine), strict=False):
            parents[number - 1] = host
        hosts.append(number)
    return tuple(Tree(tree.weight, tuple(parents)) for tree, parents in zip(first.trees, found, strict=True))


def _host_for(nodes: Sequence[NodeLink], number: int, hosts: deque[int], neighbours: Sequence[set[int]]) -> int:
    """The next in turn that can meet this one, neighbours from now on; those with all that they may have leave the turn."""
    for _ in range(len(hosts)):
        host = hosts.popleft()
        if len(neighbours[host]) >= DEGREE_MAX:
            continue
        hosts.append(host)
        if can_connect(nodes[host], nodes[number]):
            neighbours[host].add(number)
            neighbours[number].add(host)
            return host
    return 0


def _times(nodes: Sequence[NodeLink], late: frozenset[int], first: BroadcastPlan) -> tuple[float, ...]:
    """Per worker: those needed as their trees say; a late one not before all of them, nor before all uplinks can have
    sent a copy to everybody, nor than its downlink allows."""
    size, needed_s = first.predicted_bytes, iter(first.predicted_s)
    spread_s = (len(nodes) - 1) * size / sum(node.up for node in nodes)
    after_s = max(first.predicted_all_s, spread_s)
    return tuple(
        max(after_s, size / node.down) if number in late else next(needed_s)
        for number, node in enumerate(nodes[1:], start=1)
    )
