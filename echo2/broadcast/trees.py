"""Which trees carry a version, and for whom they wait: `weighted_plan(nodes, needs, epoch)`.

Candidate trees are built, predicted, and the fastest is taken. Late are workers whose downlink would keep the others waiting, and
those that the pool can spare and that the others are faster without. Trees push them nothing and only give them peers to pull
from, which serve them when nobody else could be. Guarantees: pure, deterministic; a plan is sound and within the degree limit;
its reason says why it won. Leaves to others: when a late worker is served (session), weights (the coordinator).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from echo2.base.clock import Pace
from echo2.broadcast.plan import (
    BY_REGION,
    DEGREE_MAX,
    BroadcastPlan,
    NodeLink,
    Tree,
    can_connect,
    degree_of,
    fluid_bound,
    is_sound,
    predict,
    regions_of,
    suitable_chunk_bytes,
)

PLAN_ARTIFACT_BYTES = 64 << 20  # a usual delta, until one was published
PLAN_CHUNK_BYTES = 256 << 10  # NodeOptions.chunk_bytes
BALANCE_ROUNDS, BALANCE_STEP = 80, 0.1  # settles within 1 % of the best peak on 32 nodes
SEED_SPARED_SHARE = 1.1  # of what the seed must send: it may send this much, so that no uplink is completely full
PREDICTED_WITHIN = 1.05  # by how much predictions are off: candidates nearer than this are equally fast
BY_REGION_MIN_S = 4.0  # slow start over one more hop takes a twentieth of it
STRONG_ROOM = 1.25  # of the uplink that strong relays need: an error of measured rates must not make it short
FAR_RTT_S = 0.25  # beyond the usual round trip: over a satellite it is 0.5 s and more, on the ground at most 0.3 s
WEIGHT_MIN = 2e-3  # a tree with less weight is not worth a relay window


def star(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """The seed sends everything to everyone; what it cannot reach hangs below a worker that can."""
    return (Tree(1.0, _relayed_by(nodes, 0)),)


def weighted_multi_tree(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Each worker that is not far relays its share to all others; the seed sends directly what their uplinks cannot carry."""
    count = len(nodes) - 1
    if count < 2:
        return star(nodes)
    near = _near(nodes)
    uplinks = sum(nodes[root].up for root in near)
    relayed = 1.0 - _direct_share(nodes, uplinks)
    trees = [Tree(relayed * nodes[root].up / uplinks, _relayed_by(nodes, root)) for root in near]
    rest = 1.0 - sum(tree.weight for tree in trees)
    if rest > 1e-9:
        trees.append(Tree(rest, _relayed_by(nodes, 0)))
    return tuple(trees) if _is_full_mesh(nodes) else _balanced(nodes, trees)


def _near(nodes: Sequence[NodeLink]) -> list[int]:
    """The workers that may relay: all but those over a satellite, whose relayed chunks the others would wait for."""
    usual = median(node.rtt_s for node in nodes[1:])
    return [number for number in range(1, len(nodes)) if nodes[number].rtt_s <= usual + FAR_RTT_S]


def _is_full_mesh(nodes: Sequence[NodeLink]) -> bool:
    return sum(not node.addresses for node in nodes) < 2


