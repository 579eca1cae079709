"""How two nodes meet, who dials, where, and which of the addresses that a worker names others are told."""

import pytest
from hypothesis import given, settings, strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.connections import GRACE_S, Dialling
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.reachability import (
    BLOCK_BYTES,
    NAMED_MAX,
    PROVEN_PEERS_MAX,
    PROVEN_S,
    TRANSFER_BYTES,
    TRANSFER_S,
    Access,
    LinkKind,
    MetAddresses,
    Seen,
    Throughput,
    circuit_address,
    dialable,
    is_punchable,
    is_relayed_neighbour,
    meeting,
    own_reach,
    relay_of,
)
from echo2.broadcast.trees import plan

A, B = PeerId("peer-a"), PeerId("peer-b")
HUB, LEARNER = PeerId("hub"), PeerId("learner")
PUBLIC = Access(addresses=("192.0.2.1:1",))
HIDDEN = Access(relays=(HUB,), public_host="198.51.100.7", lan_addresses=("192.168.1.2:5",))
ELSEWHERE = Access(relays=(LEARNER, HUB), public_host="203.0.113.9", lan_addresses=("192.168.1.2:6",))
SIBLING = Access(relays=(HUB,), public_host=HIDDEN.public_host, lan_addresses=("192.168.1.3:9",))
MET_B = Access(relays=(HUB,), public_host="198.51.100.7", met=(B,))
MET_A = Access(relays=(HUB,), public_host="203.0.113.9", met=(A,))


@pytest.mark.parametrize(
    ("mine", "theirs", "kind", "addresses", "is_fit_for_trees"),
    [
        (HIDDEN, PUBLIC, LinkKind.DIRECT, PUBLIC.addresses, True),
        (PUBLIC, HIDDEN, LinkKind.REVERSE, (), True),
        # a relay's owner does not pay for planned bulk
        (HIDDEN, ELSEWHERE, LinkKind.RELAYED, (circuit_address(HUB),), False),
        # behind one router, whose hosts may be isolated from one another
        (HIDDEN, SIBLING, LinkKind.DIRECT, (*SIBLING.lan_addresses, circuit_address(HUB)), False),
        (MET_B, MET_A, LinkKind.HOLE_PUNCHED, (circuit_address(HUB),), True),
        (MET_B, ELSEWHERE, LinkKind.RELAYED, (circuit_address(HUB),), False),
        (HIDDEN, Access(relays=(LEARNER,)), LinkKind.NONE, (), False),
    ],
)
def test_two_nodes_meet_in_the_best_way_that_both_can(
    mine: Access, theirs: Access, kind: LinkKind, addresses: tuple[str, ...], is_fit_for_trees: bool
) -> None:
    found = meeting(A, mine, B, theirs)
    assert (found.way.kind, found.addresses, found.is_fit_for_trees) == (kind, addresses, is_fit_for_trees)
    assert [relay_of(address) for address in addresses if "p2p" in address] == [HUB] * ("/p2p/" in str(addresses))


