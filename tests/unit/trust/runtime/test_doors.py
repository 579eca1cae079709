"""Who has to go where an address holds more strangers than its share: a fleet that returns gets in, and so does a neighbour."""

from __future__ import annotations

from dataclasses import replace

from echo2.trust.runtime.doors import LOOK_S, PROVING_S, Caller, overdue
from echo2.trust.runtime.port_limits import PortLimits

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
    crowd = [stranger(number, 0.0) for number in range(32)]
    honest = stranger(99_999, 3 * LOOK_S)
    for look in range(3, 4):
        now = look * LOOK_S
        crowd += [stranger(look * 1000 + number, now - LOOK_S * 0.9) for number in range(200)]
        callers = sorted([*crowd, honest], key=lambda one: one.since)
        gone = ended(callers, now)
        assert honest not in gone
        crowd = [one for one in crowd if one not in gone]
        assert len(crowd) < LIMITS.strangers_per_host + 1


def test_the_slow_go_first_and_those_that_have_proven_stay() -> None:
    now = 100.0
    slow = [stranger(number, now - PROVING_S - 1) for number in range(8)]
    fresh = [stranger(100 + number, now - 1) for number in range(32)]
    known = [replace(stranger(200 + number, now - 50), peer=f"p{number}") for number in range(40)]
    assert ended([*slow, *fresh, *known], now) == slow
    more = [*fresh, *(stranger(300 + number, now - 0.5) for number in range(10))]
    gone = ended(more, now)
    assert len(gone) == 10 and more[:16] == [one for one in more if one not in gone][:16] and more[-1] not in gone
