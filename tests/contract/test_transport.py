"""What every transport guarantees: the same scenes on gRPC with mutual TLS, on libp2p and in memory."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.reachability import circuit_address
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime.transport import Connection, Transport
from echo2.broadcast.runtime.transport_bulk import BulkTransport
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.broadcast.runtime.transport_memory import MemoryNetwork, MemoryTransport
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.runtime import tls
from echo2.trust.runtime.gate import GatedServer

RUN = RunId("contract")
KINDS = ("grpc", "bulk", "memory", "libp2p")
FRAME_BYTES = 64 << 10


@dataclass
class End:
    """One node: what it accepted waits in `accepted`."""

    identity: Identity
    transport: Transport
    address: str
    accepted: asyncio.Queue[Connection] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    server: GatedServer | None = None

    async def accept(self, connection: Connection) -> None:
        await self.accepted.put(connection)
        await self.ended.wait()


class _Bulk(BulkTransport):
    """Dialled by one address, as the others are."""

    async def dial(self, address: str, peer_id: PeerId) -> Connection:  # type: ignore[override]
        host, _, port = address.rpartition(":")
        return await super().dial(host, int(port), peer_id)


class World:
    """Nodes of one run on one kind of transport."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.authority = RunAuthority.create(Identity.generate(), RUN, time.time())
        self.network = MemoryNetwork()
        self.ends: list[End] = []
        self.relay: Identity | None = None
        self.relay_port = 0

    async def node(self) -> End:
        identity = Identity.generate()
        if self.kind == "memory":
            memory = MemoryTransport(self.network, identity.peer_id)
            end = End(identity, memory, f"memory:{len(self.ends)}")
            memory.listen(end.address, end.accept)
        elif self.kind == "libp2p":
            end = await self._hidden_node(identity)
        elif self.kind == "bulk":
            bulk = _Bulk(self._credentials(identity))
            end = End(identity, bulk, "")
            bulk.listen("127.0.0.1", 0, end.accept)
            end.address = f"127.0.0.1:{bulk.port}"
        else:
            credentials = self._credentials(identity)
            grpc_transport, server = GrpcTransport(credentials), tls.new_server()
            end = End(identity, grpc_transport, "", server=server)
            grpc_transport.add_to_server(server, end.accept)
            port = tls.bind_server(server, "127.0.0.1:0", tls.server_credentials(credentials))
            end.address = f"127.0.0.1:{port}"
            await server.start()
        self.ends.append(end)
        return end

    def _credentials(self, identity: Identity) -> tls.Credentials:
        key = TlsKey.generate()
        issued = self.authority.issue(certificate_request(identity, key), Role.WORKER, time.time())
        return tls.Credentials(
            identity, key.to_pem(), issued, self.authority.certificate_pem, RUN, identity.peer_id, "nowhere:1"
        )

    async def _hidden_node(self, identity: Identity) -> End:
        """One that is met at the relay, which comes with the first of them."""
        if self.relay is None:
            self.relay = Identity.generate()
            serving = MixedTransport(self._credentials(self.relay))
            self.relay_port = await serving.serve(P2pSettings("127.0.0.1", book=RelayBook(RelayLimits())))
            self.ends.append(End(self.relay, serving, ""))
        settled = asyncio.Event()
        transport = MixedTransport(
            self._credentials(identity),
            lambda connection: end.accept(connection),  # noqa: PLW0108 - the end is made next
            P2pSettings("127.0.0.1"),
            lambda facts: settled.set() if facts.relays else None,
        )  # fmt: skip
        end = End(identity, transport, circuit_address(self.relay.peer_id))
        transport.use_relay(self.relay.peer_id, f"127.0.0.1:{self.relay_port}")
        await asyncio.wait_for(settled.wait(), 20)
        return end


@asynccontextmanager
async def world(kind: str) -> AsyncIterator[World]:
    made = World(kind)
    try:
        yield made
    finally:
        for end in made.ends:
            end.ended.set()
            await end.transport.close()
            if end.server is not None:
                await end.server.stop(0)


