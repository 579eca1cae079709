"""What bench_broadcast measures: fleets, their links, the fluid bound, and the ratios asked for.

The WAN of the table: a seed of 200 Mbit/s up; workers of 100 up and 200 down, or of 50-200 up and 150-400 down; three
regions 20-100 ms apart. All rates are multiplied by the scene's scale, so that the machine's cores are not the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.wan.lab import QUEUE_S
from echo2.base.ids import PeerId
from echo2.broadcast.plan import NodeLink
from echo2.broadcast.trees import Needs

MBIT = 125_000.0
MIB = 1 << 20
REGIONS = ("use", "usw", "eu")
RTT_S = {
    ("eu", "eu"): 0.02, ("use", "use"): 0.02, ("usw", "usw"): 0.02,
    ("eu", "use"): 0.08, ("eu", "usw"): 0.10, ("use", "usw"): 0.06,
    ("eu", "sat"): 0.6, ("sat", "sat"): 0.6, ("sat", "use"): 0.6, ("sat", "usw"): 0.6,
}  # fmt: skip
HETEROGENEOUS_UP = (50, 200, 75, 100, 150, 50, 100, 75)
HETEROGENEOUS_DOWN = (150, 400, 200, 200, 300, 200, 400, 150)
IP_OVERHEAD, IPV6_OVERHEAD = 1500 / 1448, 1500 / 1428  # IP bytes per payload byte of full TCP segments
LINKS = {  # Mbit/s up and down: the seed's, then the workers'
    "slow downlink": ((200, 400), *[(100, 200)] * 5, (100, 20)),
    "giant relay": ((100, 200), (1000, 1000), *[(20, 100)] * 7),
    "home uplinks": ((40, 200), *[(20, 200)] * 6),
    "small delta": ((200, 400), *[(100, 200)] * 8),
    "thin pipe": ((200, 400), *[(100, 200)] * 8),
    "satellite": ((200, 400), *[(100, 200)] * 5, (50, 200)),
}
PLACES = {"thin pipe": ("use", "eu"), "satellite": (*REGIONS, "use", "usw", "sat")}  # of the workers, in turn
PIPE_MBIT = {"thin pipe": 100}  # what the two regions share, each way
SWINGING_UP = 0.5  # half the workers' uplinks at a time have this share of their rate, the others all of it
POLICER_QUEUE_S = 0.010
PAUSE_S = 3.0
OWN_EARLIEST_TARGET = 1.25
EARLY_SHARE = 0.9
TARGETS = {
    ("homogeneous", 4): 1.08, ("homogeneous", 8): 1.10, ("homogeneous", 16): 1.15,
    ("heterogeneous", 4): 1.08, ("heterogeneous", 8): 1.12, ("heterogeneous", 16): 1.15,
    ("homogeneous, one dies at 0.5 of the time", 8): 1.25, ("homogeneous, 2 behind NAT, 0.1 % loss", 8): 1.20,
    ("homogeneous, 2 behind NAT, 0.1 % loss, without BBR", 8): 1.20,
    ("slow downlink", 6): 1.10, ("giant relay", 8): 1.08, ("home uplinks", 6): 1.08, ("small delta", 8): 1.30,
    ("small delta, the second", 8): 1.30, ("homogeneous, 3 versions at once", 8): 1.15,
    ("heterogeneous, 3 behind NAT, 0.3 % loss", 10): 1.15, ("homogeneous, the learner behind NAT", 8): 1.10,
    ("homogeneous, IPv6", 8): 1.10, ("thin pipe", 8): 1.15, ("satellite", 6): 1.15,
    ("homogeneous, uplinks change every 4 s", 8): 1.15, ("homogeneous, queues of 10 ms", 8): 1.15,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SceneNode:
    """One host; rates in bytes/s. `rtt_s` is to the seed's region, which is what a planner knows of it."""

    name: str
    up: float
    down: float
    region: str
    rtt_s: float
    is_natted: bool = False
    weight: float = 1.0  # what it gives the pool


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls one node when `at` of the bound has passed; `for_s` seconds where it ends again."""

    kind: Literal["dies", "freezes", "link is cut", "is restarted"]
    node: int = 1
    at: float = 0.5
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """`nodes[0]` is the seed. `is_bbr_offered` False: as in a container that may not choose it. `share`: of the weight of
    all workers, that is needed."""

    kind: str
    nodes: tuple[SceneNode, ...]
    size_bytes: int
    chunk_bytes: int
    loss: float = 0.0
    fault: Fault | None = None
    is_bbr_offered: bool = True
    share: float = 1.0
    is_second: bool = False  # an artifact of the same size went before, PAUSE_S earlier, over the same connections
    versions: int = 1  # that these bytes are of, each as large, published one right after the other
    is_ipv6: bool = False
    pipe: float = 0.0  # bytes/s that all traffic from one region to another shares; 0: nothing does
    swing_s: float = 0.0  # how often the workers' uplinks change twofold
    queue_s: float = QUEUE_S  # of every link

    @property
    def needs(self) -> Needs:
        return Needs(tuple(node.weight for node in self.nodes[1:]), self.share)

    @property
    def overhead(self) -> float:
        """IP bytes per byte of the artifact, at least."""
        return IPV6_OVERHEAD if self.is_ipv6 else IP_OVERHEAD

    @property
    def workers(self) -> int:
        return len(self.nodes) - 1

    @property
    def name(self) -> str:
        kind = self.kind
        if self.fault is not None:
            kind += f", {'one' if self.fault.node else 'the seed'} {self.fault.kind} at {self.fault.at:g} of the time"
        if natted := sum(node.is_natted for node in self.nodes[1:]):
            kind += f", {natted} behind NAT, {100 * self.loss:.1f} % loss"
        if self.nodes[0].is_natted:
            kind += ", the learner behind NAT"
        if not self.is_bbr_offered:
            kind += ", without BBR"
        if self.is_second:
            kind += ", the second"
        if self.versions > 1:
            kind += f", {self.versions} versions at once"
        if self.is_ipv6:
            kind += ", IPv6"
        if self.swing_s:
            kind += f", uplinks change every {self.swing_s:g} s"
        if self.queue_s < QUEUE_S:
            kind += f", queues of {1e3 * self.queue_s:.0f} ms"
        return kind

    @property
    def target(self) -> float | None:
        return TARGETS.get((self.name, self.workers))

    def bound_s(self, overhead: float) -> float:
        """The fluid bound; of the survivors from the moment when one dies."""
        size = self.size_bytes * overhead
        whole = fluid_s(self.mean_nodes, size)
        if self.pipe:  # every region but the seed's needs a copy
            whole = max(whole, size / self.pipe)
        if self.fault is None or self.fault.kind != "dies":
            return whole
        left = [node for number, node in enumerate(self.nodes) if number != self.fault.node]
        return max(whole, self.fault.at * whole + (1 - self.fault.at) * fluid_s(left, size))

    def up_at(self, number: int, elapsed_s: float) -> float:
        """A node's uplink at a time after the start."""
        node = self.nodes[number]
        is_low = bool(self.swing_s and number) and (int(elapsed_s / self.swing_s) + number) % 2 == 0
        return node.up * (SWINGING_UP if is_low else 1.0)

    @property
    def mean_nodes(self) -> tuple[SceneNode, ...]:
        """With their uplinks' means over time."""
        share = (1 + SWINGING_UP) / 2 if self.swing_s else 1.0
        return (self.nodes[0], *(replace(node, up=node.up * share) for node in self.nodes[1:]))

    @property
    def path_s(self) -> float:
        """One way from the seed over one relay to the worker that is farthest by its best such path."""
        seed, workers = self.nodes[0], self.nodes[1:]
        pairs = [(relay, worker) for worker in workers for relay in workers if relay is not worker]
        least: dict[str, float] = {}
        for relay, worker in pairs:
            way_s = (_rtt_s(seed, relay) + _rtt_s(relay, worker)) / 2
            least[worker.name] = min(way_s, least.get(worker.name, way_s))
        return max(least.values(), default=0.0)

    def own_earliest_s(self, overhead: float) -> dict[str, float]:
        """By worker: by when it could have all while those that can be slower only take what their downlinks allow."""
        links = [NodeLink(PeerId(node.name), node.name, ("",), node.up, node.down, node.rtt_s) for node in self.nodes]
        size = self.size_bytes * overhead
        return {node.name: size * time_s for node, time_s in zip(self.nodes[1:], own_earliest(links), strict=True)}

    def optimum_seed_bytes(self) -> float:
        """What the seed has to send at the bound: what the workers' uplinks cannot carry, and all of it once. If some can be done
        before the slowest, it is sending until the first is."""
        took = self.bound_s(1.0)
        carried = sum(node.up for node in self.mean_nodes[1:]) * took
        first_s = min(self.own_earliest_s(1.0).values())
        early = self.nodes[0].up * first_s if first_s < EARLY_SHARE * took else 0.0
        return max(self.size_bytes, self.workers * self.size_bytes - carried, early)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _rtt_s(first: SceneNode, second: SceneNode) -> float:
    return RTT_S[(min(first.region, second.region), max(first.region, second.region))]


