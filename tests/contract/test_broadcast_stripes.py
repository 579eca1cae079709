"""Links made of several connections, on real sockets: everything arrives once, and one connection may die alone."""

import asyncio
import contextlib
import os
import random
import socket
from pathlib import Path

from echo2.base.ids import PeerId, Version
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.connection import Connection
from echo2.broadcast.link import PeerLink
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.transport import Transport
from echo2.outside.streams import Remote
from echo2.outside.tls_streams import as_ipv4
from echo2.trust import tls
from echo2.trust.identity import Role
from echo2.wire import broadcast as wire
from tests.contract.fleet import Fleet, blocks_of, fleet, until
from tests.patience import WAIT_S

KEYFRAME, LATER = ArtifactId(Version(0)), ArtifactId(Version(1), Version(0))
BLOCKS = [random.Random(11).randbytes(400_000) for _ in range(10)]
WIDTH = 4


def width_to(node: BroadcastNode, peer: PeerId) -> int:
    return next((link.connections for link in node.stats().links if link.peer_id == peer), 0)


def width_of(node: BroadcastNode, other: BroadcastNode) -> int:
    return width_to(node, other.peer_id)


def wants(node: BroadcastNode, other: BroadcastNode, connections: int) -> None:
    """As if losses had shown it; loopback has none."""
    striping = node._connections.stripes._width(node._connections.links[other.peer_id]).striping
    striping.count, striping.reason = connections, "the test wants them"


def links_of(one: BroadcastNode, other: BroadcastNode) -> tuple[PeerLink, PeerLink]:
    return one._connections.links[other.peer_id], other._connections.links[one.peer_id]


async def widened(f: Fleet) -> tuple[BroadcastNode, BroadcastNode]:
    """Learner and worker with a link of WIDTH connections, which whoever did not dial has asked for."""
    learner, worker = (member.node for member in f.members)
    link = learner._connections.links[worker.peer_id]
    asking, asked = (worker, learner) if link.connection.is_outgoing else (learner, worker)
    wants(asking, asked, WIDTH)
    await until(lambda: width_of(learner, worker) == width_of(worker, learner) == WIDTH, "the link is widened")
    return learner, worker


async def received(learner: BroadcastNode, worker: BroadcastNode, artifact: ArtifactId) -> list[bytes]:
    reading = asyncio.create_task(blocks_of(worker, artifact, 20.0))
    await learner.publish(artifact, iter(BLOCKS), lambda: "p", 1 << 20)
    return await reading


async def test_a_link_of_several_connections_delivers_all_once_and_is_mended_where_one_dies(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, worker = await widened(f)
        first, used = links_of(learner, worker), set[int]()
        for further in first[0]._further:
            send = further.connection.send

            async def noted(*parts, number: int = id(further), send=send) -> None:  # type: ignore[no-untyped-def]
                used.add(number)
                await send(*parts)

            further.connection.send = noted  # type: ignore[method-assign]
        assert await received(learner, worker, KEYFRAME) == BLOCKS
        assert len(used) == WIDTH - 1
        seen = worker.stats()
        assert (worker.session.duplicates_bytes, worker.session.pulled_chunks) == (0, 0)
        assert seen.received_chunk_bytes == learner.stats().sent_chunk_bytes
        assert f"{WIDTH} connections: " in str(seen.links[0].way)
        accepted = next(link for link in first if not link.connection.is_outgoing)
        reading = asyncio.create_task(blocks_of(worker, LATER, 20.0))
        publishing = asyncio.create_task(learner.publish(LATER, iter(BLOCKS), lambda: "p", 1 << 20))
        held = worker.stats().newest_chunks_held
        await until(lambda: 20 < worker.stats().newest_chunks_held != held, "the broadcast is on its way")
        (remote,) = accepted._further[0].connection.remotes  # type: ignore[attr-defined]
        cut(remote)
        await until(lambda: accepted.width < WIDTH, "the cut is noticed")
        assert await reading == BLOCKS
        await publishing
        assert links_of(learner, worker) == first, "the link stayed"
        await until(lambda: width_of(learner, worker) == width_of(worker, learner) == WIDTH, "it is widened again")


async def test_who_looks_twice_before_a_connection_is_begun_opens_it_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, worker = (member.node for member in f.members)
        is_ours = learner._connections.links[worker.peer_id].connection.is_outgoing
        dialler, other = (learner, worker) if is_ours else (worker, learner)
        stripes, opened = dialler._connections.stripes, list[PeerLink]()
        open_one = stripes._open_one

        async def noted(link: PeerLink) -> None:
            opened.append(link)
            await open_one(link)

        stripes._open_one = noted
        wants(dialler, other, 2)
        for _ in range(3):
            stripes.tend(asyncio.get_running_loop().time())
        await until(lambda: width_of(learner, worker) == width_of(worker, learner) == 2, "the link is widened")
        assert len(opened) == 1


def cut(remote: Remote) -> None:
    """Ends this process's connection to that other end at once, as a reset on the way would."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as view:
            if view.family in (socket.AF_INET, socket.AF_INET6):
                host, port = view.getpeername()[:2]
                if (as_ipv4(host), port) == remote:
                    view.shutdown(socket.SHUT_RDWR)


async def test_connections_that_are_wanted_no_longer_end_without_a_loss(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        learner, worker = await widened(f)
        reading = asyncio.create_task(blocks_of(worker, KEYFRAME, 20.0))
        publishing = asyncio.create_task(learner.publish(KEYFRAME, iter(BLOCKS), lambda: "p", 1 << 20))
        await until(lambda: worker.stats().newest_chunks_held > 5, "the broadcast is on its way")
        for node, other in ((learner, worker), (worker, learner)):
            wants(node, other, 1)
        assert await reading == BLOCKS
        await publishing
        await until(lambda: width_of(learner, worker) == width_of(worker, learner) == 1, "one is left")
        assert (worker.session.duplicates_bytes, worker.session.pulled_chunks) == (0, 0)
        assert [link.connections for link in worker.stats().links] == [1]


async def test_a_peer_gets_no_more_connections_than_a_link_may_have_and_none_beside_no_link(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        worker, greedy = f.members[1], f.credentials(Role.WORKER)

        async def opened(*, is_further: bool) -> Connection:
            connection = await Transport(greedy).dial(worker.address, worker.node.peer_id)
            await connection.send(wire.hello(tls.PROTOCOL_VERSION, greedy.run_id, is_further=is_further))
            assert await connection.receive() is not None, "its hello"
            return connection

        alone = await opened(is_further=True)
        assert await asyncio.wait_for(alone.receive(), WAIT_S) is None
        assert width_to(worker.node, greedy.peer_id) == 0 and not worker.node.bans.found
        held = [alone]
        for number in range(LINK_CONNECTIONS + 1):
            held.append(await opened(is_further=number > 0))
            width = min(number + 1, LINK_CONNECTIONS)
            await until(lambda width=width: width_to(worker.node, greedy.peer_id) == width, f"{width} connections")
        assert await asyncio.wait_for(held[-1].receive(), WAIT_S) is None, "the last is closed"
        assert width_to(worker.node, greedy.peer_id) == LINK_CONNECTIONS
        for connection in held:
            await connection.close()
        await until(lambda: width_to(worker.node, greedy.peer_id) == 0, "the link has ended")
