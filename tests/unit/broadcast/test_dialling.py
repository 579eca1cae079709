"""Whom a node dials, where, and which of two hidden nodes does."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.broadcast.dialling import GRACE_S, Dialling
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.reachability import Access, circuit_address
from echo2.broadcast.trees import plan

SEED, LOW, HIGH = PeerId("seed"), PeerId("a-low"), PeerId("b-high")
HUB, LEARNER = PeerId("hub"), PeerId("learner")


def hidden(peer: PeerId, host: str, *relays: PeerId) -> NodeLink:
    return NodeLink(peer, access=Access(public_host=host, relays=relays))


def dialling(me: PeerId, *workers: NodeLink) -> Dialling:
    made = Dialling(me)
    made.plan = BroadcastPlan(1, (NodeLink(SEED, addresses=("seed:1",)), *workers), ())
    made.refresh(0.0)
    return made


PAIR = (hidden(LOW, "198.51.100.1", HUB, LEARNER), hidden(HIGH, "198.51.100.2", HUB, LEARNER))


def due(of: Dialling, now: float) -> dict[PeerId, str]:
    return {target.peer_id: address for target, address in of.due(set(), now)}


def test_a_hidden_node_dials_the_seed_and_meets_the_hidden_peer_at_the_first_relay() -> None:
    assert due(dialling(LOW, *PAIR), 0.0) == {SEED: "seed:1", HIGH: circuit_address(HUB)}


def test_the_other_hidden_node_leaves_the_first_try_to_it() -> None:
    other = dialling(HIGH, *PAIR)
    assert due(other, 0.0) == {SEED: "seed:1"}
    assert due(other, GRACE_S) == {SEED: "seed:1", LOW: circuit_address(HUB)}


def test_after_a_failure_the_next_relay_is_tried() -> None:
    mine = dialling(LOW, *PAIR)
    for at, relay in ((0.0, HUB), (10.0, LEARNER), (20.0, HUB)):
        assert due(mine, at)[HIGH] == circuit_address(relay)
        mine.failed(mine.targets[HIGH], "no answer", at)
        assert HIGH not in due(mine, at)


def test_hidden_nodes_without_a_shared_relay_are_no_neighbours() -> None:
    mine = dialling(LOW, hidden(LOW, "198.51.100.1", HUB), hidden(HIGH, "198.51.100.2", LEARNER))
    assert due(mine, 0.0) == {SEED: "seed:1"}


def test_a_node_that_can_be_dialled_waits_for_the_hidden_one() -> None:
    mine = dialling(LOW, NodeLink(LOW, addresses=("low:1",)), PAIR[1])
    assert HIGH not in due(mine, 100.0)


def planned(me: PeerId, *nodes: NodeLink) -> Dialling:
    """A star of the first node, which is the publisher and reached through a relay's byte pipes."""
    made = Dialling(me, publisher=(nodes[0].peer_id, "hub:8424"))
    made.plan = plan(nodes, 1)
    made.refresh(0.0)
    return made


def test_a_worker_that_can_be_dialled_leaves_the_first_try_to_a_learner_that_only_pipes_reach() -> None:
    mine = planned(HIGH, NodeLink(SEED), NodeLink(HIGH, addresses=("high:1",)))
    assert due(mine, 0.0) == {}
    assert due(mine, GRACE_S) == {SEED: "hub:8424"}, "it did not come"


def test_a_link_through_the_pipes_ends_once_for_one_that_the_learner_dials() -> None:
    mine = planned(HIGH, NodeLink(SEED), NodeLink(HIGH, addresses=("high:1",)))
    assert not mine.is_detour(SEED, ""), "it dialled us"
    assert mine.is_detour(SEED, "hub:8424")
    assert not mine.is_detour(SEED, "hub:8424"), "it could not dial us, so the pipes stay"


def test_a_hidden_worker_dials_the_pipes_at_once_and_stays_there() -> None:
    mine = planned(HIGH, NodeLink(SEED), NodeLink(LOW, addresses=("low:1",)), NodeLink(HIGH))
    assert due(mine, 0.0)[SEED] == "hub:8424" and not mine.is_detour(SEED, "hub:8424")
    direct = planned(HIGH, NodeLink(SEED, addresses=("seed:1",)), NodeLink(HIGH, addresses=("high:1",)))
    assert not direct.is_detour(SEED, "seed:1")
