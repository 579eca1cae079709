"""How much leaves when: the relay's window, the uplink governor against a model of a link, the choice of congestion control."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.events import UplinkSeen
from echo2.broadcast.pace import (
    FLOOR_SHARE,
    IDLE_S,
    RELAY_SLACK_S,
    START_S,
    CongestionChooser,
    Pacer,
    RateEstimate,
    RelayWindow,
    UplinkGovernor,
)
from echo2.broadcast.peer import Artifact, Peer
from echo2.broadcast.pulling import window_chunks

TICK_S = 0.1
GBIT, LAP_AND_SLACK_S = 125e6, 0.25


@given(st.integers(10_000, 10_000_000), st.lists(st.integers(1, 300_000), min_size=1, max_size=60))
def test_pacer_never_lets_more_through_than_its_rate(rate: int, sizes: list[int]) -> None:
    pacer, now, sent = Pacer(rate), 0.0, 0
    for size in sizes:
        now = pacer.ready_at(now)
        pacer.spend(size, now)
        sent += size
        assert sent <= rate * (now + pacer.burst_s) + size + 1


def filled(window: RelayWindow, now: float, *chunk_bytes: int) -> int:
    """How many chunks it is given before the next acknowledgement: of such sizes, then more of the last."""
    count = 0
    while count < len(chunk_bytes) or window.has_room(now):
        window.assigned((b"l", count), chunk_bytes[min(count, len(chunk_bytes) - 1)], True, now)
        count += 1
    return count


def room(first_bytes: float, *chunk_bytes: int) -> int:
    return filled(RelayWindow(0.15, first_bytes), 0.0, *chunk_bytes)


def test_a_relays_window_holds_what_its_link_does_whatever_the_first_chunk_and_no_more_than_its_bound() -> None:
    whole = GBIT * LAP_AND_SLACK_S
    assert room(whole, 256 << 10) == pytest.approx(whole / (256 << 10), abs=1)
    for first in (84, 0):  # a container's header is a chunk of 84 bytes, and an empty block one of none
        assert room(whole, first) == RelayWindow.LARGEST
    assert room(whole, 84, 256 << 10) == room(whole, 256 << 10)
    assert room(1e12, 256 << 10) == RelayWindow.LARGEST_PLANNED


def test_a_relay_that_owed_chunks_for_too_long_gets_few_until_it_has_shown_that_it_works() -> None:
    window = RelayWindow(0.15, GBIT * LAP_AND_SLACK_S)
    given = [(b"l", number) for number in range(filled(window, 0.0, 256 << 10))]
    assert window.suspend(1.0) == given and not window.has_room(2.0)
    window.resume()
    assert filled(window, 2.0, 256 << 10) == RelayWindow.SMALLEST


def test_versions_of_few_chunks_leave_a_relays_window_as_it_was() -> None:
    window = RelayWindow(0.15, GBIT * LAP_AND_SLACK_S)
    for number in range(100):
        window.assigned((b"k", number), 256 << 10, True, number)
        window.passed_on((b"k", number), 0, number + 0.1)
    assert filled(window, 100.0, 256 << 10) == room(GBIT * LAP_AND_SLACK_S, 256 << 10)


@pytest.mark.parametrize("chunk_s", [0.05, 0.15, 0.3])
def test_a_relay_is_kept_busy_and_its_queue_is_short(chunk_s: float) -> None:
    """It takes `chunk_s` to forward a chunk, at first a quarter of that; one way to it takes 40 ms."""
    window, way_s, now = RelayWindow(RELAY_SLACK_S), 0.04, 0.0
    came, done = list[float](), [0.0]
    for index in range(600):
        while window.has_room(now):
            window.assigned((b"k", len(came)), 1, True, now)
            came.append(now + way_s)
            done.append(max(done[-1], came[-1]) + (chunk_s if len(came) > 300 else chunk_s / 4))
        at = done[index + 1]
        now = at + way_s
        window.passed_on((b"k", index), sum(other <= at for other in came[index + 1 :]), now)
    settled = range(400, 600)
    assert sum(max(0.0, came[index] - done[index]) for index in settled) == 0.0, "it never waits for a chunk"
    assert max(done[index] - came[index] for index in settled) <= 2 * max(RELAY_SLACK_S, chunk_s)


def test_pauses_between_versions_of_few_chunks_are_no_sign_of_a_slow_link() -> None:
    """Else a request that is lost is waited for as long as by the slowest."""
    rate = RateEstimate()
    for version in range(50):
        for chunk in range(4):
            rate.add(16 << 10, 10.0 * version + 0.01 * chunk, is_awaited=False)
    assert rate.bytes_per_s >= 1e6


def test_a_window_of_requests_grows_over_any_round_trip_until_the_link_is_full() -> None:
    artifact = Artifact(ArtifactKey(b"k"), is_wanted=True)
    artifact.holds(0, 64 << 10)
    for round_trip_s in (0.05, 0.6):
        peer, full = Peer(PeerId("p")), 1e6
        peer.rate.bytes_per_s, peer.answer_s = 0.1e6, round_trip_s
        for _ in range(20):
            peer.rate.bytes_per_s = min(full, window_chunks(peer, artifact) * artifact.mean_chunk_bytes / round_trip_s)
        assert peer.rate.bytes_per_s == full


@dataclass
class ModelLink:
    """A drop-tail uplink; the round trip that is told is smoothed, as the kernel's is."""

    rate: float
    queue_max_s: float = 0.06
    queue_bytes: float = 0.0
    smoothed_s: float = 0.0
    now: float = 0.0

    def tick(self, offered: float) -> tuple[int, float]:
        """Bytes that got through in a tick, and the queue as seen."""
        self.now += TICK_S
        total = self.queue_bytes + offered * TICK_S
        passed = min(total, self.rate * TICK_S)
        self.queue_bytes = min(total - passed, self.rate * self.queue_max_s)
        self.smoothed_s += 0.5 * (self.queue_bytes / self.rate - self.smoothed_s)
        return int(passed), self.smoothed_s