def fluid_s(nodes: tuple[SceneNode, ...] | list[SceneNode], size_bytes: float) -> float:
    seed, workers = nodes[0], nodes[1:]
    total = seed.up + sum(worker.up for worker in workers)
    slowest = min(worker.down for worker in workers)
    return max(size_bytes / seed.up, size_bytes / slowest, len(workers) * size_bytes / total)


def make_scene(
    kind: str, workers: int, *, scale: float, mib: float, chunk_kib: int, fault: Fault | None = None, natted: int = 0,
    loss: float = 0.0,
) -> Scene:  # fmt: skip
    given = LINKS.get(kind, ((200, 400),))
    nodes = [SceneNode("seed", given[0][0] * MBIT * scale, given[0][1] * MBIT * scale, "use", 0.02)]
    for i in range(workers):
        up, down = (
            given[i + 1]
            if kind in LINKS
            else (100, 200)
            if kind == "homogeneous"
            else (HETEROGENEOUS_UP[i % 8], HETEROGENEOUS_DOWN[i % 8])
        )
        places = PLACES.get(kind, REGIONS)
        region = places[i % len(places)]
        rtt_s = RTT_S[(min(region, "use"), max(region, "use"))]
        nodes.append(SceneNode(f"w{i}", up * MBIT * scale, down * MBIT * scale, region, rtt_s, i < natted))
    pipe = PIPE_MBIT.get(kind, 0) * MBIT * scale
    return Scene(kind, tuple(nodes), int(mib * MIB), chunk_kib << 10, loss, fault, pipe=pipe)