async def _pair(w: World) -> tuple[Connection, Connection, End, End]:
    """The dialler's end, the other's, and both nodes. The first frame makes the stream known to the other side."""
    first, second = await w.node(), await w.node()
    ours = await first.transport.dial(second.address, second.identity.peer_id)
    await ours.send(b"first")
    theirs = await asyncio.wait_for(second.accepted.get(), 10)
    assert await theirs.receive() == b"first"
    return ours, theirs, first, second


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_know_each_other_and_frames_keep_their_order_both_ways(kind: str) -> None:
    async def scene() -> None:
        async with world(kind) as w:
            ours, theirs, first, second = await _pair(w)
            assert (ours.peer.peer_id, theirs.peer.peer_id) == (second.identity.peer_id, first.identity.peer_id)
            assert ours.is_outgoing and not theirs.is_outgoing
            frames = [random.Random(i).randbytes(size) for i, size in enumerate((0, 1, 100_000, 3, 1 << 20, 17))]

            async def talk(sender: Connection, receiver: Connection) -> list[bytes | None]:
                sending = asyncio.gather(*[_send_all(sender, frames)])
                got = [await receiver.receive() for _ in frames]
                await sending
                return got

            assert await asyncio.gather(talk(ours, theirs), talk(theirs, ours)) == [frames, frames]
            await ours.close()

    asyncio.run(scene())


async def _send_all(connection: Connection, frames: list[bytes]) -> None:
    for frame in frames:
        await connection.send(frame)


@pytest.mark.parametrize("closer", ["dialler", "acceptor"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_close_the_other_side_reads_the_end_and_cannot_send(kind: str, closer: str) -> None:
    async def scene() -> None:
        async with world(kind) as w:
            ours, theirs, _, second = await _pair(w)
            closing, other = (ours, theirs) if closer == "dialler" else (theirs, ours)
            await closing.close()
            if closer == "acceptor":
                second.ended.set()  # the acceptor's handler returns, as a node's does after a close
            assert await asyncio.wait_for(other.receive(), 10) is None
            with pytest.raises(Unreachable):
                for _ in range(200):
                    await asyncio.wait_for(other.send(bytes(1000)), 10)
            with pytest.raises(Unreachable):
                await asyncio.wait_for(closing.send(b"more"), 10)

    asyncio.run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_sending_waits_while_the_other_side_does_not_read(kind: str) -> None:
    async def scene() -> None:
        async with world(kind) as w:
            ours, theirs, _, _ = await _pair(w)
            limit = 1024  # frames of 64 KiB: 64 MiB, far beyond what a transport may hold
            sent = 0

            async def flood() -> None:
                nonlocal sent
                for _ in range(limit):
                    await ours.send(bytes(FRAME_BYTES))
                    sent += 1

            flooding = asyncio.create_task(flood())
            held = -1
            while sent != held:  # until a second passes without progress
                held = sent
                await asyncio.wait({flooding}, timeout=1.0)
            assert sent < limit / 2, f"{sent} frames were taken though nobody read"
            for _ in range(limit):
                assert await asyncio.wait_for(theirs.receive(), 10) is not None
            await flooding
            await ours.close()

    asyncio.run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_and_somebody_else_at_an_address_are_unreachable(kind: str) -> None:
    async def scene() -> None:
        async with world(kind) as w:
            first, second = await w.node(), await w.node()
            stranger = Identity.generate().peer_id
            reason = "NO_RESERVATION|RESOURCE_LIMIT" if kind == "libp2p" else "refused, or it is another peer"
            with pytest.raises(Unreachable, match=reason):
                await first.transport.dial(second.address, stranger)
            nowhere = {
                "grpc": "127.0.0.1:1",
                "bulk": "127.0.0.1:1",
                "memory": "memory:nobody",
                "libp2p": circuit_address(stranger),
            }
            empty = nowhere[kind]
            with pytest.raises(Unreachable):
                await first.transport.dial(empty, second.identity.peer_id)

    asyncio.run(scene())