_accesses = st.builds(
    Access,
    addresses=st.sampled_from([(), ("192.0.2.1:1",)]),
    lan_addresses=st.just(("192.168.1.2:5",)),
    public_host=st.sampled_from(["", "198.51.100.7", "203.0.113.9"]),
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


# ---- who dials

SEED, LOW, HIGH = PeerId("seed"), PeerId("a-low"), PeerId("b-high")


def hidden(peer: PeerId, host: str, *relays: PeerId) -> NodeLink:
    return NodeLink(peer, access=Access(public_host=host, relays=relays))


PAIR = (hidden(LOW, "198.51.100.1", HUB, LEARNER), hidden(HIGH, "198.51.100.2", HUB, LEARNER))


def dialling(me: PeerId, *workers: NodeLink) -> Dialling:
    made = Dialling(me)
    made.plan = BroadcastPlan(1, (NodeLink(SEED, addresses=("seed:1",)), *workers), ())
    made.refresh(0.0)
    return made


def due(of: Dialling, now: float) -> dict[PeerId, str]:
    return {target.peer_id: address for target, address in of.due(set(), now)}


def test_of_two_hidden_nodes_the_first_dials_at_each_relay_in_turn_and_the_other_after_a_grace() -> None:
    mine, other = dialling(LOW, *PAIR), dialling(HIGH, *PAIR)
    for at, relay in ((0.0, HUB), (10.0, LEARNER), (20.0, HUB)):
        assert due(mine, at) == {SEED: "seed:1", HIGH: circuit_address(relay)}
        mine.failed(mine.targets[HIGH], "no answer", at)
        assert HIGH not in due(mine, at)
    assert due(other, 0.0) == {SEED: "seed:1"}
    assert due(other, GRACE_S) == {SEED: "seed:1", LOW: circuit_address(HUB)}


def test_who_cannot_be_dialled_or_shares_no_relay_is_not() -> None:
    apart = dialling(LOW, hidden(LOW, "198.51.100.1", HUB), hidden(HIGH, "198.51.100.2", LEARNER))
    assert due(apart, 0.0) == {SEED: "seed:1"}
    assert HIGH not in due(dialling(LOW, NodeLink(LOW, addresses=("low:1",)), PAIR[1]), 100.0), "it dials us"


def planned(me: PeerId, *nodes: NodeLink) -> Dialling:
    """A star of the first node, which is the publisher and reached through a relay's byte pipes."""
    made = Dialling(me, publisher=(nodes[0].peer_id, "hub:8424"))
    made.plan = plan(nodes, 1)
    made.refresh(0.0)
    return made


def test_a_learner_that_only_pipes_reach_dials_the_workers_that_it_can_and_a_detour_ends_once() -> None:
    mine = planned(HIGH, NodeLink(SEED), NodeLink(HIGH, addresses=("high:1",)))
    assert due(mine, 0.0) == {} and due(mine, GRACE_S) == {SEED: "hub:8424"}, "it did not come"
    assert not mine.is_detour(SEED, ""), "it dialled us"
    assert mine.is_detour(SEED, "hub:8424")
    assert not mine.is_detour(SEED, "hub:8424"), "it could not dial us, so the pipes stay"
    behind = planned(HIGH, NodeLink(SEED), NodeLink(LOW, addresses=("low:1",)), NodeLink(HIGH))
    assert due(behind, 0.0)[SEED] == "hub:8424" and not behind.is_detour(SEED, "hub:8424")


# ---- what others are told

SEEN = "203.0.113.9"
NEVER = (
    "169.254.169.254:8080", "127.0.0.1:5000", "10.0.0.5:5000", "192.168.1.1:8080", "203.0.113.10:5000",
    "metadata.internal:8080", "localhost:5000", "203.0.113.9:22", "203.0.113.9:1023", "203.0.113.9:65536",
    "203.0.113.9:", "203.0.113.9", "0.0.0.0:5000", "[::1]:5000", "[::ffff:127.0.0.1]:5000", "0xcb007109:5000",
    "203.0.113.9:0070001", "203.0.113.9:٣٠٠٠", "203.0.113.9@10.0.0.5:5000", "/p2p/relay/p2p-circuit", "224.0.0.1:5000", "", ":5000",
)  # fmt: skip


def test_an_address_elsewhere_than_where_it_is_seen_is_told_to_nobody() -> None:
    for address in NEVER:
        kept, left_out = dialable(Access(addresses=(address, f"{SEEN}:5000")), SEEN)
        assert (kept.addresses, left_out) == ((f"{SEEN}:5000",), (address,))
    assert dialable(Access(addresses=("127.0.0.1:8421",)), "127.0.0.9")[0].addresses == ()
    assert dialable(Access(addresses=("127.0.0.1:5000",)), "")[0] == Access()
    ports = tuple(f"{SEEN}:{port}" for port in range(5000, 15_000))
    assert dialable(Access(addresses=ports), SEEN)[0].addresses == ports[:NAMED_MAX]


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
    assert dialable(Access(addresses=(address,)), seen) == (Access(addresses=(address,)), ())


def test_where_it_was_met_is_told_beside_where_it_is_seen_and_a_proof_is_its_own_and_ends() -> None:
    named = Access(addresses=("198.51.100.4:8421", "198.51.100.4:8422", "10.0.0.5:5000", "[2001:db8::7]:8421"))
    kept, left_out = dialable(named, "2001:db8::7", ("[::ffff:198.51.100.4]:8421",))
    assert kept.addresses == ("198.51.100.4:8421", "[2001:db8::7]:8421")
    assert left_out == ("198.51.100.4:8422", "10.0.0.5:5000"), "another port or host was not met"
    assert dialable(Access(), SEEN, ("198.51.100.4:8421",))[0].addresses == (), "what it does not name nobody is told"
    proven = MetAddresses()
    proven.note(A, "198.51.100.4:1", 0.0)
    proven.note(A, "198.51.100.4:2", 1.0)
    assert (proven.of(A, 2.0), proven.of(B, 2.0)) == (("198.51.100.4:2",), ())
    assert proven.of(A, 1.0 + PROVEN_S) and not proven.of(A, 2.0 + PROVEN_S)
    for number in range(PROVEN_PEERS_MAX):
        proven.note(PeerId(f"p{number}"), "198.51.100.4:3", 2.0)
    assert not proven.of(A, 2.0)


def test_a_private_network_is_told_behind_the_host_that_is_seen_and_behind_no_other() -> None:
    lan = ("192.168.1.2:5000", "127.0.0.1:5000", "169.254.169.254:8080", "198.41.0.4:5000", "router:80", "10.0.0.5:53")
    behind = Access(lan_addresses=lan, public_host=SEEN, relays=(HUB,))
    assert dialable(behind, SEEN)[0] == Access(lan_addresses=lan[:1], public_host=SEEN, relays=(HUB,))
    assert dialable(behind, "203.0.113.10") == (Access(relays=(HUB,)), lan)
    many = tuple(f"192.168.1.2:{port}" for port in range(5000, 5001 + NAMED_MAX))
    assert dialable(Access(lan_addresses=many, public_host=SEEN), SEEN)[0].lan_addresses == many[:NAMED_MAX]


_ADDRESSES = st.lists(st.text("0123456789.:[]afx@/\u0663", max_size=24), max_size=6)


@settings(max_examples=40)
@given(_ADDRESSES, _ADDRESSES, st.text(max_size=20), st.sampled_from([SEEN, "::1", "10.0.0.1", "", "x"]))
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


# ---- what a machine concludes of its own link


def test_a_rate_leaves_out_the_time_in_which_a_connection_gets_going_and_a_transfer_ends_by_time_or_bytes() -> None:
    rate, slow, fast = Throughput(), Throughput(), Throughput()
    for step in range(41):  # two seconds at 1 MB/s, then two at 8 MB/s
        assert step > 1 or rate.bytes_per_s == 0.0, "a rate needs two moments"
        rate.add(50_000 if step <= 20 else 400_000, step * 0.05)
    assert rate.bytes_per_s == pytest.approx(8e6)
    assert not slow.is_enough(1e9)
    slow.add(BLOCK_BYTES, 5.0)
    assert not slow.is_enough(5.0 + 0.99 * TRANSFER_S) and slow.is_enough(5.0 + TRANSFER_S)
    for block in range(TRANSFER_BYTES // BLOCK_BYTES):
        assert not fast.is_enough(0.0), block
        fast.add(BLOCK_BYTES, 0.0)
    assert fast.is_enough(0.0)


HOME, OUTSIDE = ("192.168.1.2", 5000), "198.51.100.7"


@pytest.mark.parametrize(
    ("seen", "kind", "words"),
    [
        (Seen(HOME, (OUTSIDE, 5000), 7000, True), LinkKind.DIRECT, "198.51.100.7, port 7000"),
        (Seen(HOME, (OUTSIDE, 5000), 0, True), LinkKind.HOLE_PUNCHED, "192.168.1.2 is seen as 198.51.100.7"),
        (Seen(HOME, (OUTSIDE, 61234), 0, True), LinkKind.RELAYED, "port 5000 became 61234"),
        (Seen((OUTSIDE, 5000), (OUTSIDE, 5000), 0, True), LinkKind.HOLE_PUNCHED, "something filters"),
        (Seen(HOME, (OUTSIDE, 5000), 0, False), LinkKind.NONE, "no relay"),
        (Seen(None, (OUTSIDE, 5000), 0, True), LinkKind.RELAYED, "cannot be told here"),
    ],
)
def test_how_a_machine_can_be_met_comes_with_its_reason(seen: Seen, kind: LinkKind, words: str) -> None:
    found = own_reach(seen)
    assert found.kind is kind and words in found.reason
