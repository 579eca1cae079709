"""Which workers get an artifact first when not all need it at once: the fluid schedule, and trees that follow it.

    prompt       trees wait for it: it takes every chunk at the trees' rate, and is done after the first stage
    own pace     no tree waits for it: as much of the artifact as it needs to finish in time is pushed to it at once; the rest is
                 deferred, that is, pushed when nothing else is queued, to workers with a lower turn first

The slowest time has priority: every worker gets enough at any time to finish within `SLOWEST_WITHIN` of the fluid bound. The prompt
workers get all that is left, which minimises the mean time (weighted by what each worker contributes to the pool): where slow
downlinks set the bound, the others do not wait for them. Guarantees: pure, deterministic. Leaves to others: choosing between
this and trees that treat all alike (trees), following the schedule (session), fleets that are not fully connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from echo2.broadcast.topology import NodeLink, Tree, fluid_bound

SLOWEST_WITHIN = 1.02
PREFIXES_MAX = 16
OWN_RELAY_SHARE = 0.9  # of the downlink of a worker with its own pace: the most that chunks it relays may take
SEED_SPARE = 0.98
LEAST_SENT = 0.75  # of the first stage's copies: what a relay sends at least, as its uplink serves later stages, too
BISECTIONS = 40
ALIKE = 1.001
FEWER_PROMPT_GAIN = 0.95  # of the mean: fewer prompt workers must bring it below this
LEAST_WEIGHT = 2e-3  # a tree with less weight is not worth a relay window
Parents = Callable[[Sequence[NodeLink], int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stages:
    """A schedule for an artifact of one byte. `prompt`: numbers of the nodes done after `first_s`; per worker: `deferred`, the
    share of its chunks that is deferred; `turns`, its rank for deferred chunks; `worker_s`, when it is done by the fluid model."""

    prompt: frozenset[int]
    first_s: float
    deferred: tuple[float, ...]
    turns: tuple[int, ...]
    worker_s: tuple[float, ...]


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


def stages(nodes: Sequence[NodeLink], weights: Sequence[float], within: float = SLOWEST_WITHIN) -> Stages | None:
    """The schedule with the least weighted mean among those that are done `within` the fluid bound; None: no two stages."""
    limit_s = within / fluid_bound(nodes).rate_bytes_per_s
    order = sorted(range(1, len(nodes)), key=lambda i: (-nodes[i].down, -weights[i - 1], -nodes[i].up, i))
    earliest = own_earliest(nodes)
    least = sum(earliest[i - 1] <= min(earliest) * ALIKE for i in order)
    best: Stages | None = None
    best_mean = float("inf")
    step = max(1, (len(order) - least) // PREFIXES_MAX)
    for count in range(len(order) - 1, least - 1, -step):  # most prompt workers first
        made = _staged(nodes, order, count, limit_s)
        mean = sum(w * s for w, s in zip(weights, made.worker_s, strict=True)) if made else float("inf")
        if made is not None and mean < best_mean * FEWER_PROMPT_GAIN:
            best, best_mean = made, mean
    return best


def _staged(nodes: Sequence[NodeLink], order: Sequence[int], count: int, limit_s: float) -> Stages | None:
    """Finishes the first `count` of `order` as early as possible, the others in turn after them; None if the limit is missed."""
    prompt, others = order[:count], order[count:]
    uplinks = sum(node.up for node in nodes)

    def needs(first_s: float) -> list[float]:
        """The share that each other worker must have after the first stage, to finish in time with its own downlink."""
        return [max(0.0, 1.0 - nodes[i].down * (limit_s - first_s)) for i in others]

    least_s = 1 / min(nodes[0].up, *(nodes[i].down for i in prompt))
    low, high = least_s, limit_s
    if least_s > limit_s or len(prompt) + sum(needs(limit_s)) > uplinks * limit_s:
        return None
    if len(prompt) + sum(needs(low)) <= uplinks * low:
        high = low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if len(prompt) + sum(needs(middle)) <= uplinks * middle:
            high = middle
        else:
            low = middle
    first_s, needed = high, needs(high)
    if any(need > nodes[i].down * first_s * (1 + 1e-9) for i, need in zip(others, needed, strict=True)):
        return None
    in_turn = sorted(range(len(others)), key=lambda at: (needed[at] <= 0, at))
    lacking = [1.0 - need for need in needed]
    spare = uplinks * first_s - len(prompt) - sum(needed)
    for at in in_turn:
        taken = min(spare, nodes[others[at]].down * first_s - needed[at], lacking[at])
        lacking[at] -= taken
        spare -= taken
    done = _in_turn([nodes[others[at]].down for at in in_turn], [lacking[at] for at in in_turn], uplinks, first_s)
    if max(done, default=0.0) > limit_s * (1 + 1e-6):
        return None
    deferred, turns, worker_s = [0.0] * len(order), [0] * len(order), [first_s] * len(order)
    for turn, (at, done_s) in enumerate(zip(in_turn, done, strict=True), start=1):
        number = others[at]
        deferred[number - 1], turns[number - 1], worker_s[number - 1] = 1.0 - needed[at], turn, done_s
    return Stages(frozenset(prompt), first_s, tuple(deferred), tuple(turns), tuple(worker_s))


def _in_turn(downs: Sequence[float], lacking: Sequence[float], uplinks: float, begun_s: float) -> list[float]:
    """When each worker is done, served from `begun_s` on in order, each as fast as its downlink and the remaining uplinks allow."""
    left, done, now = list(lacking), [begun_s] * len(lacking), begun_s
    waiting = [at for at, size in enumerate(left) if size > 1e-12]
    while waiting:
        rates, free = dict[int, float](), uplinks
        for at in waiting:
            rates[at] = min(downs[at], free)
            free -= rates[at]
        span = min(left[at] / rate for at, rate in rates.items() if rate > 0)
        now += span
        for at, rate in rates.items():
            left[at] -= rate * span
            done[at] = now
        waiting = [at for at in waiting if left[at] > 1e-12]
    return done


def marked(nodes: Sequence[NodeLink], made: Stages, own_relay: Sequence[float]) -> tuple[NodeLink, ...]:
    """The nodes with their deferred share and turn. `own_relay`: per node, the share of chunks that it is the first to get."""
    result = [nodes[0]]
    for number, node in enumerate(nodes[1:], start=1):
        if number in made.prompt:
            result.append(node)
            continue
        own = own_relay[number]
        at_once = max(0.0, 1.0 - made.deferred[number - 1] - own) / max(1e-9, 1.0 - own)
        result.append(replace(node, deferred_share=max(1e-6, 1.0 - at_once), turn=made.turns[number - 1]))
    return tuple(result)


def paced_trees(
    nodes: Sequence[NodeLink], made: Stages, relayed_by: Parents
) -> tuple[tuple[NodeLink, ...], tuple[Tree, ...]]:
    """Trees in which each worker relays what its uplink can carry in the first stage. The seed sends the rest: to prompt workers
    through one of them, to the others directly, later."""
    count, rate = len(nodes) - 1, 1 / made.first_s
    at_once = [0.0, *(1.0 - share for share in made.deferred)]  # copies of a chunk, per worker
    copies = sum(at_once)
    most = [0.0] * len(nodes)
    for number in range(1, len(nodes)):
        sent = max(copies - at_once[number], LEAST_SENT * copies)
        most[number] = nodes[number].up / (rate * sent)
        if number not in made.prompt:
            most[number] = min(most[number], OWN_RELAY_SHARE * nodes[number].down / rate)
    uplinks, last_s = sum(node.up for node in nodes[1:]), max(made.worker_s)
    behind = count - len(made.prompt)
    by_seed = max(0.0, (count - 1 - uplinks * last_s) / behind)  # share of all chunks that the seed defers
    by_seed = min(by_seed, max(0.0, (SEED_SPARE * nodes[0].up * last_s - 1) / behind), 0.5)
    strength = sum(nodes[root].up for root in made.prompt)
    seeds = [by_seed * nodes[root].up / strength if root in made.prompt else 0.0 for root in range(len(nodes))]
    if by_seed > LEAST_WEIGHT:  # every uplink stays full until the last worker is done, stage after stage
        others = len(made.prompt) - 1
        full = (uplinks * last_s - by_seed * others) / (count - 1)
        for number in range(1, len(nodes)):
            even = (nodes[number].up / uplinks) * (full + by_seed * others / (count - 1)) - seeds[number] * others / (
                count - 1
            )
            most[number] = min(most[number], max(0.0, even))
    relayed, seed_up = sum(most) * rate, nodes[0].up  # bytes a second
    if (
        relayed < (1.0 - by_seed) * rate
    ):  # the seed sends the rest to everyone, at the rate that fills its uplink and theirs
        rate = (seed_up - relayed + relayed * copies) / (by_seed + (1.0 - by_seed) * copies)
    direct = max(0.0, 1.0 - by_seed - relayed / rate)
    weights = [share * (1.0 - by_seed - direct) / sum(most) for share in most]
    trees = [
        Tree(weights[root], relayed_by(nodes, root)) for root in range(1, len(nodes)) if weights[root] > LEAST_WEIGHT
    ]
    if by_seed > LEAST_WEIGHT:
        trees += [
            Tree(seeds[root], _with_seeds_own(relayed_by(nodes, root), made.prompt)) for root in sorted(made.prompt)
        ]
    if direct > LEAST_WEIGHT:
        trees.append(Tree(direct, (0,) * count))
    total = sum(tree.weight for tree in trees)
    return marked(nodes, made, weights), tuple(Tree(tree.weight / total, tree.parents) for tree in trees)


def _with_seeds_own(parents: Sequence[int], prompt: frozenset[int]) -> tuple[int, ...]:
    """The same tree, except that workers with their own pace hang directly below the seed."""
    return tuple(parent if child in prompt else 0 for child, parent in enumerate(parents, start=1))


def first_stage_s(nodes: Sequence[NodeLink], trees: Sequence[Tree]) -> float:
    """Seconds per byte until all prompt workers are done: the slowest downlink or the most loaded uplink."""
    load = [0.0] * len(nodes)
    for tree in trees:
        relays = set(tree.parents)
        for child, parent in enumerate(tree.parents, start=1):
            own = nodes[child].deferred_share
            at_once = 1.0 if child in relays or not own else 0.0 if parent == 0 else 1.0 - own
            load[parent] += tree.weight * at_once
    slowest = min(node.down for node in nodes[1:] if not node.deferred_share)
    return max(1 / slowest, *(edges / node.up for node, edges in zip(nodes, load, strict=True)))


def paced_s(nodes: Sequence[NodeLink], made: Stages, trees: Sequence[Tree]) -> tuple[float, ...]:
    """Per worker, seconds per byte that these trees achieve. The first stage takes as long as the trees need for it; no later
    stage ends before every uplink can have sent its whole load."""
    first_s = first_stage_s(nodes, trees)
    load = [0.0] * len(nodes)
    for tree in trees:
        for parent in tree.parents:
            load[parent] += tree.weight
    behind_s = max(edges / node.up for node, edges in zip(nodes, load, strict=True))
    longer = max(1.0, behind_s / max(made.worker_s)) if behind_s > max(made.worker_s) else 1.0
    return tuple(
        first_s if number in made.prompt else max(first_s, done_s * longer)
        for number, done_s in enumerate(made.worker_s, start=1)
    )
