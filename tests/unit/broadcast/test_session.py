"""The real session cores on a virtual clock: near the bound, no byte twice, and done in spite of faults."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.broadcast_model.network import BroadcastNetwork
from echo2.base.ids import PeerId
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey, all_of
from echo2.broadcast.events import (
    Accuse,
    Cancel,
    ChunkSeen,
    ChunkSent,
    Emptied,
    Event,
    Forgotten,
    Have,
    HeaderSeen,
    PeerDown,
    PeerUp,
    PlanSet,
    RelayAck,
    Request,
    Route,
    SealSeen,
    SendChunk,
    SendHeader,
    SendSeal,
    UplinkSeen,
    Wanted,
    Woken,
)
from echo2.broadcast.pace import PULL_CHUNKS_MAX, REPLAYS_MAX, REQUESTS_HELD_MAX, SLOTS_PER_PEER
from echo2.broadcast.peer import KNOWN_MAX, Artifact, OpenRequest, Outgoing, Peer
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree, fluid_bound
from echo2.broadcast.pulling import CANDIDATES_MAX, choose, window_chunks
from echo2.broadcast.session import BroadcastSession
from echo2.broadcast.trees import plan
from echo2.wire import broadcast as wire
from tests.unit.broadcast.acts import acts
from tests.unit.broadcast.test_topology import fleet

MIB = 1 << 20
KEY = ArtifactKey(b"0123456789abcdef")
HETEROGENEOUS = [50.0, 200.0, 75.0, 100.0, 150.0, 50.0, 100.0, 75.0]


def network(nodes: list[NodeLink], chunk_bytes: int = 128 << 10) -> BroadcastNetwork:
    made = BroadcastNetwork(plan(nodes, 1, 64 * MIB, chunk_bytes))
    made.publish(64 * MIB, chunk_bytes)
    return made


def bound_s(nodes: list[NodeLink]) -> float:
    return 64 * MIB / fluid_bound(nodes).rate_bytes_per_s


@pytest.mark.parametrize(
    ("uplinks", "natted", "ratio_max"), [([100.0] * 4, 0, 1.08), (HETEROGENEOUS, 0, 1.12), ([100.0] * 8, 2, 1.20)]
)
def test_broadcast_is_close_to_the_fluid_bound_and_sends_nothing_twice(
    uplinks: list[float], natted: int, ratio_max: float
) -> None:
    nodes = fleet(uplinks, natted=natted)
    net = network(nodes)
    net.run(60)
    assert net.slowest_s <= ratio_max * bound_s(nodes)
    if not natted:
        assert all(node.session.duplicates_bytes == 0 for node in net.nodes.values())
        optimum = len(uplinks) * 64 * MIB - sum(n.link.up for n in list(net.nodes.values())[1:]) * bound_s(nodes)
        assert net.nodes[net.seed_id].sent_bytes <= 1.15 * optimum


def test_broadcast_begins_while_the_seed_still_encodes() -> None:
    nodes = fleet([100.0] * 4)
    net = BroadcastNetwork(plan(nodes, 1))
    slow_encoder = 0.5 * fluid_bound(nodes).rate_bytes_per_s
    net.publish(16 * MIB, 128 << 10, encode_bytes_per_s=slow_encoder)
    net.run(60)
    assert net.slowest_s <= 16 * MIB / slow_encoder + 0.6


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_weak_uplinks_relay_once_the_only_strong_one_is_gone_and_not_before(fault: str) -> None:
    nodes = fleet([1000.0, *[20.0] * 7], seed_up_mbit=100)
    net = network(nodes, chunk_bytes=1 << 20)
    half = bound_s(nodes) / 2
    weak = [node for name, node in net.nodes.items() if name not in (net.seed_id, PeerId("w0"))]
    before = list[int]()
    net.at(half, lambda: before.extend(node.sent_bytes for node in weak))
    net.at(half, lambda: getattr(net, fault)(PeerId("w0")))
    net.run(60)
    times = [t for name, t in net.worker_times().items() if name != "w0"]
    star_s = half + 7 * (64 * MIB - half * nodes[0].up) / nodes[0].up
    assert before == [0] * 7
    assert all(t is not None and t < 0.9 * star_s for t in times), "the learner sent it to each of them itself"


def test_relays_that_die_or_freeze_are_replaced_and_one_that_thaws_catches_up() -> None:
    nodes = fleet([100.0] * 5)
    net = network(nodes)
    half = bound_s(nodes) / 2
    net.at(half, lambda: net.kill(PeerId("w0")))
    net.at(half, lambda: net.freeze(PeerId("w1")))
    net.at(20.0, lambda: net.thaw(PeerId("w1")))
    net.run(60)
    times = net.worker_times()
    survivors = [node for node in nodes if node.peer_id not in ("w0", "w1")]
    others = max(t for name, t in times.items() if name not in ("w0", "w1") and t is not None)
    assert others <= 1.5 * max(bound_s(nodes), bound_s(survivors)), "the others waited for a frozen relay"
    frozen = times["w1"]
    assert frozen is not None and frozen < 28.0


def test_a_plan_that_the_seed_has_before_its_relays_holds_nothing_up() -> None:
    """The coordinator tells the learner first, and workers one after another."""
    nodes = fleet([100.0] * 4)

    def took_s(told_after_s: float) -> float:
        net, fresh = BroadcastNetwork(plan(nodes, 1)), plan(nodes, 2)
        net.deliver(net.seed_id, PlanSet(fresh))
        net.publish(2 * MIB, 16 << 10)
        for node in nodes[1:]:
            net.at(told_after_s, lambda peer=node.peer_id: net.deliver(peer, PlanSet(fresh)))  # type: ignore[misc]
        net.run(60)
        return net.slowest_s

    assert took_s(0.15) < took_s(0.0) + 0.3


def test_late_joiner_pulls_from_peers_rather_than_from_the_seed() -> None:
    nodes = fleet([100.0] * 5)
    late = PeerId("w4")
    full = plan(nodes, 1)
    net = BroadcastNetwork(full, are_apart=True)
    for link in nodes:
        for peer in full.neighbours(link.peer_id):
            if late not in (link.peer_id, peer):
                net.connect(link.peer_id, peer)
    for link in nodes:
        net.deliver(link.peer_id, PlanSet(plan(nodes[:-1], 1)))
    net.publish(8 * MIB, 128 << 10)

    def join() -> None:
        for link in nodes[:-1]:
            net.connect(late, link.peer_id)

    net.at(4.0, join)
    net.run(3.9)
    before = net.nodes[net.seed_id].sent_bytes
    net.run(60)
    assert net.is_done
    assert net.nodes[net.seed_id].sent_bytes <= before + 1 * MIB


def test_newcomers_who_come_together_have_most_of_a_keyframe_of_each_other() -> None:
    """All asked the publisher for the same chunks first, so that it sent the whole of it to each."""
    nodes = fleet([100.0] * 6)
    net = BroadcastNetwork(plan(nodes, 1))
    net.publish(16 * MIB, 128 << 10, is_pushed=False)
    net.run(60)
    assert net.is_done and net.nodes[net.seed_id].sent_bytes <= 3 * 16 * MIB


@settings(max_examples=20, deadline=None)
@given(
    uplinks=st.lists(st.sampled_from([20.0, 50.0, 100.0, 400.0]), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    deaths=st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 4.0)), max_size=2),
    freezes=st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 4.0)), max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 3.0)), max_size=4),
)
def test_once_faults_stop_every_living_worker_has_everything(
    uplinks: list[float],
    seed: int,
    deaths: list[tuple[int, float]],
    freezes: list[tuple[int, float]],
    cuts: list[tuple[int, int, float]],
) -> None:
    nodes = fleet(uplinks)
    net = BroadcastNetwork(plan(nodes, 1), seed=seed)
    net.publish(4 * MIB, 64 << 10)
    for number, when in deaths:
        if number < len(uplinks):  # the last worker lives
            net.at(when, lambda n=number: net.kill(nodes[n].peer_id))  # type: ignore[misc]
    for number, when in freezes:
        peer = nodes[min(number, len(uplinks))].peer_id
        net.at(when, lambda p=peer: net.freeze(p))  # type: ignore[misc]
        net.at(when + 3.0, lambda p=peer: net.thaw(p))  # type: ignore[misc]

    for first, second, when in cuts:
        one, two = (nodes[min(n, len(uplinks))].peer_id for n in (first, second))
        if one != two:
            net.at(when, lambda a=one, b=two: net.cut(a, b))  # type: ignore[misc]
            net.at(when + 1.0, lambda a=one, b=two: net.connect(a, b))  # type: ignore[misc]
    net.run(120)
    assert net.is_done, f"at {net.now}: {net.worker_times()}"
    assert not net.accusations, "an honest peer was accused"


def session_with(*peers: str) -> BroadcastSession:
    """Connected to these peers, which have told of the artifact."""
    made = BroadcastSession(PeerId("me"))
    for peer in map(PeerId, peers):
        acts(made, 0.0, PeerUp(peer), HeaderSeen(peer, KEY, is_wanted=True))
    return made


def publishing(uplink_bytes_per_s: float = 0.0) -> BroadcastSession:
    made = BroadcastSession(PeerId("me"), uplink_bytes_per_s=uplink_bytes_per_s)
    acts(made, 0.0, HeaderSeen(None, KEY, is_wanted=True), PeerUp(PeerId("a")))
    return made


@pytest.mark.parametrize("is_asked", [False, True])
def test_chunk_sent_twice_unasked_is_held_against_the_peer(is_asked: bool) -> None:
    """But not once of each artifact, as on a link of weeks whose further connections end now and then."""
    session, bad, accused = session_with("bad"), PeerId("bad"), list[PeerId]()
    for key in (ArtifactKey(bytes([number]) * 16) for number in range(REPLAYS_MAX)):
        events = HeaderSeen(bad, key, is_wanted=True), *[ChunkSeen(bad, key, 0, 1000)] * 2
        assert not acts(session, 0.0, *events, kind=Accuse)
    if is_asked:
        session.handle(Have(bad, KEY, 0b1, True), 0.0)
        assert acts(session, 10.0, Woken(), kind=Request)
    for turn in range(REPLAYS_MAX + 1):
        assert not accused
        accused += [a.peer for a in acts(session, 10.0 + 0.01 * turn, ChunkSeen(bad, KEY, 0, 1000), kind=Accuse)]
    assert accused == ([] if is_asked else [bad])


def test_a_header_and_the_first_seal_go_on_to_whoever_has_not_told_of_them() -> None:
    session, told = session_with("a"), HeaderSeen(PeerId("a"), ArtifactKey(b"k" * 16), is_wanted=True)
    acts(session, 0.0, PeerUp(PeerId("b")), PeerUp(PeerId("c")))
    seals = SealSeen(PeerId("a"), told.key, 1), SealSeen(PeerId("b"), told.key, 9)
    actions = acts(session, 0.0, told, Have(PeerId("c"), told.key, 1, is_sealed=True), *seals)
    sent = [(type(action), action.peer) for action in actions if isinstance(action, SendHeader | SendSeal)]
    assert sent == [(SendHeader, PeerId("b")), (SendHeader, PeerId("c")), (SendSeal, PeerId("b"))]
    assert session.artifacts[told.key].chunk_count == 1, "the first was verified"
    session.handle(PeerUp(PeerId("d")), 0.0)
    invented = Have(PeerId("d"), told.key, 0b111, is_sealed=False)
    assert SendSeal(PeerId("d"), told.key) in session.handle(invented, 0.1)
    assert [asked.indices for asked in acts(session, 30.0, Woken(), kind=Request)] == [(0,)]


def test_what_the_disk_lost_is_asked_for_again_at_once() -> None:
    session, peer = session_with("a"), PeerId("a")
    session.handle(Have(peer, KEY, 0b11, True), 0.0)
    acts(session, 0.1, SealSeen(peer, KEY, 2), ChunkSeen(peer, KEY, 0, 1000), ChunkSeen(peer, KEY, 1, 1000))
    assert [asked.indices for asked in acts(session, 0.2, Emptied(KEY), kind=Request)] == [(0, 1)]
    assert Cancel(peer, KEY, (0, 1)) in session.handle(Wanted(KEY, False), 0.3)


def test_what_only_a_peer_that_left_had_keeps_no_other_chunk_from_being_asked_for() -> None:
    session, b = session_with("a", "b"), PeerId("b")
    acts(session, 0.0, Have(PeerId("a"), KEY, all_of(2 * CANDIDATES_MAX), False), PeerDown(PeerId("a")))
    session.handle(Have(b, KEY, 1 << 2 * CANDIDATES_MAX, False), 0.1)
    assert acts(session, 30.0, Woken(), kind=Request) == [Request(b, KEY, (2 * CANDIDATES_MAX,))]


@pytest.mark.parametrize("is_pushed", [False, True])
def test_a_peer_with_a_full_window_keeps_no_other_from_being_asked(is_pushed: bool) -> None:
    """The first chunks are its own and the publisher's, who is asked for none that others have."""
    artifact = Artifact(KEY, True, missing_since=dict.fromkeys(range(CANDIDATES_MAX), 8.0))
    artifact.pushed_at = 10.0 if is_pushed else artifact.pushed_at
    full, free, publisher = (Peer(PeerId(name)) for name in "abc")
    full.haves[KEY], publisher.haves[KEY] = all_of(CANDIDATES_MAX - 20), all_of(CANDIDATES_MAX)
    free.haves[KEY] = publisher.haves[KEY] ^ full.haves[KEY]
    full.requests = {(KEY, 1000 + number): OpenRequest(0.0, 99.0) for number in range(PULL_CHUNKS_MAX)}
    peers = {peer.peer_id: peer for peer in (full, free, publisher)}
    chosen = choose(artifact, peers, publisher.peer_id, PeerId("me"), [PeerId("me")], random.Random(0), 10.0)
    assert list(chosen) == [free.peer_id] and len(chosen[free.peer_id]) == window_chunks(free, artifact)


