"""Candidate trees and the choice among them: `plan(nodes, epoch)`.

Guarantees: deterministic; a candidate is returned only if it is sound and within the degree limit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo2.broadcast.paces import own_earliest, paced_s, paced_trees, stages
from echo2.broadcast.regions import egress_usd, regional
from echo2.broadcast.topology import (
    DEGREE_MAX,
    BroadcastPlan,
    NodeLink,
    Tree,
    can_connect,
    degree_of,
    fluid_bound,
    is_sound,
    latencies,
    predict,
    suitable_chunk_bytes,
)

PLAN_ARTIFACT_BYTES = 64 << 20
PLAN_CHUNK_BYTES = 256 << 10
BALANCE_ROUNDS, BALANCE_STEP = 80, 0.1
SEED_SPARED_SHARE = 1.1  # of what the seed must send: it may send this much, so that no uplink is completely full
SLOWEST_NEAR = 1.05  # of the fastest candidate's time for all: among candidates within it, the mean decides
MEAN_GAIN_MIN = 1.05  # a smaller gain is not worth a plan that does not treat all alike
STRONG_ROOM = 1.25  # of the uplink that strong relays need: an error of measured rates must not make it short
WEIGHT_MIN = 2e-3  # a tree with less weight is not worth a relay window


def star(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """The seed sends everything to everyone."""
    return (Tree(1.0, (0,) * (len(nodes) - 1)),)


def chain(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Each worker passes everything on to the next, fastest uplink first."""
    order = sorted(range(1, len(nodes)), key=lambda i: (not nodes[i].addresses, -nodes[i].up, i))
    parents = [0] * (len(nodes) - 1)
    for before, after in itertools.pairwise(order):
        parents[after - 1] = before
    return (Tree(1.0, tuple(parents)),)