def strong_relays(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Only the strongest uplinks relay, as few as suffice for the fluid bound with room to spare; the seed sends one copy. The
    others' trees are spares. Empty if all are needed, or if the others do not make chunks smaller: then an even load is better."""
    needed = STRONG_ROOM * (len(nodes) - 2) * fluid_bound(nodes).rate_bytes_per_s
    order = sorted((i for i in _near(nodes) if nodes[i].addresses), key=lambda i: (-nodes[i].up, i))
    sums = list(itertools.accumulate(nodes[i].up for i in order))
    count = next((number for number, total in enumerate(sums, start=1) if total >= needed), 0)
    if not count:
        return ()
    if 2 * min(node.up for node in nodes) > min(nodes[0].up, nodes[order[count - 1]].up):
        return ()
    weights = [nodes[root].up / sums[count - 1] if place < count else 0.0 for place, root in enumerate(order)]
    return tuple(Tree(weight, _relayed_by(nodes, root)) for weight, root in zip(weights, order, strict=True))


def _direct_share(nodes: Sequence[NodeLink], uplinks: float) -> float:
    """The share that the seed sends to everyone directly. If the workers' uplinks are not the limit, their spare capacity is
    spread evenly, as long as the seed then sends not much more than it must."""
    count = len(nodes) - 1
    rate = fluid_bound(nodes).rate_bytes_per_s
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
    pairs = [(weight, tree.parents) for weight, tree in zip(best, trees, strict=True) if weight > WEIGHT_MIN]
    total = sum(weight for weight, _ in pairs)
    return tuple(Tree(weight / total, parents) for weight, parents in pairs)


def _relayed_by(nodes: Sequence[NodeLink], root: int) -> tuple[int, ...]:
    """Seed -> root (0: the seed itself) -> the others; nodes that the root cannot reach hang below the strongest that can reach
    both."""
    parents = [root] * (len(nodes) - 1)
    if root:
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
    """`stripes` equal trees; each worker has children in one of them (rarely two), in proportion to its uplink. An edge carries
    1/stripes of the rate r, so a node with uplink u has room for floor(stripes*u/r) children; r is the largest rate at which
    that suffices for all workers in all trees. Empty if no rate fits the degree limit."""
    fanout = _fanout(nodes, stripes, degree_max)
    if fanout is None:
        return ()
    room = _dealt(nodes, fanout, stripes)
    trees = [_stripe(nodes, slots) for slots in room]
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
    for slots in room:
        missing = len(nodes) - 1 - slots[0]
        while missing > 0 and at < len(queue):
            node = queue[at]
            count = min(left[node], missing)
            slots[node] = slots.get(node, 0) + count
            left[node] -= count
            missing -= count
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


STRIPES_TRIED = (6, 8, 12)  # fewer fill uplinks badly, more need too many neighbours
STRIPES_OF_LARGE_FLEETS, LARGE_FLEET = (8,), 200  # one candidate keeps a plan for 1,000 workers well under 200 ms


def interior_disjoint(nodes: Sequence[NodeLink], degree_max: int = DEGREE_MAX) -> tuple[Tree, ...]:
    """Stripes in the number that is predicted fastest."""
    tried = STRIPES_OF_LARGE_FLEETS if len(nodes) > LARGE_FLEET else STRIPES_TRIED
    candidates = [trees for stripes in tried if (trees := striped(nodes, stripes, degree_max))]
    candidates = [trees for trees in candidates if degree_of(trees, len(nodes)) <= degree_max]
    best = lambda trees: predict(nodes, trees, PLAN_ARTIFACT_BYTES, PLAN_CHUNK_BYTES).all_s  # noqa: E731
    return min(candidates, key=best, default=())


def _candidates(nodes: Sequence[NodeLink], degree_max: int) -> dict[str, tuple[Tree, ...]]:
    """A full mesh if the degree limit allows it; trees by region if traffic is charged. Some may be unsound or empty."""
    trees = {"star": star(nodes)}
    if len(nodes) <= degree_max + 1:
        trees |= {
            "multi_tree": weighted_multi_tree(nodes), "strong_relays": strong_relays(nodes), BY_REGION: by_region(nodes),
        }  # fmt: skip
    else:
        trees["interior_disjoint_trees"] = interior_disjoint(nodes, degree_max)
    if any(node.egress_usd_per_gib for node in nodes):
        trees |= {"regional": regional(nodes, degree_max), "regional_chain": regional(nodes, degree_max, is_chain=True)}
    return trees


def plan(
    nodes: Sequence[NodeLink],
    epoch: int,
    artifact_bytes: int = PLAN_ARTIFACT_BYTES,
    chunk_bytes: int = PLAN_CHUNK_BYTES,
    degree_max: int = DEGREE_MAX,
    usd_per_s: float = 0.0,
    *,
    are_all_needed: bool = True,
) -> BroadcastPlan:
    """Treats all workers alike: the candidate with the least predicted time until every worker holds an artifact. Where traffic is
    charged, the one with the least sum of traffic and time, with time worth `usd_per_s`. `nodes[0]` is the seed; `are_all_needed`
    False: late workers come below these."""
    if len(nodes) < 2:
        return BroadcastPlan(epoch, tuple(nodes), (), "none", (), artifact_bytes, "no worker to send to")
    candidates: list[BroadcastPlan] = []
    for name, trees in _candidates(nodes, degree_max).items():
        if (
            (are_all_needed or name != BY_REGION)
            and is_sound(nodes, trees)
            and (degree_of(trees, len(nodes)) <= degree_max or name == "star")
        ):
            size = suitable_chunk_bytes(nodes, trees, chunk_bytes)
            times, usd = predict(nodes, trees, artifact_bytes, size).worker_s, egress_usd(nodes, trees, artifact_bytes)
            candidates.append(BroadcastPlan(epoch, tuple(nodes), trees, name, times, artifact_bytes, "", usd))
    in_limit = [f for f in candidates if degree_of(f.trees, len(nodes)) <= degree_max] or candidates
    chosen = _worth_its_price(in_limit, usd_per_s)
    reason = _reason(chosen, candidates, nodes, artifact_bytes)
    others = next((c.trees for c in candidates if chosen.topology == BY_REGION and c.topology == "multi_tree"), ())
    return replace(chosen, reason=reason, others=others)


def _worth_its_price(candidates: Sequence[BroadcastPlan], usd_per_s: float) -> BroadcastPlan:
    """The fastest candidate, or one as fast that enters each region once; where traffic is charged, the one with the least sum of
    traffic and time costs, if that is less by more than the predictions' error. If time has no price, only those near the fastest
    compete."""
    fastest = min(candidates, key=lambda candidate: candidate.predicted_all_s)
    near_s = PREDICTED_WITHIN * fastest.predicted_all_s
    by_region = (c for c in candidates if c.topology == BY_REGION and BY_REGION_MIN_S < c.predicted_all_s <= near_s)
    fastest = next(by_region, fastest)
    if not any(candidate.egress_usd for candidate in candidates):
        return fastest

    def cost(candidate: BroadcastPlan) -> float:
        return candidate.egress_usd + usd_per_s * candidate.predicted_all_s

    near = [c for c in candidates if usd_per_s > 0 or c.predicted_all_s <= PREDICTED_WITHIN * fastest.predicted_all_s]
    cheapest = min(near, key=cost)
    return cheapest if cost(cheapest) * PREDICTED_WITHIN < cost(fastest) else fastest


def _reason(chosen: BroadcastPlan, candidates: Sequence[BroadcastPlan], nodes: Sequence[NodeLink], size: int) -> str:
    is_charged = any(other.egress_usd for other in candidates)
    times = ", ".join(
        f"{other.topology} {other.predicted_all_s:.2f} s"
        + (f", {other.egress_usd:.2f} USD of traffic" if is_charged else "")
        for other in candidates
    )
    whom = f"{size / 1e6:.1f} MB to {len(nodes) - 1} workers"
    if is_charged and chosen.predicted_all_s > PREDICTED_WITHIN * min(other.predicted_all_s for other in candidates):
        return f"{chosen.topology} has the least cost of time and traffic for {whom} ({times})"
    bound = fluid_bound(nodes)
    return (
        f"{chosen.topology} is predicted fastest for {whom} ({times}); "
        f"no way could be faster than {size / bound.rate_bytes_per_s:.2f} s for all, because of {bound.binding}"
    )


def by_region(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Trees in which each chunk enters a region once, for when regions share a pipe: seed -> a head of its own region -> a head of
    each other region -> the others there. Each head carries as much as its uplink can; empty if there is one region, or if not all
    can be reached."""
    home, *others = regions_of(nodes)
    if not others:
        return ()
    below = len(home) - 1 + len(others)  # a head's children, in the seed's region
    uplinks = sum(nodes[head].up for head in home)
    relayed = min(1.0, uplinks * (below + 1) / ((nodes[0].up + uplinks) * below))
    heads = [[(relayed * nodes[head].up / uplinks, head) for head in home] + [(1.0 - relayed, 0)]]
    for members in others:
        reachable = [member for member in members if nodes[member].addresses] or members[:1]
        total = sum(nodes[head].up for head in reachable)
        heads.append([(nodes[head].up / total, head) for head in reachable])
    ends = [list(itertools.accumulate(share for share, _ in shares)) for shares in heads]
    cuts = [0.0, *sorted({end for of_region in ends for end in of_region if end < 1.0 - WEIGHT_MIN}), 1.0]
    trees = []
    for begin, end in itertools.pairwise(cuts):
        if end - begin > 1e-9:
            at = [bisect.bisect(of_region, (begin + end) / 2) for of_region in ends]
            chosen = [shares[min(i, len(shares) - 1)][1] for shares, i in zip(heads, at, strict=True)]
            trees.append(Tree(end - begin, _through(nodes, (home, *others), chosen)))
    return tuple(trees) if is_sound(nodes, trees) else ()


def _through(nodes: Sequence[NodeLink], regions: Sequence[Sequence[int]], heads: Sequence[int]) -> tuple[int, ...]:
    parents = [0] * (len(nodes) - 1)
    for members, head in zip(regions, heads, strict=True):
        for member in members:
            parents[member - 1] = head if member != head else 0 if head == heads[0] else heads[0]
    return tuple(parents)


GIB = float(1 << 30)
GATEWAYS_MAX = 8  # a gateway's neighbours in other regions, at most
STRIPES = (16, 8, 4, 2, 1)  # the most that fit the degree limit


def is_crossing(parent: NodeLink, child: NodeLink) -> bool:
    """Whether bytes between the two leave a region; an unknown region counts as always left."""
    return not parent.region or parent.region != child.region


def egress_usd(nodes: Sequence[NodeLink], trees: Sequence[Tree], artifact_bytes: int) -> float:
    """What providers charge for one artifact in USD: every byte that leaves the sender's region, at the sender's price."""
    total = 0.0
    for tree in trees:
        for child, parent in enumerate(tree.parents, start=1):
            if nodes[parent].egress_usd_per_gib and is_crossing(nodes[parent], nodes[child]):
                total += tree.weight * nodes[parent].egress_usd_per_gib
    return total * artifact_bytes / GIB


def regional(nodes: Sequence[NodeLink], degree_max: int, *, is_chain: bool = False) -> tuple[Tree, ...]:
    """Trees of equal stripes. `is_chain`: gateways forward to one another, strongest uplink first, for when the seed's uplink
    cannot feed them all. Empty if there are fewer than two regions, or no stripes fit the degree limit."""
    groups = _groups(nodes)
    if not 2 <= len({nodes[0].region, *groups}) <= GATEWAYS_MAX:
        return ()
    for stripes in STRIPES:
        inside = {region: _inside(nodes, members, stripes, degree_max) for region, members in groups.items()}
        if all(inside.values()):
            trees = _joined(nodes, groups, inside, stripes, is_chain)
            return trees if is_sound(nodes, trees) else ()
    return ()


def _groups(nodes: Sequence[NodeLink]) -> dict[str, list[int]]:
    """Workers by region, the gateway first: the strongest uplink among dialable workers; the seed itself in the seed's region."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes[1:], start=1):
        groups[node.region].append(number)
    for region, members in groups.items():
        members.sort(key=lambda number: (not nodes[number].addresses, -nodes[number].up, number))
        if region == nodes[0].region:
            members.insert(0, 0)
    return dict(groups)


def _inside(nodes: Sequence[NodeLink], members: Sequence[int], stripes: int, degree_max: int) -> list[tuple[int, ...]]:
    """For each stripe, the parents of all members but the gateway, as positions in `members`; empty if impossible."""
    local = [nodes[number] for number in members]
    if len(local) < 2:
        return [()] * stripes
    if len(local) == 2:
        return [(0,)] * stripes if can_connect(*local) else []
    trees = striped(local, stripes, degree_max - GATEWAYS_MAX)
    return [tree.parents for tree in trees] if is_sound(local, trees) else []


def _joined(
    nodes: Sequence[NodeLink],
    groups: dict[str, list[int]],
    inside: dict[str, list[tuple[int, ...]]],
    stripes: int,
    is_chain: bool,
) -> tuple[Tree, ...]:
    above = _gateways_above(nodes, [members[0] for members in groups.values() if members[0]], is_chain=is_chain)
    trees = []
    for stripe in range(stripes):
        parents = [0] * (len(nodes) - 1)
        for gateway, parent in above.items():
            parents[gateway - 1] = parent
        for region, members in groups.items():
            for place, parent in enumerate(inside[region][stripe], start=1):
                parents[members[place] - 1] = members[parent]
        trees.append(Tree(1.0 / stripes, tuple(parents)))
    return tuple(trees)


def _gateways_above(nodes: Sequence[NodeLink], gateways: Sequence[int], *, is_chain: bool) -> dict[int, int]:
    """Maps each gateway to the node that feeds it."""
    if not is_chain:
        return dict.fromkeys(gateways, 0)
    feeders, before = dict[int, int](), 0
    for gateway in sorted(gateways, key=lambda number: (not nodes[number].addresses, -nodes[number].up, number)):
        feeders[gateway] = before if can_connect(nodes[before], nodes[gateway]) else 0
        before = gateway
    return feeders


GAIN_MIN = 1.01  # for less, no worker is late
LATE_RELAY_SHARE = 0.9  # of a late worker's downlink: what it passes on; the rest is for chunks that it asks for
SLOW_WITHIN = 1.05  # a smaller gain is within the error of measured rates
HOSTS = 4  # peers that serve a late worker if the fleet is not fully connected; the others' trees leave that much room
KEPT_WITHIN = 1.05  # a plan stays unless another choice of late workers, or another plan, is faster by more than this
PROMISE_WITHIN = 1.5  # a plan that is off by more is sent anew: chunk sizes and predicted times rest on its rates


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
    """Numbers of the nodes for which no tree waits: the slow ones, and the spareable ones without which the others are faster."""
    slow, _ = slow_of(nodes)
    others = [node for number, node in enumerate(nodes) if number not in slow]
    best, best_rate = slow, fluid_bound(others).rate_bytes_per_s * GAIN_MIN
    if needs.are_alike:
        return slow
    late = set(slow)
    for number, rate in _removals(nodes, needs, slow):
        late.add(number)
        if rate > best_rate * (1 + 1e-9):
            best, best_rate = frozenset(late), rate
    return best


def slow_of(nodes: Sequence[NodeLink]) -> tuple[frozenset[int], frozenset[int]]:
    """The workers whose downlinks limit all and which the mean worker is better off not waiting for: as few as suffice, and as many
    as may be, for a mean time within SLOW_WITHIN of the least."""
    order = sorted(range(1, len(nodes)), key=lambda i: (nodes[i].down, i))
    uplinks, behind_s, means = sum(node.up for node in nodes), 0.0, list[float]()
    for late, number in enumerate(order):
        left = len(order) - late
        shared = min(nodes[0].up, uplinks / left)
        first_s = 1 / min(nodes[number].down, shared)
        means.append(first_s + behind_s / len(order))
        if shared <= nodes[number].down:
            break
        behind_s += 1 / nodes[number].down  # if it begins when the others are done
        uplinks -= nodes[number].up
    near = [late for late, mean in enumerate(means) if mean <= SLOW_WITHIN * min(means)]
    return frozenset(order[: near[0]]), frozenset(order[: near[-1]])


def _removals(nodes: Sequence[NodeLink], needs: Needs, slow: frozenset[int]) -> Iterator[tuple[int, float]]:
    """Yields spareable workers that limit those that are not `slow`, one at a time, each with the bound for those then left."""
    spare, weight_of = needs.spare, (0.0, *needs.weights)
    by_down = deque(sorted(range(1, len(nodes)), key=lambda i: (nodes[i].down, weight_of[i], i)))
    by_up = deque(sorted(range(1, len(nodes)), key=lambda i: (nodes[i].up, weight_of[i], i)))
    removed = set(slow)
    uplinks = sum(node.up for number, node in enumerate(nodes) if number not in removed)
    for left in range(len(nodes) - 2 - len(slow), 0, -1):
        while by_down[0] in removed:
            by_down.popleft()
        while by_up and (by_up[0] in removed or weight_of[by_up[0]] > spare):
            by_up.popleft()
        is_by_downlink = nodes[by_down[0]].down <= uplinks / (left + 1)
        number = by_down[0] if is_by_downlink else by_up[0] if by_up else 0
        if number == 0 or weight_of[number] > spare:
            return
        spare -= weight_of[number]
        removed.add(number)
        uplinks -= nodes[number].up
        while by_down[0] in removed:
            by_down.popleft()
        yield number, min(nodes[0].up, nodes[by_down[0]].down, uplinks / left)


def serves(known: BroadcastPlan, nodes: Sequence[NodeLink], needs: Needs) -> bool:
    """Whether these are the plan's nodes, met as it says, at whatever rates, and its late workers are slow or can be spared."""
    if [_without_rates(node) for node in known.nodes] != [_without_rates(node) for node in nodes]:
        return False
    late = frozenset(number for number, node in enumerate(known.nodes) if node.is_late)
    spared = late - slow_of(nodes)[1]
    return not spared or sum(needs.weights[number - 1] for number in spared) <= needs.spare


def _without_rates(node: NodeLink) -> NodeLink:
    return replace(node, uplink_bytes_per_s=0.0, downlink_bytes_per_s=0.0, rtt_s=0.0, is_late=False)


def is_worth_sending(known: BroadcastPlan, fresh: BroadcastPlan, needs: Needs) -> bool:
    """Whether a fresh plan for the present rates should replace the known one: the known one does not serve, the needed part
    finishes clearly sooner by the fresh one, or the known one's promise is off."""
    if (known.trees, known.nodes) == (fresh.trees, fresh.nodes):
        return False
    if not serves(known, fresh.nodes, needs) or not known.predicted_bytes or not fresh.predicted_bytes:
        return True
    size, chunk = known.predicted_bytes, PLAN_CHUNK_BYTES
    present = [replace(node, is_late=old.is_late) for node, old in zip(fresh.nodes, known.nodes, strict=True)]
    then, now = (predict(nodes, known.trees, size, chunk).rate_bytes_per_s for nodes in (known.nodes, present))
    kept_s = then / now * known.predicted_needed_s
    is_off = not 1 / PROMISE_WITHIN <= then / now <= PROMISE_WITHIN
    return is_off or kept_s > KEPT_WITHIN * fresh.predicted_needed_s * size / fresh.predicted_bytes


class PlanPace:
    """When the next plan may be made. Each goes to every node, so one peer must not cause many: other nodes or other ways to meet
    them, BURST at once and then one every NODES_EVERY_S; other rates alone, one every RATES_EVERY_S."""

    BURST, NODES_EVERY_S, RATES_EVERY_S = 10, 2.0, 10.0

    def __init__(self) -> None:
        self._pace, self._looked_at = Pace(1 / self.NODES_EVERY_S, self.BURST), float("-inf")

    def wait_s(self, are_rates_alone: bool, now: float) -> float:
        """Seconds until the next plan may be made; 0: now, and it is counted."""
        if are_rates_alone and now < self._looked_at + self.RATES_EVERY_S:
            return self._looked_at + self.RATES_EVERY_S - now
        if (wait_s := self._pace.wait_s("", now)) == 0:
            self._looked_at = now
        return wait_s


def weighted_plan(
    nodes: Sequence[NodeLink],
    needs: Needs,
    epoch: int,
    artifact_bytes: int = PLAN_ARTIFACT_BYTES,
    chunk_bytes: int = PLAN_CHUNK_BYTES,
    usd_per_s: float = 0.0,
) -> BroadcastPlan:
    """The plan for the time until those that are not late hold a version. `nodes[0]` is the seed; `usd_per_s`: what a second is
    worth where traffic is charged (`plan`)."""
    for_all = plan(nodes, epoch, artifact_bytes, chunk_bytes, usd_per_s=usd_per_s)
    late = late_of(nodes, needs) if len(nodes) > 1 else frozenset[int]()
    if not late:
        return for_all
    needed = [node for number, node in enumerate(nodes) if number not in late]
    degree_max = DEGREE_MAX - (0 if len(nodes) <= DEGREE_MAX + 1 else HOSTS)
    first = plan(needed, epoch, artifact_bytes, chunk_bytes, degree_max, usd_per_s, are_all_needed=False)
    alike_s = needs.needed_s(for_all.predicted_s)
    if first.predicted_all_s * GAIN_MIN > alike_s:
        return for_all
    trees = _with_late(nodes, late, first)
    if first.topology == "multi_tree":
        trees = _with_late_relays(nodes, late, trees)
    assert is_sound(nodes, trees), "late workers hang where they can connect"
    marked = tuple(replace(node, is_late=number in late) for number, node in enumerate(nodes))
    times = _times(marked, trees, artifact_bytes, chunk_bytes)
    reason = (
        f"{first.reason}; {len(late)} of {len(nodes) - 1} workers are served later ({max(times):.2f} s), because the others "
        f"would wait for their links: treating all alike would take {alike_s:.2f} s"
    )
    usd = egress_usd(nodes, trees, artifact_bytes)
    return BroadcastPlan(epoch, marked, trees, first.topology, times, artifact_bytes, reason, usd)


def _with_late(nodes: Sequence[NodeLink], late: frozenset[int], first: BroadcastPlan) -> tuple[Tree, ...]:
    """The trees with each late worker below some others, in round-robin order; below the seed if none can connect to it."""
    needed = [number for number in range(len(nodes)) if number not in late]
    neighbours: list[set[int]] = [set() for _ in nodes]
    all_parents: list[list[int]] = []
    for tree in first.trees:
        parents = [0] * (len(nodes) - 1)
        for child, parent in enumerate(tree.parents, start=1):
            parents[needed[child] - 1] = needed[parent]
            neighbours[needed[child]].add(needed[parent])
            neighbours[needed[parent]].add(needed[child])
        all_parents.append(parents)
    hosts = deque(needed[1:])
    for number in sorted(late):
        chosen = [_host_for(nodes, number, hosts, neighbours) for _ in all_parents[:HOSTS]]
        for parents, host in zip(all_parents, itertools.cycle(chosen), strict=False):
            parents[number - 1] = host
        hosts.append(number)
    return tuple(Tree(tree.weight, tuple(parents)) for tree, parents in zip(first.trees, all_parents, strict=True))


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


def _with_late_relays(nodes: Sequence[NodeLink], late: frozenset[int], trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """The same, or where all uplinks together are the limit: trees in which late workers, too, pass on what they can."""
    seed, needed = nodes[0], [number for number in range(1, len(nodes)) if number not in late]
    count = len(needed)
    relayed = {number: min(LATE_RELAY_SHARE * nodes[number].down, nodes[number].up / count) for number in late}
    uplinks = seed.up + sum(nodes[number].up for number in needed)
    rate = (uplinks + (count - 1) * sum(relayed.values())) / count
    if count < 2 or rate >= min(seed.up, *(nodes[number].down for number in needed)) or not _is_full_mesh(nodes):
        return trees
    weights = {number: nodes[number].up / ((count - 1) * rate) for number in needed}
    weights |= {number: up / rate for number, up in relayed.items()}
    mesh = [Tree(weights[root], _relayed_by(nodes, root)) for root in sorted(weights) if weights[root] > WEIGHT_MIN]
    direct = 1.0 - sum(tree.weight for tree in mesh)
    return (*mesh, Tree(direct, (0,) * (len(nodes) - 1))) if direct > 0 else trees


def _times(nodes: Sequence[NodeLink], trees: tuple[Tree, ...], size: int, chunk_bytes: int) -> tuple[float, ...]:
    """Per worker: needed ones as the trees predict; late ones when their downlinks have brought all after that, and not
    before all uplinks can have sent a copy to everyone."""
    guess = predict(nodes, trees, size, suitable_chunk_bytes(nodes, trees, chunk_bytes)).worker_s
    after_s = max(time_s for node, time_s in zip(nodes[1:], guess, strict=True) if not node.is_late)
    spread_s = (len(nodes) - 1) * size / sum(node.up for node in nodes)
    return tuple(
        max(spread_s, after_s + size / node.down) if node.is_late else time_s
        for node, time_s in zip(nodes[1:], guess, strict=True)
    )