def test_request_that_is_not_answered_goes_to_another_holder() -> None:
    session, asked, now = session_with("a", "b"), list[PeerId](), 0.0
    acts(session, 0.0, *(Have(PeerId(name), KEY, 0b1, True) for name in ("a", "b")))
    while now < 10.0 and len(set(asked)) < 2:
        asked += [request.peer for request in acts(session, now, Woken(), kind=Request)]
        now += 0.1
    assert set(asked) == {PeerId("a"), PeerId("b")}


def test_a_chunk_that_is_asked_for_again_and_again_is_sent_once_while_it_may_be_on_its_way() -> None:
    """Answers that wait in a full uplink were sent anew each time that a peer lost its patience, and nothing else went out."""
    session, peer = publishing(), PeerId("a")
    session.handle(ChunkSeen(None, KEY, 0, 1000), 0.0)
    sent: list[float] = []

    def ask(now: float, is_lost: bool = False) -> None:
        at_once = acts(session, now, Request(peer, KEY, (0,)), kind=SendChunk)
        if at_once + acts(session, now + 0.06, Woken(), kind=SendChunk):
            sent.append(now)
            session.handle(ChunkSent(peer, KEY, 0, is_lost), now + 0.1)

    for now in (10.0, 20.0, 30.0, 39.0):
        ask(now)
    assert sent == [10.0]
    ask(41.0, is_lost=True)
    ask(43.0)
    assert sent == [10.0, 41.0, 43.0], "the disk did not have it the second time, so it was not on its way"


