"""Rewards on a Ray cluster of two machines, both of this one: contained there as here, and a machine that goes costs no rollout."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from echo2.base.errors import ConfigError
from echo2.contain.messages import Limits
from echo2.tasks.rewards import Containment, RewardFailure, RewardPool
from echo2.tasks.task import TaskSpec
from tests.patience import WAIT_S

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # Ray's own
SPEC = TaskSpec("tests.unit.tasks.naughty:Naughty", {}, seed=3)
LIMITS = Limits(cpu_s=1, wall_s=30.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=machine)
    made.second = made.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield made
    ray.shutdown()
    made.shutdown()


def nodes_of_actors() -> set[str]:
    from ray._private.state import actors

    return {one["Address"]["NodeID"] for one in actors().values() if one["State"] == "ALIVE"}


def test_both_machines_score_contained_and_one_that_goes_costs_no_reward(cluster: Any) -> None:
    with closing(RewardPool(SPEC, LIMITS, Containment(ray=cluster.address))) as pool:
        texts = ["fine", "raise", "nan", "chatter", "fine"]
        results = [future.result(WAIT_S) for future in [pool.submit(n, text) for n, text in enumerate(texts)]]
        assert [r.reward.value if r.reward else None for r in results] == [1.0, None, None, 4.0, 5.0]
        assert [r.failure for r in results[1:3]] == [RewardFailure.RAISED] * 2
        end = time.monotonic() + WAIT_S
        while len(nodes_of_actors()) < 2:
            assert time.monotonic() < end, "one process on each machine"
            time.sleep(0.1)
        used_up = pool.submit(0, "spin").result(WAIT_S)
        assert used_up.failure is RewardFailure.EXHAUSTED and used_up.reward is not None and used_up.reward.value == 0.0
        cluster.remove_node(cluster.second)
        results = [future.result(WAIT_S) for future in [pool.submit(n, "fine") for n in range(8)]]
        assert [r.reward.value if r.reward else r.message for r in results] == [n + 1.0 for n in range(8)]


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("nobody there")))
    with pytest.raises(ConfigError, match=r"task\.ray: expected a Ray cluster at nowhere:1, got: nobody there"):
        RewardPool(SPEC, LIMITS, Containment(ray="nowhere:1"))
