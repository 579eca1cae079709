"""A link to one peer, over as many connections as it has."""

from __future__ import annotations

import asyncio
from typing import cast
from unittest import mock

from echo2.base.ids import PeerId
from echo2.broadcast.connection import CLOSE_S, Connection
from echo2.broadcast.exchange import Exchange
from echo2.broadcast.link import PeerLink
from echo2.outside.guard import FairShare
from echo2.sim.virtual_loop import VirtualLoop
from echo2.trust.identity import PeerIdentity, Role


class Hung:
    """A connection whose other side answers nothing, so that each close takes as long as one may."""

    peer = PeerIdentity(PeerId("peer"), Role.WORKER)

    def __init__(self) -> None:
        self.is_closed = False

    async def receive(self) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def close(self) -> None:
        await asyncio.sleep(CLOSE_S)
        self.is_closed = True


def test_a_link_to_a_peer_that_hangs_closes_as_fast_as_one_of_its_connections() -> None:
    loop, lines = VirtualLoop(), [Hung() for _ in range(8)]

    async def scene() -> None:
        first, *others = (cast(Connection, line) for line in lines)
        link = PeerLink(first, mock.Mock(spec=Exchange), FairShare())  # it has nothing to send
        carrying = [asyncio.create_task(link.carry(other)) for other in others]
        await asyncio.sleep(0)
        assert link.width == len(lines)
        begun = loop.time()
        await link.close()
        assert loop.time() - begun <= 1.5 * CLOSE_S and all(line.is_closed for line in lines)
        await asyncio.gather(*carrying)

    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()
