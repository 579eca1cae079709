"""Floods of connections to a relay's libp2p listener. Real libp2p on loopback."""

from __future__ import annotations

import asyncio

import pytest

from echo2.broadcast.nat import access, host
from tests.certificates import issued
from tests.contract.fleet import until
from tests.contract.test_relay import lab
from tests.redteam.hostile import idle_connections, still_open
from tests.redteam.target import ELSEWHERE


async def test_idle_connections_keep_no_member_out_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "STRANGER_S", 2.0)
    async with lab(monkeypatch) as made:
        port = int(made.address.rpartition(":")[2])
        with idle_connections(port, 300, ELSEWHERE) as held:
            async with asyncio.timeout(6.0):  # before the library's own deadline for a handshake
                await until(lambda: still_open(held) <= access.STRANGERS_PER_HOST, "an address's share")
            member = made.member(issued(made.authority))
            await until(lambda: member.facts.relays, "a place for a member beside them")
            await until(lambda: not still_open(held), "the end of those that prove nothing")
            await asyncio.sleep(2.0)
            assert member.facts.relays, "members stay"


async def test_a_relay_that_has_had_as_many_callers_as_it_has_places_takes_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "PEERS_MAX", 4)
    async with lab(monkeypatch) as made:
        p2p = made.relay._p2p
        assert p2p is not None
        for _ in range(6):
            member = made.member(issued(made.authority))
            await until(lambda member=member: member.facts.relays, "a place")  # type: ignore[misc]
            await member.close()
            made.transports.remove(member)
            await until(lambda: len(p2p._host.accepted.places) == 0, "its connection to be forgotten")