def test_a_peer_that_no_longer_asks_for_a_chunk_gets_it_all_the_same_if_it_is_to_be_pushed() -> None:
    """It asks for it no more also where the answer has not come in time."""
    session, peer = publishing(), PeerId("a")
    fresh = (ChunkSeen(None, KEY, index, 1000, is_fresh=True) for index in range(3))
    assert len(acts(session, 0.0, *fresh, kind=SendChunk)) == SLOTS_PER_PEER == 2, "so many at a time"
    acts(session, 0.1, Request(peer, KEY, (2,)), Cancel(peer, KEY, (2,)))
    taken = acts(session, 0.3, ChunkSent(peer, KEY, 0), ChunkSent(peer, KEY, 1), kind=SendChunk)
    assert [chunk.index for chunk in taken] == [2]


def test_a_childs_lie_about_its_backlog_makes_no_message_that_our_parent_cannot_read() -> None:
    """Else the parent bans us for it."""
    names = ("seed", "me", "liar", "leaf")
    nodes = tuple(NodeLink(PeerId(name), name, (name,), 1e6, 1e6, 0.1) for name in names)
    session, liar = session_with("seed", "liar"), PeerId("liar")
    acts(session, 0.0, PlanSet(BroadcastPlan(1, nodes, (Tree(1.0, (0, 1, 2)),))), RelayAck(liar, KEY, 0, CHUNKS_MAX))
    acts(session, 0.1, *(ChunkSeen(PeerId("seed"), KEY, index, 1000, Route(1, 0)) for index in range(4)))
    acks = acts(session, 0.2, ChunkSent(liar, KEY, 0), PeerDown(liar), kind=RelayAck)
    assert [ack.index for ack in acks] == [0, 1, 2, 3], "who is gone is not waited for"
    assert all(wire.control_from(wire.parse(wire.control_frame(ack), "me"), ack.peer) == ack for ack in acks)


