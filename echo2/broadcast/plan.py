"""The broadcast plan: which weighted trees carry the chunks, chosen by least predicted time. Pure functions.

Guarantees: every tree reaches every worker over pairs that can connect; no node has more than `degree_max` connections; the
plan says why it won and when each worker is expected to hold an artifact. The arithmetic is in docs/broadcast.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import CHUNK_BYTES_MAX, CHUNKS_MAX
from echo2.broadcast.reachability import Access, LinkKind, is_relayed_neighbour, meeting

BY_REGION = "by_region"  # the topology in which each chunk enters a region once
DEGREE_MAX = 32  # a full mesh up to here; memory and messages grow with each neighbour
UNKNOWN_UPLINK_BYTES_PER_S = 12.5e6  # 100 Mbit/s
UNKNOWN_DOWNLINK_BYTES_PER_S = 50e6  # 400 Mbit/s


@dataclass(frozen=True, slots=True)
class NodeLink:
    """What is known of one node's link; 0 rates are unknown. No addresses: it cannot be dialled (it dials others), and `access`
    says how other such nodes meet it. Late: trees push it nothing and only tell it whom to pull from, which its neighbours
    answer when nobody else could be served (trees.late_of). `region`: of its provider, empty where it is not known;
    `egress_usd_per_gib`: of what it sends to another region (trees.py), which nodes are not told."""

    peer_id: PeerId
    name: str = ""
    addresses: tuple[str, ...] = ()
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    access: Access = field(default_factory=Access)
    is_late: bool = False
    region: str = ""
    egress_usd_per_gib: float = 0.0

    @property
    def whole_access(self) -> Access:
        return replace(self.access, addresses=self.addresses)

    @property
    def up(self) -> float:
        return self.uplink_bytes_per_s or UNKNOWN_UPLINK_BYTES_PER_S

    @property
    def down(self) -> float:
        return self.downlink_bytes_per_s or UNKNOWN_DOWNLINK_BYTES_PER_S


REGION_RTT_S, REGION_RTT_RATIO = 0.010, 1.3  # round trips to the seed that are further apart are of different regions
CHUNK_S = 0.025  # a chunk may occupy the slowest uplink that forwards for this long
CHUNK_BYTES_MIN = 16 << 10  # a smaller one costs more CPU than its time on any link
CHUNKS_AIM = 16384  # 16 s of CPU per node and artifact
COPIES_SHARE = 0.05  # of an artifact's time, for the copies of one chunk along a path
SIZE_OFF = 16  # so many times larger than expected an artifact may be, and still have no more than CHUNKS_MAX
LARGE_CHUNK_S = 0.5  # far within the time that a request is given (pulling.note_requests), with a window of two


def can_connect(first: NodeLink, second: NodeLink) -> bool:
    """Whether trees may have an edge between the two."""
    if first.addresses or second.addresses:
        return True
    return meeting(first.peer_id, first.whole_access, second.peer_id, second.whole_access).is_fit_for_trees


@dataclass(frozen=True, slots=True)
class Tree:
    """One way through all nodes. `parents[i]` is the parent of node i + 1; node 0, the seed, has none. Weight 0: a spare, which the
    seed uses once the relays of all other trees are gone, until there is a new plan."""

    weight: float
    parents: tuple[int, ...]

    def children(self) -> dict[int, tuple[int, ...]]:
        children_of: dict[int, list[int]] = {}
        for child, parent in enumerate(self.parents, start=1):
            children_of.setdefault(parent, []).append(child)
        return {parent: tuple(children) for parent, children in children_of.items()}

    def depth_first_order(self) -> Iterator[int]:
        """Workers, parents before children; a tree with a loop yields fewer than all."""
        children = self.children()
        stack = list(children.get(0, ()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(children.get(node, ()))


def pushed_children(nodes: Sequence[NodeLink], tree: Tree) -> dict[int, tuple[int, ...]]:
    """By parent: the children that are sent the tree's chunks unasked: all but late ones that pass nothing on."""
    relays = {parent for child, parent in enumerate(tree.parents, start=1) if not nodes[child].is_late}
    pushed = {
        parent: tuple(child for child in children if not nodes[child].is_late or child in relays)
        for parent, children in tree.children().items()
    }
    return {parent: children for parent, children in pushed.items() if children}


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """The same for every node; the seed is `nodes[0]`. Weights of `trees` sum to 1."""

    epoch: int
    nodes: tuple[NodeLink, ...]
    trees: tuple[Tree, ...]
    topology: str = "none"
    predicted_s: tuple[float, ...] = ()  # per worker, for `predicted_bytes`
    predicted_bytes: int = 0
    reason: str = ""
    egress_usd: float = 0.0  # of an artifact of `predicted_bytes`
    others: tuple[Tree, ...] = ()  # as fast, numbered after `trees`, for where regions share no thin pipe
    _index: dict[PeerId, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._index.update({node.peer_id: index for index, node in enumerate(self.nodes)})

    def index_of(self, peer_id: PeerId) -> int | None:
        return self._index.get(peer_id)

    @property
    def seed(self) -> NodeLink | None:
        return self.nodes[0] if self.nodes else None

    @property
    def all_trees(self) -> tuple[Tree, ...]:
        return self.trees + self.others

    @property
    def predicted_all_s(self) -> float:
        """When the last worker is expected to hold an artifact of `predicted_bytes`."""
        return max(self.predicted_s, default=0.0)

    @property
    def predicted_needed_s(self) -> float:
        """When the last that is not late is."""
        workers = zip(self.nodes[1:], self.predicted_s, strict=True) if self.predicted_s else ()
        return max((time_s for node, time_s in workers if not node.is_late), default=0.0)

    @property
    def late(self) -> frozenset[PeerId]:
        return frozenset(node.peer_id for node in self.nodes if node.is_late)

    @property
    def needed_nodes(self) -> tuple[NodeLink, ...]:
        """The seed and all that are not late."""
        return tuple(node for node in self.nodes if not node.is_late)

    def region_of(self, peer_id: PeerId) -> tuple[PeerId, ...]:
        """The workers of a worker's region; itself where trees are not by region."""
        index = self.index_of(peer_id) if self.topology == BY_REGION else None
        members = next((members for members in regions_of(self.nodes) if index in members), []) if index else []
        return tuple(self.nodes[number].peer_id for number in members) or (peer_id,)

    def pushed_to(self, tree: int) -> dict[int, tuple[int, ...]]:
        """By parent: the children in a tree that are sent its chunks unasked."""
        return pushed_children(self.nodes, self.all_trees[tree])

    def neighbours(self, peer_id: PeerId) -> tuple[PeerId, ...]:
        """Whom a node keeps connections to: all that it can while that is within the limit, else its tree edges."""
        number = self.index_of(peer_id)
        if number is None:
            return ()
        me = self.nodes[number]
        if len(self.nodes) <= DEGREE_MAX + 1:
            return tuple(n.peer_id for n in self.nodes if n is not me and (can_connect(n, me) or self._meet(n, me)))
        numbers: set[int] = set()
        for tree in self.trees:
            if number:
                numbers.add(tree.parents[number - 1])
            numbers.update(child for child, parent in enumerate(tree.parents, start=1) if parent == number)
        return tuple(self.nodes[index].peer_id for index in sorted(numbers))

    def _meet(self, first: NodeLink, second: NodeLink) -> bool:
        """Whether two hidden nodes keep a link to pull over and to punch a hole from."""
        link = meeting(first.peer_id, first.whole_access, second.peer_id, second.whole_access)
        hidden = [node.peer_id for node in self.nodes if not node.addresses and node.access.relays]
        return link.way.kind is not LinkKind.NONE and is_relayed_neighbour(first.peer_id, second.peer_id, hidden)


def regions_of(nodes: Sequence[NodeLink]) -> list[list[int]]:
    """Workers by the region that their provider names or, where one names none, by their round trips to the seed; the seed's own or
    nearest region first."""
    workers = sorted(range(1, len(nodes)), key=lambda number: (nodes[number].rtt_s, number))
    if all(nodes[number].region for number in workers):
        named: dict[str, list[int]] = defaultdict(list)
        for number in workers:
            named[nodes[number].region].append(number)
        return sorted(named.values(), key=lambda members: nodes[members[0]].region != nodes[0].region)
    groups, before = [list[int]()], nodes[workers[0]].rtt_s
    for number in workers:
        if nodes[number].rtt_s > REGION_RTT_RATIO * before + REGION_RTT_S:
            groups.append([])
        groups[-1].append(number)
        before = nodes[number].rtt_s
    return groups


@dataclass(frozen=True, slots=True)
class Fluid:
    """The fluid lower bound of one seed and N workers; see docs/broadcast.md."""

    rate_bytes_per_s: float
    binding: str


def fluid_bound(nodes: Sequence[NodeLink]) -> Fluid:
    """The best rate at which all workers can receive at once, and which limit binds."""
    seed, workers = nodes[0], nodes[1:]
    assert workers, "a broadcast needs a worker"
    terms = {
        "the seed's uplink": seed.up,
        "the slowest downlink": min(worker.down for worker in workers),
        "all uplinks together": (seed.up + sum(worker.up for worker in workers)) / len(workers),
    }
    binding = min(terms, key=lambda name: terms[name])
    return Fluid(terms[binding], binding)


def chunk_bytes_for(plan: BroadcastPlan | None, most: int, artifact_bytes: float = 0.0) -> int:
    """The size of chunks: a larger one costs less CPU per byte, a smaller one waits less at a relay.

    The largest power of two, at most `most`, that passes the slowest uplink of those that forward in CHUNK_S. Where that makes
    more than CHUNKS_AIM of an artifact, its chunks are larger, up to what passes that uplink in LARGE_CHUNK_S: each then still
    takes less than a 16,000th of the time that the artifact does. Of a small artifact the chunks are smaller, down to
    CHUNK_BYTES_MIN: the copies of one that are sent along a path take at most COPIES_SHARE of the artifact's time."""
    if plan is None or len(plan.nodes) < 2:
        size, large = most, float(CHUNK_BYTES_MAX)
    else:
        size = suitable_chunk_bytes(plan.nodes, plan.trees, most)
        large = min(CHUNK_BYTES_MAX, _slowest_forwarding(plan.nodes, plan.trees) * LARGE_CHUNK_S)
        if artifact_bytes:
            room_s = COPIES_SHARE * artifact_bytes / fluid_bound(plan.nodes).rate_bytes_per_s
            still = [replace(node, rtt_s=0.0) for node in plan.nodes]
            copies_s = max(latencies(still, plan.trees, size, size))  # what copies of a chunk add to the longest path
            while size > CHUNK_BYTES_MIN and copies_s > room_s:
                size, copies_s = size // 2, copies_s / 2
    while 2 * size <= large and size * CHUNKS_AIM < artifact_bytes:
        size *= 2
    while size < CHUNK_BYTES_MAX and size * CHUNKS_MAX < SIZE_OFF * artifact_bytes:  # however slow that uplink is
        size *= 2
    return size


def suitable_chunk_bytes(nodes: Sequence[NodeLink], trees: Sequence[Tree], most: int) -> int:
    """`chunk_bytes_for` of trees that are not a plan yet."""
    slowest = _slowest_forwarding(nodes, trees)
    size = CHUNK_BYTES_MIN
    while 2 * size <= slowest * CHUNK_S:
        size *= 2
    return min(most, size)


def _slowest_forwarding(nodes: Sequence[NodeLink], trees: Sequence[Tree]) -> float:
    forwarding = {
        parent
        for tree in trees if tree.weight > 0
        for node, parent in zip(nodes[1:], tree.parents, strict=True) if not node.is_late
    }  # fmt: skip
    return min((nodes[number].up for number in forwarding), default=0.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one set of trees: the common rate, and each worker's time."""

    rate_bytes_per_s: float
    worker_s: tuple[float, ...]

    @property
    def all_s(self) -> float:
        return max(self.worker_s)


def predict(nodes: Sequence[NodeLink], trees: Sequence[Tree], artifact_bytes: int, chunk_bytes: int) -> Prediction:
    """Flow r*w on every edge over which a tree of weight w pushes: r is what the tightest node allows that is not late; then
    latency is added."""
    load = [0.0] * len(nodes)
    for tree in trees:
        for parent, children in pushed_children(nodes, tree).items():
            load[parent] += tree.weight * len(children)
    rate = min(node.down for node in nodes[1:] if not node.is_late)
    for node, edges in zip(nodes, load, strict=True):
        if edges > 0:
            rate = min(rate, node.up / edges)
    latest = latencies(nodes, trees, artifact_bytes, chunk_bytes)
    return Prediction(rate, tuple(artifact_bytes / rate + late for late in latest))


def latencies(
    nodes: Sequence[NodeLink], trees: Sequence[Tree], artifact_bytes: int, chunk_bytes: int
) -> tuple[float, ...]:
    """Per worker, seconds that the longest of its paths adds: half a round trip and a chunk's copies at each hop."""
    latest = [0.0] * len(nodes)
    for tree in trees:
        if not tree.weight:
            continue
        delay, children = [0.0] * len(nodes), tree.children()
        for child in tree.depth_first_order():
            parent = tree.parents[child - 1]
            hop = (nodes[parent].rtt_s + nodes[child].rtt_s) / 4  # one way; a path has the mean RTT of its ends
            copies = len(children[parent]) if parent else 1
            delay[child] = delay[parent] + hop + min(chunk_bytes, artifact_bytes) * copies / nodes[parent].up
            latest[child] = max(latest[child], delay[child])
    return tuple(latest[1:])


def is_sound(nodes: Sequence[NodeLink], trees: Sequence[Tree]) -> bool:
    """Whether every tree reaches every worker over pairs that can connect, and the weights sum to 1."""
    if not trees or not math.isclose(sum(tree.weight for tree in trees), 1.0, abs_tol=1e-6):
        return False
    for tree in trees:
        if len(tree.parents) != len(nodes) - 1 or sum(1 for _ in tree.depth_first_order()) != len(nodes) - 1:
            return False
        if not all(can_connect(nodes[child], nodes[parent]) for child, parent in enumerate(tree.parents, start=1)):
            return False
    return True


def degree_of(trees: Sequence[Tree], node_count: int) -> int:
    """The largest number of distinct neighbours that the trees give a node."""
    neighbours: list[set[int]] = [set() for _ in range(node_count)]
    for tree in trees:
        for child, parent in enumerate(tree.parents, start=1):
            neighbours[child].add(parent)
            neighbours[parent].add(child)
    return max(map(len, neighbours), default=0)
