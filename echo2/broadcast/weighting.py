"""Which workers matter first: plans for the time until the needed part of the pool holds a version.

`weighted_plan(nodes, needs, epoch)` is `trees.plan` if all workers weigh the same. Otherwise it makes some workers late: those
without which the pool still reaches its needed rate and the others finish sooner. Trees are built for the others; a late worker
hangs below some of them only to have peers to pull from, which serve it when nothing else is queued. Guarantees: pure,
deterministic; late workers hold at most the rate that can be spared; no worker is late unless that brings the needed
part forward by `GAIN_MIN`; the reason says when weighting decided. Leaves to others: when a late worker is
served (session), weights (the coordinator).
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
HOSTS = 4  # peers that serve a late worker if the fleet is not fully connected; the others' trees leave that much room
KEPT_WITHIN = 1.05  # a plan stays unless another choice of late workers is faster by more than this


@dataclass(frozen=True, slots=True)
class Needs:
    """`weights`: what each worker, in the order of the nodes after the seed, contributes to the pool in rollouts/s; 0: nothing
    now. `share`: how much of their sum is needed."""

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
        """When the needed share of the weight holds the version, given each worker's time; with equal weights, when all do."""
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
    """Numbers of the nodes whose removal speeds up the others most, by the fluid bound; empty if the gain is below GAIN_MIN."""
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
    """Yields spareable workers that limit the rest, one at a time, each with the bound for those then left."""
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
    """Whether a plan for the same nodes may stay: its late workers can be spared, and no other choice is much better."""
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
    """The plan that is predicted to finish the needed part first; among such, the one that finishes all first. `nodes[0]` is
    the seed; `usd_per_s`: what a second is worth where traffic is charged (trees.plan)."""
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
    # Spareable workers need no paced schedule: a version counts as spread when all others have it.
    rival = plan(nodes, epoch, artifact_bytes, chunk_bytes, is_paced=False)
    needed_s, alike_s = needs.needed_s(times), needs.needed_s(rival.predicted_s)
    if needed_s * GAIN_MIN > alike_s:
        return for_all  # weighting would gain too little
    reason = (
        f"{first.reason}; weighting decided: {len(late)} of {len(nodes) - 1} workers are served later ({max(times):.2f} s), "
        f"because the pool needs {needs.share:.0%} of its rate and treating all alike would take {alike_s:.2f} s"
    )
    paced = iter(first.nodes)
    marked = tuple(replace(node, is_late=True) if number in late else next(paced) for number, node in enumerate(nodes))
    usd = egress_usd(nodes, trees, artifact_bytes)
    return BroadcastPlan(epoch, marked, trees, first.topology, times, artifact_bytes, reason, usd)


def _with_late(nodes: Sequence[NodeLink], late: frozenset[int], first: BroadcastPlan) -> tuple[Tree, ...]:
    """The trees with each late worker below some others, in round-robin order; below the seed if none can connect to it."""
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
    """The next host in rotation that can connect to this worker; records them as neighbours and drops hosts at the degree limit."""
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
    """Per worker: needed ones as their trees predict; a late one not before all of those, nor before all uplinks can have
    sent a copy to everyone, nor faster than its downlink allows."""
    size, needed_s = first.predicted_bytes, iter(first.predicted_s)
    spread_s = (len(nodes) - 1) * size / sum(node.up for node in nodes)
    after_s = max(first.predicted_all_s, spread_s)
    return tuple(
        max(after_s, size / node.down) if number in late else next(needed_s)
        for number, node in enumerate(nodes[1:], start=1)
    )