def test_a_late_node_is_pushed_nothing_that_it_need_not_relay_whether_it_or_the_plan_came_first() -> None:
    nodes = tuple(NodeLink(PeerId(n), n, (n,), 1e6, 1e6, 0.1, is_late=n in ("a", "c")) for n in ("me", "a", "b", "c"))
    for trees in ((), (Tree(1.0, (0, 0, 0)),)):
        session = publishing()
        acts(session, 0.0, PlanSet(BroadcastPlan(1, nodes, trees)), PeerUp(PeerId("b")), PeerUp(PeerId("c")))
        fresh = acts(session, 0.1, ChunkSeen(None, KEY, 0, 1000, is_fresh=True), kind=SendChunk)
        assert [chunk.peer for chunk in fresh] == ["b"]


def test_a_plan_of_a_coordinator_whose_clock_went_back_is_followed() -> None:
    """Epochs are times, so after its restart they are lower."""
    names = ("seed", "me", "leaf")
    nodes = tuple(NodeLink(PeerId(name), name, (name,), 1e6, 1e6, 0.1) for name in names)
    session = session_with("seed", "leaf")
    plans = {epoch: PlanSet(BroadcastPlan(epoch, nodes, (Tree(1.0, (0, 1)),))) for epoch in (11, 12, 13, 5, 6)}
    acts(session, 0.0, *(plans[epoch] for epoch in (11, 12, 13, 5)))
    sent = acts(session, 0.1, ChunkSeen(PeerId("seed"), KEY, 0, 1000, Route(5, 0)), kind=SendChunk)
    assert [chunk.peer for chunk in sent] == ["leaf"]
    assert not acts(session, 0.2, ChunkSeen(PeerId("seed"), KEY, 1, 1, Route(6, 0)), kind=SendChunk)
    sent = acts(session, 0.3, plans[6], kind=SendChunk)
    assert [chunk.index for chunk in sent] == [1], "it came before its plan"