def governed(governor: UplinkGovernor, link: ModelLink, seconds: float, demand: float = 1e9) -> list[float]:
    rates = []
    for _ in range(int(seconds / TICK_S)):
        passed, queue_s = link.tick(min(demand, governor.rate_bytes_per_s or demand))
        governor.sample(UplinkSeen(passed, queue_s), link.now, is_waiting=demand > governor.rate_bytes_per_s > 0)
        rates.append(governor.rate_bytes_per_s)
    return rates


@pytest.mark.parametrize("planned", [0.0, 0.5e6, 2e6, 6e6])
def test_the_uplinks_rate_is_found_from_whatever_the_plan_said_and_yields_to_others(planned: float) -> None:
    governor, link = UplinkGovernor(), ModelLink(2e6)
    governor.planned(planned)
    settled = governed(governor, link, 30.0)[200:]
    assert 0.93 * link.rate <= sum(settled) / len(settled) <= 1.04 * link.rate
    assert 0.8 * link.rate <= governor.capacity_bytes_per_s <= 1.1 * link.rate
    link.rate = 1.2e6  # something else takes the rest
    shared = governed(governor, link, 20.0)[-50:]
    assert 0.9 * 1.2e6 <= sum(shared) / len(shared) <= 1.05 * 1.2e6
    link.rate = 1e4
    assert min(governed(governor, link, 10.0)) >= 0.9 * FLOOR_SHARE * 1.2e6, "others never get all"


def test_an_uplink_that_changes_twofold_is_followed_within_two_seconds() -> None:
    governor, link = UplinkGovernor(), ModelLink(2e6)
    governor.planned(2e6)
    governed(governor, link, 5.0)
    for rate in (1e6, 2e6):
        link.rate = rate
        governed(governor, link, 2.0)
        settled = governed(governor, link, 2.0)
        assert 0.85 * rate <= sum(settled) / len(settled) <= 1.1 * rate


def test_a_rate_that_emptied_a_queue_is_again_what_the_uplink_carries_and_a_late_look_says_little() -> None:
    governor, now = UplinkGovernor(), 0.0
    governor.planned(2.2e6)
    for _ in range(8):
        now += TICK_S
        governor.sample(UplinkSeen(int(2e6 * TICK_S), 0.044), now, is_waiting=True)
    assert governor.rate_bytes_per_s < 0.97 * 2e6, "its queue empties"
    governor.sample(UplinkSeen(int(2e6 * TICK_S), 0.0), now + TICK_S, is_waiting=True)
    assert 0.96 * 2e6 < governor.rate_bytes_per_s < 2e6
    governor.sample(UplinkSeen(int(2e6 * TICK_S), 0.05), now + 5 * TICK_S, is_waiting=True)  # it stood still meanwhile
    assert governor.rate_bytes_per_s > 0.9 * 2e6