def weighted_multi_tree(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Each worker relays its share to all others; the seed sends directly what their uplinks cannot carry."""
    count = len(nodes) - 1
    if count < 2:
        return star(nodes)
    uplinks = sum(node.up for node in nodes[1:])
    relayed = 1.0 - _direct_share(nodes)
    shares = [relayed * node.up / uplinks for node in nodes[1:]]
    trees = [Tree(share, _relayed_by(nodes, root)) for root, share in enumerate(shares, start=1)]
    rest = 1.0 - sum(tree.weight for tree in trees)
    if rest > 1e-9:
        trees.append(Tree(rest, (0,) * count))
    is_full_mesh = all(node.addresses for node in nodes) or sum(not node.addresses for node in nodes) < 2
    return tuple(trees) if is_full_mesh else _balanced(nodes, trees)


def strong_relays(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Only the strongest uplinks relay, as few as suffice for the fluid bound with room to spare; the seed sends one copy. The
    others' trees are spares. Empty if all are needed, or if the others do not make chunks smaller: then an even load is better."""
    needed = STRONG_ROOM * (len(nodes) - 2) * fluid_bound(nodes).rate_bytes_per_s
    order = sorted((i for i in range(1, len(nodes)) if nodes[i].addresses), key=lambda i: (-nodes[i].up, i))
    sums = list(itertools.accumulate(nodes[i].up for i in order))
    count = next((number for number, total in enumerate(sums, start=1) if total >= needed), 0)
    if not count:
        return ()
    if 2 * min(node.up for node in nodes) > min(nodes[0].up, nodes[order[count - 1]].up):
        return ()
    weights = [nodes[root].up / sums[count - 1] if place < count else 0.0 for place, root in enumerate(order)]
    return tuple(Tree(weight, _relayed_by(nodes, root)) for weight, root in zip(weights, order, strict=True))


def _direct_share(nodes: Sequence[NodeLink]) -> float:
    """The share that the seed sends to everyone directly. If the workers' uplinks are not the limit, their spare capacity is
    spread evenly, as long as the seed then sends not much more than it must."""
    count = len(nodes) - 1
    rate = fluid_bound(nodes).rate_bytes_per_s
    uplinks = sum(node.up for node in nodes[1:])
    relayable = uplinks / ((count - 1) * rate)
    least = max(0.0, 1.0 - relayable)
    even = max(least, 1.0 - relayable * min(1.0, count * rate / (nodes[0].up + uplinks)))
    return min(even, least + (SEED_SPARED_SHARE - 1.0) * (1.0 / (count - 1) + least))


def _balanced(nodes: Sequence[NodeLink], trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The same trees with weights that relieve the most loaded uplink: workers that relay to nodes which others cannot
    reach carry more than their own share."""
    edges = [Counter(tree.parents) for tree in trees]
    weights = best = [tree.weight for tree in trees]
    best_peak = float("inf")
    for _ in range(BALANCE_ROUNDS):
        used = [0.0] * len(nodes)
        for weight, counts in zip(weights, edges, strict=True):
            for node, count in counts.items():
                used[node] += weight * count / nodes[node].up
        peak = max(used)
        if peak < best_peak:
            best, best_peak = weights, peak
        tightness = [(use / peak) ** 16 for use in used]
        costs = [sum(count / nodes[node].up * tightness[node] for node, count in counts.items()) for counts in edges]
        mean = sum(weight * cost for weight, cost in zip(weights, costs, strict=True))
        moved = [w * math.exp(BALANCE_STEP * (1 - cost / mean)) for w, cost in zip(weights, costs, strict=True)]
        weights = [weight / sum(moved) for weight in moved]
    kept = [(weight, tree.parents) for weight, tree in zip(best, trees, strict=True) if weight > WEIGHT_MIN]
    total = sum(weight for weight, _ in kept)
    return tuple(Tree(weight / total, parents) for weight, parents in kept)


def _relayed_by(nodes: Sequence[NodeLink], root: int) -> tuple[int, ...]:
    """Seed -> root -> the others; nodes that the root cannot reach hang below the strongest node that can reach both."""
    parents = [root] * (len(nodes) - 1)
    parents[root - 1] = 0
    for child in range(1, len(nodes)):
        if child == root or can_connect(nodes[root], nodes[child]):
            continue
        helpers = [
            i for i in range(1, len(nodes))
            if i not in (root, child) and can_connect(nodes[i], nodes[child]) and can_connect(nodes[i], nodes[root])
        ]  # fmt: skip
        parents[child - 1] = max(helpers, key=lambda i: (nodes[i].up, -((i - root) % len(nodes))), default=0)
    return tuple(parents)


def striped(nodes: Sequence[NodeLink], stripes: int, degree_max: int = DEGREE_MAX) -> tuple[Tree, ...]:
    """`stripes` equal trees; each worker has children in one of them (rarely two), in proportion to its uplink.

    An edge carries 1/stripes of the rate r, so a node with uplink u has room for floor(stripes*u/r) children; r is the
    largest rate at which that suffices for all workers in all trees. Empty if no rate fits the degree limit.
    """
    fanout = _fanout(nodes, stripes, degree_max)
    if fanout is None:
        return ()
    room = _dealt(nodes, fanout, stripes)
    trees = [_stripe(nodes, mine) for mine in room]
    if any(parents is None for parents in trees):
        return ()
    return tuple(Tree(1 / stripes, parents) for parents in trees if parents is not None)


def _fanout(nodes: Sequence[NodeLink], stripes: int, degree_max: int) -> list[int] | None:
    """Number of children per node at the best rate; nodes that cannot be dialled have none."""
    needed = stripes * (len(nodes) - 1)
    low, high = 0.0, fluid_bound(nodes).rate_bytes_per_s
    best: list[int] | None = None
    for _ in range(30):
        rate = (low + high) / 2
        fanout = [min(degree_max, int(stripes * nodes[0].up / rate + 1e-9))]
        for node in nodes[1:]:
            children = int(stripes * node.up / rate + 1e-9) if node.addresses else 0
            fanout.append(min(degree_max - stripes, children))
        if sum(fanout) >= needed and fanout[0] >= stripes:
            low, best = rate, fanout
        else:
            high = rate
    return best


def _dealt(nodes: Sequence[NodeLink], fanout: Sequence[int], stripes: int) -> list[dict[int, int]]:
    """Room for children per stripe and node: the seed's is spread evenly, then workers are added until a stripe has enough."""
    room = [{0: fanout[0] // stripes + (1 if t < fanout[0] % stripes else 0)} for t in range(stripes)]
    ranked = sorted(range(1, len(nodes)), key=lambda i: (-fanout[i], i))
    mixed = [i for first in range(stripes) for i in ranked[first::stripes]]  # so each stripe gets fast and slow workers
    left = {i: fanout[i] for i in mixed if fanout[i] > 0}
    queue = list(left)
    at = 0
    for mine in room:
        missing = len(nodes) - 1 - mine[0]
        while missing > 0 and at < len(queue):
            node = queue[at]
            taken = min(left[node], missing)
            mine[node] = mine.get(node, 0) + taken
            left[node] -= taken
            missing -= taken
            if left[node] == 0:
                at += 1
    return room


def _stripe(nodes: Sequence[NodeLink], room: dict[int, int]) -> tuple[int, ...] | None:
    """Fills the tree breadth first, widest nodes first, so that it is shallow; leaves take the remaining slots."""
    parents = [0] * (len(nodes) - 1)
    interior = sorted((i for i in room if i != 0), key=lambda i: (-room[i], i))
    inner = set(interior)
    order = [*interior, *(i for i in range(1, len(nodes)) if i not in inner)]
    places = [0]
    at, used = 0, 0
    for child in order:
        while at < len(places) and used >= room[places[at]]:
            at, used = at + 1, 0
        if at == len(places):
            return None
        parents[child - 1] = places[at]
        used += 1
        if child in inner:
            places.append(child)
    return tuple(parents)


STRIPES_TRIED = (6, 8, 12)
STRIPES_OF_LARGE_FLEETS, LARGE_FLEET = (8,), 200  # one candidate keeps a plan for 1,000 workers well under 200 ms


def interior_disjoint(nodes: Sequence[NodeLink], degree_max: int = DEGREE_MAX) -> tuple[Tree, ...]:
    """Stripes in the number that is predicted fastest."""
    tried = STRIPES_OF_LARGE_FLEETS if len(nodes) > LARGE_FLEET else STRIPES_TRIED
    candidates = [trees for stripes in tried if (trees := striped(nodes, stripes, degree_max))]
    candidates = [trees for trees in candidates if degree_of(trees, len(nodes)) <= degree_max]
    if len(candidates) < 2:
        return candidates[0] if candidates else ()
    best = lambda trees: predict(nodes, trees, PLAN_ARTIFACT_BYTES, PLAN_CHUNK_BYTES).all_s  # noqa: E731
    return min(candidates, key=best, default=())


def _builders(
    nodes: Sequence[NodeLink], degree_max: int
) -> dict[str, Callable[[Sequence[NodeLink]], tuple[Tree, ...]]]:
    """Builders of candidates: a full mesh if the degree limit allows it; trees by region if traffic is charged."""
    count = len(nodes)
    builders: dict[str, Callable[[Sequence[NodeLink]], tuple[Tree, ...]]] = {"star": star, "chain": chain}
    if count <= degree_max + 1:
        builders |= {"multi_tree": weighted_multi_tree, "strong_relays": strong_relays}
    else:
        builders["interior_disjoint_trees"] = functools.partial(interior_disjoint, degree_max=degree_max)
    if any(node.egress_usd_per_gib for node in nodes):
        by_region = functools.partial(regional, degree_max=degree_max, striped=striped)
        builders |= {"regional": by_region, "regional_chain": functools.partial(by_region, is_chain=True)}
    return builders


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """Trees, and when each worker is expected to hold the artifact. `nodes`: with their deferred shares."""

    name: str
    nodes: tuple[NodeLink, ...]
    trees: tuple[Tree, ...]
    worker_s: tuple[float, ...]
    usd: float = 0.0

    @property
    def all_s(self) -> float:
        return max(self.worker_s)

    def mean_s(self, weights: Sequence[float]) -> float:
        """The workers' mean time, weighted."""
        return sum(w * s for w, s in zip(weights, self.worker_s, strict=True)) / sum(weights)


def plan(
    nodes: Sequence[NodeLink],
    epoch: int,
    artifact_bytes: int = PLAN_ARTIFACT_BYTES,
    chunk_bytes: int = PLAN_CHUNK_BYTES,
    degree_max: int = DEGREE_MAX,
    weights: Sequence[float] = (),
    is_paced: bool = True,
    usd_per_s: float = 0.0,
) -> BroadcastPlan:
    """Chooses the candidate with the least predicted time until every worker holds an artifact; among those within a few per
    cent of it, the one with the least mean time, weighted by `weights` (equal if none are given). `is_paced` False: only the
    former. Where traffic is charged, chooses the least sum of traffic and time, with time worth `usd_per_s`. `nodes[0]` is
    the seed."""
    if len(nodes) < 2:
        return BroadcastPlan(epoch, tuple(nodes), (), "none", (), artifact_bytes, "no worker to send to")
    weighed = tuple(weights) if sum(weights) > 0 else (1.0,) * (len(nodes) - 1)
    candidates: list[TreeChoice] = []
    for name, build in _builders(nodes, degree_max).items():
        trees = build(nodes)
        if is_sound(nodes, trees) and (degree_of(trees, len(nodes)) <= degree_max or name == "star"):
            size = suitable_chunk_bytes(nodes, trees, chunk_bytes)
            guess = predict(nodes, trees, artifact_bytes, size)
            usd = egress_usd(nodes, trees, artifact_bytes)
            candidates.append(TreeChoice(name, tuple(nodes), trees, guess.worker_s, usd))
    paced = _paced(nodes, weighed, artifact_bytes, chunk_bytes, degree_max) if is_paced else None
    candidates += [paced] if paced is not None else []
    in_limit = [f for f in candidates if degree_of(f.trees, len(nodes)) <= degree_max] or candidates
    fastest = min(in_limit, key=lambda candidate: candidate.all_s)
    chosen = min((f for f in in_limit if f.nodes == tuple(nodes)), key=lambda candidate: candidate.all_s)
    for candidate in in_limit:
        is_near = candidate.all_s <= SLOWEST_NEAR * fastest.all_s
        is_first = chosen.all_s > SLOWEST_NEAR * fastest.all_s
        if is_near and (is_first or candidate.mean_s(weighed) < chosen.mean_s(weighed) / MEAN_GAIN_MIN):
            chosen = candidate
    chosen = _worth_its_price(chosen, in_limit, fastest, usd_per_s)
    reason = _reason(chosen, candidates, nodes, weighed, artifact_bytes)
    return BroadcastPlan(
        epoch, chosen.nodes, chosen.trees, chosen.name, chosen.worker_s, artifact_bytes, reason, chosen.usd
    )


def _worth_its_price(
    chosen: TreeChoice, in_limit: Sequence[TreeChoice], fastest: TreeChoice, usd_per_s: float
) -> TreeChoice:
    """The candidate with the least sum of traffic and time costs; if time has no price, only those near the fastest compete. The
    first choice stays unless another is cheaper by more than the predictions' error."""
    if not any(candidate.usd for candidate in in_limit):
        return chosen
    near = [candidate for candidate in in_limit if usd_per_s > 0 or candidate.all_s <= SLOWEST_NEAR * fastest.all_s]
    cheapest = min(near, key=lambda candidate: candidate.usd + usd_per_s * candidate.all_s)
    is_cheaper = (cheapest.usd + usd_per_s * cheapest.all_s) * MEAN_GAIN_MIN < chosen.usd + usd_per_s * chosen.all_s
    return cheapest if is_cheaper else chosen


def _paced(
    nodes: Sequence[NodeLink], weights: Sequence[float], artifact_bytes: int, chunk_bytes: int, degree_max: int
) -> TreeChoice | None:
    """Some workers first, the others at their own pace; None if that gains nothing or the fleet is not fully connected."""
    if not 3 <= len(nodes) <= degree_max + 1:
        return None
    made = stages(nodes, weights)
    if made is None:
        return None
    with_paces, trees = paced_trees(nodes, made, _relayed_by)
    if not is_sound(nodes, trees):
        return None
    size = suitable_chunk_bytes(nodes, trees, chunk_bytes)
    late = latencies(nodes, trees, artifact_bytes, size)
    times = paced_s(with_paces, made, trees)
    worker_s = tuple(artifact_bytes * time_s + late_s for time_s, late_s in zip(times, late, strict=True))
    return TreeChoice("paced_multi_tree", with_paces, trees, worker_s, egress_usd(nodes, trees, artifact_bytes))


def _reason(
    chosen: TreeChoice, candidates: Sequence[TreeChoice], nodes: Sequence[NodeLink], weights: Sequence[float], size: int
) -> str:
    bound, earliest = fluid_bound(nodes), own_earliest(nodes)
    is_charged = any(other.usd for other in candidates)
    times = ", ".join(
        f"{other.name} {other.all_s:.2f} s, mean {other.mean_s(weights):.2f} s"
        + (f", {other.usd:.2f} USD of traffic" if is_charged else "")
        for other in candidates
    )
    if is_charged and chosen.all_s > SLOWEST_NEAR * min(other.all_s for other in candidates):
        whom = f"{size / 1e6:.1f} MB to {len(nodes) - 1} workers"
        return f"{chosen.name} has the least cost of time and traffic for {whom} ({times})"
    by_mean = ", with the least mean time of those near the fastest," if chosen.name.startswith("paced") else ""
    return (
        f"{chosen.name} is predicted fastest{by_mean} for {size / 1e6:.1f} MB to {len(nodes) - 1} workers ({times}); "
        f"no way could be faster than {size / bound.rate_bytes_per_s:.2f} s for all, because of {bound.binding}, "
        f"nor than {size * min(earliest):.2f} s for the first worker"
    )