def test_what_a_peer_was_told_of_thousands_of_versions_is_not_kept_for_ever() -> None:
    session = session_with("a")
    for number in range(4000):
        key = ArtifactKey(number.to_bytes(16))
        acts(session, number, HeaderSeen(None, key, is_wanted=False), SealSeen(None, key, 1), Forgotten(key))
    assert max(len(session.peers[PeerId("a")].knows), len(session.peers[PeerId("a")].sealed)) <= KNOWN_MAX + 1


def test_push_that_is_late_as_usual_is_waited_for_and_not_pulled() -> None:
    """A neighbour has each chunk 2.5 s before it is pushed to us; after the first such, none is asked for."""
    session = session_with("relay", "neighbour")
    asked: dict[int, float] = {}
    for tick in range(200):
        now = 0.1 * tick
        events: list[Event] = [Have(PeerId("neighbour"), KEY, (1 << tick + 1) - 1, False)]
        events += [ChunkSeen(PeerId("relay"), KEY, tick - 25, 1000)] if tick >= 25 else []
        for request in acts(session, now, *events, kind=Request):
            asked.update(dict.fromkeys(request.indices, now))
    assert asked, "nothing was pulled before the lag was known"
    assert max(asked.values()) < 4.0


def test_last_few_chunks_are_pulled_before_a_late_push_brings_them() -> None:
    session = session_with("relay", "neighbour")
    acts(session, 0.0, SealSeen(PeerId("relay"), KEY, 200), Have(PeerId("neighbour"), KEY, (1 << 200) - 1, True))
    for index in range(196):  # pushes are 3 s behind
        session.handle(ChunkSeen(PeerId("relay"), KEY, index, 1000), 3.0 + index * 1e-3)
    asked: list[int] = []
    for tick in range(10):  # patience with a push that is usually 3 s behind would be 6 s
        for request in acts(session, 3.25 + 0.05 * tick, Woken(), kind=Request):
            asked += request.indices
    assert asked and set(asked) <= {196, 197, 198, 199}


