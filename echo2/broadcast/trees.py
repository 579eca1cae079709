"""Candidate trees and the choice among them: `plan(nodes, epoch)`.

Guarantees: deterministic; a candidate is only returned when it is sound and within the degree limit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from echo2.broadcast.topology import (
    DEGREE_MAX,
    BroadcastPlan,
    NodeLink,
    Prediction,
    Tree,
    can_connect,
    degree_of,
    fluid_bound,
    is_sound,
    predict,
)

PLAN_ARTIFACT_BYTES = 64 << 20
PLAN_CHUNK_BYTES = 256 << 10
STRIPES = 15


def star(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """The seed sends everything to everyone."""
    return (Tree(1.0, (0,) * (len(nodes) - 1)),)


def chain(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Everything passes along one line, fastest uplink first."""
    order = sorted(range(1, len(nodes)), key=lambda i: (not nodes[i].addresses, -nodes[i].up, i))
    parents = [0] * (len(nodes) - 1)
    for before, after in itertools.pairwise(order):
        parents[after - 1] = before
    return (Tree(1.0, tuple(parents)),)


def weighted_multi_tree(nodes: Sequence[NodeLink]) -> tuple[Tree, ...]:
    """Each worker relays its share to all others; what their uplinks cannot carry, the seed sends itself."""
    count = len(nodes) - 1
    if count < 2:
        return star(nodes)
    rate = fluid_bound(nodes).rate_bytes_per_s
    shares = [nodes[i].up / ((count - 1) * rate) for i in range(1, count + 1)]
    total = sum(shares)
    if total > 1.0:
        shares = [share / total for share in shares]
    trees = [Tree(share, _relayed_by(nodes, root)) for root, share in enumerate(shares, start=1)]
    rest = 1.0 - sum(tree.weight for tree in trees)
    if rest > 1e-9:
        trees.append(Tree(rest, (0,) * count))
    return tuple(trees)


def _relayed_by(nodes: Sequence[NodeLink], root: int) -> tuple[int, ...]:
    """Seed -> root -> the others; those that the root cannot reach hang below the strongest that can."""
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


def interior_disjoint(nodes: Sequence[NodeLink], stripes: int = STRIPES) -> tuple[Tree, ...]:
    """`stripes` equal trees; each worker has children in one of them, in proportion to its uplink.

    An edge carries 1/stripes of the rate r, so a node with uplink u can have stripes*u/r children.
    """
    rate = fluid_bound(nodes).rate_bytes_per_s
    fanout_max = DEGREE_MAX - stripes
    fanout = [min(fanout_max, int(stripes * node.up / rate + 0.25)) for node in nodes]
    fanout[0] = min(DEGREE_MAX, max(stripes, int(stripes * nodes[0].up / rate + 0.25)))
    interiors = _dealt(nodes, fanout, stripes)
    spare = fanout[0] - stripes
    seed_children = [1 + spare // stripes + (1 if t < spare % stripes else 0) for t in range(stripes)]
    trees: list[Tree] = []
    for interior, room in zip(interiors, seed_children, strict=True):
        parents = _stripe(nodes, fanout, interior, room)
        if parents is None:
            return ()
        trees.append(Tree(1 / stripes, parents))
    return tuple(trees)


def _dealt(nodes: Sequence[NodeLink], fanout: Sequence[int], stripes: int) -> list[list[int]]:
    """Interior nodes per stripe: each worker to the stripe that has the least room for children so far."""
    heap = [(0, stripe) for stripe in range(stripes)]
    interiors: list[list[int]] = [[] for _ in range(stripes)]
    for node in sorted(range(1, len(nodes)), key=lambda i: (-fanout[i], i)):
        if fanout[node] < 1 or not nodes[node].addresses:
            continue
        room, stripe = heapq.heappop(heap)
        interiors[stripe].append(node)
        heapq.heappush(heap, (room + fanout[node], stripe))
    return interiors


def _stripe(
    nodes: Sequence[NodeLink], fanout: Sequence[int], interior: Sequence[int], room: int
) -> tuple[int, ...] | None:
    """Breadth first, widest nodes first; when room runs out the widest interior nodes take one more each."""
    parents = [0] * (len(nodes) - 1)
    slots: list[tuple[int, int]] = [(0, room)]
    inner = set(interior)
    order = [*interior, *(i for i in range(1, len(nodes)) if i not in inner)]
    at, used = 0, 0
    overflow = 0
    for child in order:
        while at < len(slots) and used >= slots[at][1]:
            at, used = at + 1, 0
        if at < len(slots):
            parent = slots[at][0]
            used += 1
        elif interior:
            parent = interior[overflow % len(interior)]
            overflow += 1
        else:
            return None
        if parent == child:
            return None
        parents[child - 1] = parent
        if child in inner:
            slots.append((child, fanout[child]))
    return tuple(parents)


_BUILDERS: tuple[tuple[str, Callable[[Sequence[NodeLink]], tuple[Tree, ...]]], ...] = (
    ("star", star),
    ("chain", chain),
    ("multi_tree", weighted_multi_tree),
    ("interior_disjoint_trees", interior_disjoint),
)


def plan(
    nodes: Sequence[NodeLink],
    epoch: int,
    artifact_bytes: int = PLAN_ARTIFACT_BYTES,
    chunk_bytes: int = PLAN_CHUNK_BYTES,
) -> BroadcastPlan:
    """The candidate with the least predicted time until every worker holds an artifact. `nodes[0]` is the seed."""
    if len(nodes) < 2:
        return BroadcastPlan(epoch, tuple(nodes), (), "none", (), artifact_bytes, "no worker to send to")
    found: list[tuple[str, tuple[Tree, ...], Prediction]] = []
    for name, build in _BUILDERS:
        if name == "multi_tree" and len(nodes) > DEGREE_MAX + 1:
            continue
        if name == "interior_disjoint_trees" and len(nodes) <= DEGREE_MAX + 1:
            continue
        trees = build(nodes)
        if is_sound(nodes, trees) and (degree_of(trees, len(nodes)) <= DEGREE_MAX or name == "star"):
            found.append((name, trees, predict(nodes, trees, artifact_bytes, chunk_bytes)))
    in_limit = [f for f in found if degree_of(f[1], len(nodes)) <= DEGREE_MAX] or found
    name, trees, prediction = min(in_limit, key=lambda candidate: candidate[2].all_s)
    bound = fluid_bound(nodes)
    times = ", ".join(f"{other} {guess.all_s:.2f} s" for other, _, guess in found)
    reason = (
        f"{name} is predicted fastest for {artifact_bytes / 1e6:.1f} MB to {len(nodes) - 1} workers ({times}); "
        f"no way could be faster than {artifact_bytes / bound.rate_bytes_per_s:.2f} s, because of {bound.binding}"
    )
    return BroadcastPlan(epoch, tuple(nodes), trees, name, prediction.worker_s, artifact_bytes, reason)
