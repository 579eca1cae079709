"""Which of the addresses that a worker names others are told to dial."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.reachability import (
    NAMED_MAX,
    PROVEN_PEERS_MAX,
    PROVEN_S,
    Access,
    MetAddresses,
    dialable,
    is_punchable,
)

SEEN = "203.0.113.9"
NEVER = (
    "169.254.169.254:8080", "127.0.0.1:5000", "10.0.0.5:5000", "192.168.1.1:8080", "203.0.113.10:5000",
    "metadata.internal:8080", "localhost:5000", "203.0.113.9:22", "203.0.113.9:1023", "203.0.113.9:65536",
    "203.0.113.9:", "203.0.113.9", "0.0.0.0:5000", "[::1]:5000", "[::ffff:127.0.0.1]:5000", "0xcb007109:5000",
    "203.0.113.9:٣٠٠٠", "203.0.113.9@10.0.0.5:5000", "/p2p/relay/p2p-circuit", "224.0.0.1:5000", "", ":5000",
)  # fmt: skip


@pytest.mark.parametrize("address", NEVER)
def test_an_address_elsewhere_than_where_it_is_seen_is_told_to_nobody(address: str) -> None:
    kept, left_out = dialable(Access(addresses=(address, f"{SEEN}:5000")), SEEN)
    assert kept.addresses == (f"{SEEN}:5000",)
    assert left_out == (address,)


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("127.0.0.1:8421", "127.0.0.1"),  # a run on one machine
        ("127.0.0.1:8421", "::1"),  # the same, by the name localhost
        ("192.168.1.7:8421", "192.168.1.7"),  # a run in one network
        ("203.0.113.9:1024", SEEN),
        ("[2001:db8::7]:8421", "2001:db8:0::7"),
        ("[::ffff:203.0.113.9]:8421", SEEN),
    ],
)
def test_the_host_that_it_is_seen_from_is_told(address: str, seen: str) -> None:
    kept, left_out = dialable(Access(addresses=(address,)), seen)
    assert (kept.addresses, left_out) == ((address,), ())


def test_where_it_was_met_is_told_beside_where_it_is_seen_however_it_is_written() -> None:
    named = Access(addresses=("198.51.100.4:8421", "198.51.100.4:8422", "10.0.0.5:5000", "[2001:db8::7]:8421"))
    kept, left_out = dialable(named, "2001:db8::7", ("[::ffff:198.51.100.4]:8421",))
    assert kept.addresses == ("198.51.100.4:8421", "[2001:db8::7]:8421")
    assert left_out == ("198.51.100.4:8422", "10.0.0.5:5000"), "another port or host was not met"
    assert dialable(Access(), SEEN, ("198.51.100.4:8421",))[0].addresses == (), "what it does not name nobody is told"


def test_a_proof_is_its_own_workers_ends_and_the_last_counts() -> None:
    proven, a, b = MetAddresses(), PeerId("a"), PeerId("b")
    proven.note(a, "198.51.100.4:1", 0.0)
    proven.note(a, "198.51.100.4:2", 1.0)
    assert (proven.of(a, 2.0), proven.of(b, 2.0)) == (("198.51.100.4:2",), ())
    assert proven.of(a, 1.0 + PROVEN_S) and not proven.of(a, 2.0 + PROVEN_S)
    for number in range(PROVEN_PEERS_MAX):
        proven.note(PeerId(f"p{number}"), "198.51.100.4:3", 2.0)
    assert not proven.of(a, 2.0)


def test_a_worker_seen_at_one_loopback_address_names_no_other() -> None:
    assert dialable(Access(addresses=("127.0.0.1:8421",)), "127.0.0.9")[0].addresses == ()


def test_a_private_network_is_told_behind_the_host_that_is_seen_and_behind_no_other() -> None:
    lan = (
        "192.168.1.2:5000",
        "127.0.0.1:5000",
        "169.254.169.254:8080",
        "198.41.0.4:5000",
        "router:8080",
        "10.0.0.5:53",
    )
    behind = Access(lan_addresses=lan, public_host=SEEN, relays=(PeerId("relay"),))
    kept, _ = dialable(behind, SEEN)
    assert kept == Access(lan_addresses=lan[:1], public_host=SEEN, relays=(PeerId("relay"),))
    elsewhere, left_out = dialable(behind, "203.0.113.10")
    assert elsewhere == Access(relays=(PeerId("relay"),))
    assert left_out == lan


def test_a_peer_without_a_host_is_told_to_nobody() -> None:
    assert dialable(Access(addresses=("127.0.0.1:5000",), public_host=""), "")[0] == Access()


def test_one_host_names_few_ports() -> None:
    ports = tuple(f"{SEEN}:{port}" for port in range(5000, 15_000))
    assert dialable(Access(addresses=ports), SEEN)[0].addresses == ports[:NAMED_MAX]


@given(st.lists(st.text(max_size=40)), st.lists(st.text(max_size=40)), st.text(max_size=20), st.text(max_size=20))
def test_whatever_is_named_nothing_breaks_and_nothing_is_told_unseen(
    addresses: list[str], lan: list[str], public: str, seen: str
) -> None:
    kept, left_out = dialable(Access(tuple(addresses), tuple(lan), public), seen)
    assert len(kept.addresses) <= NAMED_MAX
    assert not set(left_out) & {*kept.addresses, *kept.lan_addresses}


@pytest.mark.parametrize(
    ("host", "port", "own_host", "expected"),
    [
        ("9.9.9.9", 4001, "8.8.8.8", True),
        ("9.9.9.9", 4001, "10.0.0.1", True),
        ("9.9.9.9", 4001, "", True),
        ("10.0.0.9", 4001, "10.0.0.1", True),  # a run in one network
        ("127.0.0.1", 4001, "127.0.0.1", True),
        ("10.0.0.9", 4001, "8.8.8.8", False),
        ("10.0.0.9", 4001, "", False),
        ("127.0.0.1", 4001, "10.0.0.1", False),
        ("::ffff:127.0.0.1", 4001, "8.8.8.8", False),
        ("169.254.169.254", 4001, "127.0.0.1", False),
        ("9.9.9.9", 22, "8.8.8.8", False),
        ("metadata.internal", 4001, "8.8.8.8", False),
    ],
)
def test_a_hole_is_punched_to_no_place_closer_than_where_we_are_seen(
    host: str, port: int, own_host: str, expected: bool
) -> None:
    assert is_punchable(host, port, own_host) is expected