STANDBY_UP, STANDBY_DOWN = 10, 30


def make_partly_needed_scene(workers: int, standby: int, *, share: float, scale: float, mib: float) -> Scene:
    """The unequal links at work, as fast as their place in the list, and standby workers on slow links among them."""
    made = make_scene("heterogeneous", workers, scale=scale, mib=mib, chunk_kib=0)
    on_standby = set(range(1, workers + 1, max(1, workers // max(1, standby)))[:standby])
    nodes = tuple(
        replace(node, up=STANDBY_UP * MBIT * scale, down=STANDBY_DOWN * MBIT * scale, weight=0.0)
        if number in on_standby else replace(node, weight=1.0 + 0.1 * ((number - 1) % 5))
        for number, node in enumerate(made.nodes)
    )  # fmt: skip
    return replace(made, nodes=nodes, share=share)


def own_earliest(nodes: Sequence[NodeLink]) -> tuple[float, ...]:
    """Per worker, the earliest time (s per byte) at which it could have everything while workers with slower downlinks take only
    what those allow. All uplinks are shared equally; no worker gets more than its downlink or the seed's uplink."""
    workers, uplinks = nodes[1:], sum(node.up for node in nodes)
    level, left = nodes[0].up, len(nodes) - 1
    for worker in sorted(workers, key=lambda node: node.down):
        if worker.down * left >= uplinks:
            level = min(level, uplinks / left)
            break
        uplinks, left = uplinks - worker.down, left - 1
    return tuple(1 / min(level, worker.down) for worker in workers)