def test_a_queue_too_short_for_its_delay_to_be_seen_is_not_overrun() -> None:
    governor, now, lost, sent = UplinkGovernor(), 0.0, 0.0, 0.0
    governor.planned(2.2e6)
    for _ in range(200):
        now += TICK_S
        offered = governor.rate_bytes_per_s * TICK_S
        passed = min(offered, 2e6 * TICK_S)
        lost, sent = lost + offered - passed, sent + offered
        governor.sample(UplinkSeen(int(passed), 0.0, int(offered - passed)), now, is_waiting=True)
    assert 0.9 * 2e6 <= governor.rate_bytes_per_s <= 1.1 * 2e6
    assert lost < 0.05 * sent


def test_an_idle_uplink_is_not_paced_a_rate_rises_only_where_chunks_wait_and_the_users_limit_holds() -> None:
    idle = UplinkGovernor()
    assert set(governed(idle, ModelLink(2e6), 10.0, demand=1e6)) == {0.0} and idle.capacity_bytes_per_s == 0.0
    calm, limited = UplinkGovernor(), UplinkGovernor(limit_bytes_per_s=1e6)
    calm.planned(1e6)
    assert max(governed(calm, ModelLink(50e6), 10.0, demand=0.5e6)) <= 1e6
    limited.planned(5e6)
    assert limited.rate_bytes_per_s == 1e6 == max(governed(limited, ModelLink(50e6), 10.0))


def chosen(
    chooser: CongestionChooser, begun_at: float, seconds: float, loss: float = 0.0, queue_s: float = 0.02
) -> list[bool]:
    """Looks at a node that sends 200 segments a tick, each lost with `loss`."""
    rng, seen = random.Random(7), []
    for tick in range(round(seconds / TICK_S)):
        now = begun_at + tick * TICK_S
        chooser.sent(sum(rng.random() < loss for _ in range(200)), queue_s, now)
        seen.append(chooser.is_fast(now))
    return seen


def test_sending_begins_fast_and_goes_on_as_usual_and_a_pause_is_a_new_beginning() -> None:
    chooser = CongestionChooser()
    assert chooser.is_fast(0.0)
    seen, first = chosen(chooser, 10.0, START_S + 1), round(START_S / TICK_S)
    assert set(seen[: first - 1]) == {True} and set(seen[first + 1 :]) == {False}
    assert not chooser.is_fast(11.0 + START_S + 0.5 * IDLE_S)
    assert chooser.is_fast(11.5 + START_S + IDLE_S)
    assert chosen(chooser, 20.0 + START_S, START_S + 5)[0]


def test_losses_at_random_keep_the_fast_control_until_they_end_and_those_of_a_queue_or_a_burst_do_not() -> None:
    chooser = CongestionChooser()
    assert set(chosen(chooser, 0.0, 40.0, loss=0.001)[round((START_S + 8) / TICK_S) :]) == {True}
    assert not chosen(chooser, 40.0, 20.0)[-1]
    queue = CongestionChooser()
    assert not chosen(queue, 0.0, 60.0, loss=0.01, queue_s=0.055)[-1]
    for _ in range(3):
        queue.sent(150, 0.03, 60.0)
    assert not queue.is_fast(60.0)
    start = CongestionChooser()
    chosen(start, 0.0, START_S - 0.5, loss=0.05)
    assert not chosen(start, START_S - 0.5, 2.0)[-1], "BBR overflows queues while it looks for its rate"


@pytest.mark.parametrize(("limit", "is_slower"), [(0.0, False), (0.5e6, True), (0.8e6, False)])
def test_an_uplink_that_its_owner_limits_is_slower_than_planned(limit: float, is_slower: bool) -> None:
    governor = UplinkGovernor(limit)
    governor.planned(1e6)
    assert governor.is_slower_than_planned is is_slower
