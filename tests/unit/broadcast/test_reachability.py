"""The rule that chooses how two nodes meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.reachability import (
    Access,
    LinkKind,
    circuit_address,
    is_relayed_neighbour,
    meeting,
    relay_of,
)

A, B = PeerId("peer-a"), PeerId("peer-b")
HUB, LEARNER = PeerId("hub"), PeerId("learner")
PUBLIC = Access(addresses=("192.0.2.1:1",))
HIDDEN = Access(relays=(HUB,), public_host="198.51.100.7", lan_addresses=("192.168.1.2:5",))
ELSEWHERE = Access(relays=(LEARNER, HUB), public_host="203.0.113.9", lan_addresses=("192.168.1.2:6",))


def test_a_peer_that_can_be_dialled_is_dialled() -> None:
    found = meeting(A, HIDDEN, B, PUBLIC)
    assert found.way.kind is LinkKind.DIRECT
    assert found.addresses == PUBLIC.addresses


def test_a_hidden_peer_dials_the_one_that_can_be_dialled() -> None:
    found = meeting(A, PUBLIC, B, HIDDEN)
    assert found.way.kind is LinkKind.REVERSE
    assert found.addresses == ()
    assert found.is_fit_for_trees


def test_two_hidden_peers_meet_at_a_relay_that_both_have_a_place_at() -> None:
    found = meeting(A, HIDDEN, B, ELSEWHERE)
    assert found.way.kind is LinkKind.RELAYED
    assert found.addresses == (circuit_address(HUB),)
    assert not found.is_fit_for_trees, "a relay's owner does not pay for planned bulk"


def test_two_hidden_peers_behind_one_router_meet_in_its_network() -> None:
    sibling = Access(public_host=HIDDEN.public_host, lan_addresses=("192.168.1.3:9",), relays=(HUB,))
    found = meeting(A, HIDDEN, B, sibling)
    assert found.way.kind is LinkKind.DIRECT
    assert found.addresses == (*sibling.lan_addresses, circuit_address(HUB)), "isolated hosts still meet at the relay"
    assert not found.is_fit_for_trees, "not before they have met"


def test_a_punched_hole_counts_when_both_ends_have_it() -> None:
    mine, theirs = (
        Access(relays=(HUB,), public_host="198.51.100.7", met=(B,)),
        Access(relays=(HUB,), public_host="203.0.113.9", met=(A,)),
    )
    assert meeting(A, mine, B, theirs).way.kind is LinkKind.HOLE_PUNCHED
    assert meeting(A, mine, B, theirs).is_fit_for_trees
    assert meeting(A, mine, B, ELSEWHERE).way.kind is LinkKind.RELAYED


def test_hidden_peers_without_a_shared_relay_get_no_link() -> None:
    found = meeting(A, HIDDEN, B, Access(relays=(LEARNER,)))
    assert found.way.kind is LinkKind.NONE
    assert "share no relay" in found.way.reason


_hosts = st.sampled_from(["", "198.51.100.7", "203.0.113.9"])
_accesses = st.builds(
    Access,
    addresses=st.sampled_from([(), ("192.0.2.1:1",)]),
    lan_addresses=st.just(("192.168.1.2:5",)),
    public_host=_hosts,
    relays=st.sampled_from([(), (HUB,), (LEARNER,), (HUB, LEARNER)]),
    met=st.sampled_from([(), (A, B)]),
)


@given(_accesses, _accesses)
def test_both_ends_come_to_the_same_kind_and_at_least_one_dials(mine: Access, theirs: Access) -> None:
    there, back = meeting(A, mine, B, theirs), meeting(B, theirs, A, mine)
    swapped = {LinkKind.DIRECT: {LinkKind.DIRECT, LinkKind.REVERSE}, LinkKind.REVERSE: {LinkKind.DIRECT}}
    assert back.way.kind in swapped.get(there.way.kind, {there.way.kind})
    assert there.way.reason
    if there.way.kind not in (LinkKind.NONE, LinkKind.HOLE_PUNCHED):
        assert there.addresses or back.addresses
    assert there.is_fit_for_trees == back.is_fit_for_trees


@pytest.mark.parametrize("count", [2, 9, 40])
def test_links_through_relays_are_few_and_mutual(count: int) -> None:
    hidden = [PeerId(f"p{number:03}") for number in range(count)]
    for peer in hidden:
        near = [other for other in hidden if other != peer and is_relayed_neighbour(peer, other, hidden)]
        assert min(count - 1, 8) == len(near)
        assert all(is_relayed_neighbour(other, peer, hidden) for other in near)


def test_a_circuits_address_names_its_relay() -> None:
    assert relay_of(circuit_address(HUB)) == HUB
    assert relay_of("192.0.2.1:443") is None