def test_what_was_lost_and_sent_again_counts_as_sent() -> None:
    """Else chunks fill the uplink, and what a full queue lost comes on top and keeps it full."""
    session = publishing(uplink_bytes_per_s=1e6)
    acts(session, 1.0, UplinkSeen(100_000, 0.0, resent_bytes=500_000), ChunkSeen(None, KEY, 0, 50_000, is_fresh=True))
    sent = [now for now in (1.0 + 0.05 * tick for tick in range(20)) if acts(session, now, Woken(), kind=SendChunk)]
    assert len(sent) == 1 and 1.45 < sent[0] < 1.6


def test_uplink_that_queues_slows_the_session_and_an_idle_one_does_not() -> None:
    session = publishing()
    for tick in range(20):
        session.handle(UplinkSeen(100_000, 0.002), 0.1 * tick)
    assert session.governor.rate_bytes_per_s == 0.0
    for tick in range(20, 40):
        session.handle(UplinkSeen(100_000, 0.080), 0.1 * tick)
    assert 0 < session.governor.rate_bytes_per_s < 1.1e6
    acts(session, 4.0, *(ChunkSeen(None, KEY, index, 50_000, is_fresh=True) for index in range(40)))
    sent, now = 0, 4.0
    while now < 6.0:
        for chunk in acts(session, now, Woken(), kind=SendChunk):
            sent += 1
            session.handle(ChunkSent(chunk.peer, KEY, chunk.index), now)
        now += 0.01
    assert sent * 50_000 <= 1.1 * 2.0 * session.governor.rate_bytes_per_s + 100_000


def test_of_what_a_peer_asks_for_so_much_waits_and_no_more() -> None:
    session, asked, sent = publishing(), tuple(range(2 * REQUESTS_HELD_MAX)), list[int]()
    acts(session, 0.0, *(ChunkSeen(None, KEY, index, 1000) for index in asked))
    requests = (Request(PeerId("a"), KEY, indices) for indices in (asked[: REQUESTS_HELD_MAX // 2], asked))
    chunks = acts(session, 10.0, *requests, kind=SendChunk)  # what waits counts once
    while chunks:
        sent += [chunk.index for chunk in chunks]
        taken = (ChunkSent(PeerId("a"), KEY, chunk.index) for chunk in chunks)
        chunks = acts(session, 10.0, *taken, kind=SendChunk)
    assert sent == list(range(REQUESTS_HELD_MAX))


@pytest.mark.parametrize("is_gone", [True, False])
def test_what_a_relay_owes_goes_to_others_at_once_where_it_is_gone_and_soon_where_it_acknowledges_nothing(
    is_gone: bool,
) -> None:
    nodes = fleet([100.0] * 2)
    session, relay, other = BroadcastSession(nodes[0].peer_id), nodes[1].peer_id, nodes[2].peer_id
    acts(session, 0.0, HeaderSeen(None, KEY, is_wanted=True), PlanSet(plan(nodes, 1)), PeerUp(relay), PeerUp(other))
    fresh = [ChunkSeen(None, KEY, index, 100_000, is_fresh=True) for index in range(20)]
    sent: dict[PeerId, set[int]] = {relay: set(), other: set()}

    def act(event: Event, now: float) -> None:
        for chunk in acts(session, now, event, kind=SendChunk):
            sent[chunk.peer].add(chunk.index)
            act(ChunkSent(chunk.peer, KEY, chunk.index), now)
            if chunk.peer == other and chunk.route is not None:
                act(RelayAck(other, KEY, chunk.index, 0), now)

    for number, event in enumerate(fresh):
        act(event, 0.01 * number)
    owed = sent[relay] - sent[other]
    assert owed
    if is_gone:
        act(PeerDown(relay), 0.3)
    for tick in range(1, 10 if is_gone else 100):
        act(Woken(), 0.3 + 0.1 * tick)
    assert sent[other] == set(range(20))


def test_a_peer_needs_its_seed_until_it_holds_one_whole_artifact_and_nothing_is_on_its_way() -> None:
    peer, wholes = Peer(PeerId("w")), {KEY: all_of(3), ArtifactKey(b"k" * 16): all_of(5)}
    assert peer.needs(wholes) and not peer.needs({})
    peer.note_all(KEY, 0b011)
    assert peer.needs(wholes)
    peer.note(KEY, 2)
    assert not peer.needs(wholes)
    peer.in_transport = 1
    peer.in_transport = 0
    peer.pull_queue.append(Outgoing(KEY, 0, None, 0.0))
    assert peer.needs({})
