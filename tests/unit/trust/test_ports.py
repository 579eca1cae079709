"""Who has to go where an address holds more strangers than its share: a fleet that returns gets in, and so does a neighbour."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from echo2.trust import calls
from echo2.trust.ports import (
    BROUGHT_NOTHING,
    HOSTS_MAX,
    LEARNER,
    LOOK_S,
    PROVING_S,
    SHUT_OUT_MAX_S,
    SHUT_OUT_S,
    Caller,
    Doors,
    PortLimits,
    overdue,
    overweight,
    shut_out,
)

LIMITS = PortLimits(
    message_bytes=1 << 20, reply_bytes=1 << 20, streams=8, window_bytes=1 << 16, share=0.5, connections_cap=4096
)
REASON = "an address holds more than its share"


def stranger(number: int, since: float) -> Caller:
    return Caller(8419, ("10.0.0.1", number), since)


def ended(callers: list[Caller], now: float) -> list[Caller]:
    return overdue(callers, LIMITS, now).get(REASON, [])


def test_a_fleet_behind_one_address_that_returns_at_once_is_let_in() -> None:
    """2,000 workers, each ready to be proven after three looks, ten at a time; who was ended comes back within two seconds."""
    waiting = dict.fromkeys(range(2000), 0.0)  # when each arrives next
    strangers: list[Caller] = []
    proven, now, looks = 0, 0.0, 0
    while proven < 2000:
        assert looks < 2000, f"{proven} of 2000 are in after {now:.0f} s"
        strangers += [stranger(number, at + number * 1e-6) for number, at in waiting.items() if at <= now]
        waiting = {number: at for number, at in waiting.items() if at > now}
        strangers.sort(key=lambda one: one.since)
        gone = {one.remote[1] for one in ended(strangers, now)}
        waiting |= {number: now + LOOK_S * (1 + number % 9) for number in gone}
        strangers = [one for one in strangers if one.remote[1] not in gone]
        ready = [one for one in strangers if now - one.since >= 2.5 * LOOK_S][:10]
        strangers = [one for one in strangers if one not in ready]
        proven += len(ready)
        now, looks = now + LOOK_S, looks + 1
    assert looks <= 2000 / 5, "half a share and more gets in whenever it is ready"


def test_a_neighbour_gets_in_beside_many_that_prove_nothing() -> None:
    """They come 200 a look; the honest one is ready after one."""
    now, crowd = 3 * LOOK_S, [stranger(number, 0.0) for number in range(32)]
    honest = stranger(99_999, now)
    crowd += [stranger(1000 + number, now - LOOK_S * 0.9) for number in range(200)]
    gone = ended([*crowd, honest], now)
    assert honest not in gone and len(crowd) - len(gone) < LIMITS.strangers_per_host + 1


def test_the_slow_go_first_and_those_that_have_proven_stay() -> None:
    now = 100.0
    slow = [stranger(number, now - PROVING_S - 1) for number in range(8)]
    fresh = [stranger(100 + number, now - 1) for number in range(32)]
    known = [replace(stranger(200 + number, now - 50), peer=f"p{number}") for number in range(40)]
    assert ended([*slow, *fresh, *known], now) == slow
    more = [*fresh, *(stranger(300 + number, now - 0.5) for number in range(10))]
    gone = ended(more, now)
    assert len(gone) == 10 and more[:16] == [one for one in more if one not in gone][:16] and more[-1] not in gone


def test_of_too_many_connections_of_a_peer_the_newest_stay() -> None:
    """A worker that comes back after its network was cut still has the old ones."""
    held = [replace(stranger(number, float(number)), peer="p") for number in range(LIMITS.per_peer + 3)]
    gone = overdue(held, LIMITS, 100.0)
    assert gone == {f"more than {LIMITS.per_peer} connections of a peer": held[:3]}


def test_where_all_peers_together_hold_too_much_those_that_hold_most_go_first() -> None:
    sizes = [40, 47, 44, 10, 46, 42]  # MiB: 229 in all, 192 at most
    callers = [
        Caller(1, (f"10.0.0.{size}", 1), 0.0, f"p{size}", received_bytes=size << 20, in_flight_max=48 << 20)
        for size in sizes
    ]
    assert [caller.peer for caller in overweight(callers, 1.0)] == ["p47"]


@contextlib.contextmanager
def connections(count: int) -> Iterator[tuple[Doors, list[socket.socket], list[str]]]:
    """To a port that is watched; the callers' ends, and what the other end of each is called."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        doors = Doors(_ports={listener.getsockname()[1]: LIMITS})  # nobody looks but the test
        ends = [held.enter_context(socket.create_connection(listener.getsockname())) for _ in range(count)]
        for _ in ends:
            held.enter_context(listener.accept()[0])
        yield doors, ends, [f"ipv4:127.0.0.1:{end.getsockname()[1]}" for end in ends]


