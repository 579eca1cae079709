"""For every field of every call: extreme, missing, repeated and contradictory values to the real daemons, in processes of
their own. None ends, none keeps memory, none is held up, and the run goes on.
"""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.redteam.attacking import ATTACKERS
from tests.redteam.cost import DAEMONS, Cost, attacking, cost_of, count_live_bytes, idle_run, live_bytes
from tests.redteam.scene import scene_of

GRAMMARS = [name for name in ATTACKERS if "by grammar" in name]
FLOODS = ["flood of whole have-maps", "flood of the largest reports"]
LIVE_BYTES_MAX = 16 << 20
"""Allocated for an attack and not freed, of one daemon."""
KEPT_BYTES_MAX = 48 << 20
"""In RAM: a learner that nobody attacks differs by 20 MiB from one quarter of a minute to the next, as the allocator keeps pages
of which a part is in use."""
HELD_MS_MAX = 50


async def attacked(cluster: Cluster, attackers: list[str], seconds: float) -> dict[str, Cost]:
    scene = await scene_of(cluster.run_folder)
    costs: dict[str, Cost] = {}

    async def attack_with(name: str, for_s: float) -> Cost:
        with attacking(cluster, name) as attack:
            return await cost_of(cluster, scene, attack, for_s)

    for name in attackers:
        await attack_with(name, 0.5)  # what is made on first use is not kept of an attack
    before = await settled(cluster)
    for name in attackers:
        cost = costs[name] = await attack_with(name, seconds)
        if cost.ended:
            break
        after = await settled(cluster)  # the attacker's connections, which have bounds of their own, are gone
        cost.live_bytes = {daemon: after[daemon] - before[daemon] for daemon in DAEMONS}
        before = after
    return costs


async def settled(cluster: Cluster) -> dict[str, int]:
    """The least that each holds over some seconds: streams end, and a step in the making holds its batch."""
    looks = []
    for _ in range(3):
        await asyncio.sleep(1.0)  # a real process has no virtual clock
        looks.append(live_bytes(cluster))
    return {daemon: min(look[daemon] for look in looks) for daemon in DAEMONS}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("attackers", "seconds", "messages_min"),
    [
        pytest.param([*GRAMMARS, *FLOODS], 2.0, 1001, id="each for a moment"),
        pytest.param(GRAMMARS, 70.0, 100_000, id="a hundred thousand messages"),
    ],
)
def test_no_message_ends_a_daemon_nor_holds_it_up_nor_stays_in_its_memory(
    tmp_path: Path, attackers: list[str], seconds: float, messages_min: int
) -> None:
    with Cluster(tmp_path, idle_run(tmp_path), workers=1) as cluster:
        count_live_bytes(cluster)
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 12, "the first steps: a run that has just begun grows by itself")
        costs = asyncio.run(attacked(cluster, attackers, seconds))
        print("\n".join(f"{name}: {cost}" for name, cost in costs.items()))
        check(costs)
        after = cluster.step()
        cluster.wait_until(lambda: cluster.step() > after, "a step after the attacks")
        for name in ("coordinator", "learner", "w0"):
            assert "Traceback" not in cluster.log(name), cluster.log(name)[-4000:]
    assert sum(cost.messages for cost in costs.values()) >= messages_min


def check(costs: dict[str, Cost]) -> None:
    for name, cost in costs.items():
        assert not cost.ended, name
        assert cost.messages > 0, name
        assert max(cost.live_bytes.values()) <= LIVE_BYTES_MAX, (name, cost)
        assert max(cost.kept_bytes.values()) <= KEPT_BYTES_MAX, (name, cost)
        assert cost.held_ms["coordinator"] <= HELD_MS_MAX, (name, cost)