def is_ended(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_connection_that_was_let_go_is_not_looked_at_whenever_that_was_told() -> None:
    with connections(3) as (doors, ends, told):
        doors.release(told[0])  # before a look has seen it
        doors.look(0.0)
        doors.release(told[1])
        assert doors.look(LIMITS.stranger_s + 1.0) == 1
        assert [is_ended(end) for end in ends] == [False, False, True]


def test_who_proves_itself_while_a_look_is_under_way_that_has_not_seen_it_is_known_to_the_next() -> None:
    with connections(2) as (doors, ends, told):
        doors.know(told[0], "p0")
        doors._enter({}, 0.0)
        doors.look(1.0)
        assert doors.look(LIMITS.stranger_s + 2.0) == 1
        assert [is_ended(end) for end in ends] == [False, True]
        doors.know("ipv4:127.0.0.1:9", "gone")
        doors.look(20.0)
        doors.look(21.0)
        assert len(doors._by_remote) == len(doors._callers), "who never came is forgotten"


FLOODER, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(params=["127.0.0.1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as made:
        made.bind((request.param, 0))
        made.listen(64)
        yield made


@contextlib.contextmanager
def connected(listener: socket.socket, source: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection from there; TimeoutError where its first packet is dropped."""
    caller = socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 0.3, (source, 0))
    with caller, listener.accept()[0] as accepted:
        yield caller, accepted


def is_dropped(listener: socket.socket, source: str) -> bool:
    try:
        with connected(listener, source):
            return False
    except TimeoutError:
        return True


def test_first_packets_of_these_hosts_are_dropped_and_nothing_else(listener: socket.socket) -> None:
    with connected(listener, FLOODER) as (before, server):
        for others in (0, HOSTS_MAX - 1):
            shut_out(listener, [*(f"10.0.0.{number}" for number in range(others)), FLOODER])
            assert is_dropped(listener, FLOODER) and not is_dropped(listener, OTHER)
        before.sendall(b"it goes on")
        assert server.recv(20) == b"it goes on"
        shut_out(listener, [])
        assert not is_dropped(listener, FLOODER)


def test_connections_that_bring_nothing_again_and_again_shut_their_host_out(listener: socket.socket) -> None:
    doors, port, now = Doors(), listener.getsockname()[1], 100.0
    doors._ports[port] = LEARNER  # the test looks by itself
    for _ in range(BROUGHT_NOTHING):
        with connected(listener, FLOODER):
            doors.look(now)
        now += 0.1
        doors.look(now)
    assert is_dropped(listener, FLOODER)
    with connected(listener, OTHER):
        doors.look(now + SHUT_OUT_S + 0.1)
    assert not is_dropped(listener, FLOODER)


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_who_goes_on_is_shut_out_longer_and_beside_members_for_two_seconds_at_a_time(has_neighbour: bool) -> None:
    """A whole NAT could not connect for sixteen."""
    doors, there, now, times = Doors(_ports={1: LIMITS}), "203.0.113.1", 0.0, list[float]()
    member = {(1, (there, 9)): (0, 0)} if has_neighbour else {}
    for _ in member:
        doors.know(f"ipv4:{there}:9", "member")
    for _ in range(5):
        for number in range(BROUGHT_NOTHING):
            doors._enter({**member, (1, (there, 1000 + number)): (0, 0)}, now)
            doors._enter(member, now)
        begun = now
        while doors._floods.hosts(now):
            now += 0.5
        times.append(now - begun)
    assert times[0] == SHUT_OUT_S and times == sorted(times)
    assert times[-1] == (SHUT_OUT_S if has_neighbour else SHUT_OUT_MAX_S)


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_caller_far_beyond_its_pace_loses_its_connection_and_cannot_come_again(
    listener: socket.socket, hangs_up: bool
) -> None:
    doors, port = Doors(), listener.getsockname()[1]
    doors._ports[port] = LEARNER
    with connected(listener, FLOODER) as (made, accepted):
        told = f"ipv4:{FLOODER}:{made.getsockname()[1]}"
        doors.know(told, "peer")
        doors.look(time.monotonic())
        doors.offended(told)
        if hangs_up:
            accepted.close()
        assert doors.look(time.monotonic()) == (not hangs_up)
        assert made.recv(1) == b""
    assert is_dropped(listener, FLOODER)


async def test_calls_far_beyond_the_pace_are_an_offence_though_a_few_of_them_are_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of calls that are reset at once Python hears a thousand a second; each twentieth of a second one is within the pace."""
    now, offences, gate = 0.0, list[str](), calls._Gate(lambda context: ("w1", calls.FairShare.SHARE))
    monkeypatch.setattr(calls, "monotonic", lambda: now)
    monkeypatch.setattr(calls, "DOORS", SimpleNamespace(offended=offences.append))

    async def call(times: int, per_s: float) -> int:
        nonlocal now
        for _ in range(times):
            now += 1 / per_s
            task = asyncio.create_task(gate.paced(SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:7")))
            await asyncio.sleep(0)
            task.cancel()
        return len(offences)

    assert await call(times=1_000, per_s=2 * calls.CALLS_PER_S) == 0, "too many, and told so"
    now += 60
    assert await call(times=1_000, per_s=1_000.0) > 400
