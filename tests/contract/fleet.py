"""A learner's and some workers' broadcast nodes on loopback, with real sockets, TLS, disks."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from echo2.base.ids import RunId
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.catch_up import ArtifactBegun, ArtifactDropped, ArtifactSealed, BlockArrived
from echo2.broadcast.connection import Connection
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.transport import Transport
from echo2.broadcast.trees import plan
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.wire import broadcast as wire
from tests.certificates import issued
from tests.patience import WAIT_S

RUN = RunId("a-run")


@dataclass
class Member:
    node: BroadcastNode
    address: str
    credentials: tls.Credentials


class Fleet:
    """`members[0]` is the learner."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = RunAuthority.create(Identity.generate(), RUN, time.time())
        self.members: list[Member] = []
        self._epoch = 0

    def credentials(self, role: Role, token_id: str = "") -> tls.Credentials:
        """As enrolment gives them to whoever has that token."""
        return issued(self.authority, role, token_id=token_id)

    async def start(self, credentials: tls.Credentials, options: NodeOptions, port: int = 0) -> Member:
        node = BroadcastNode(credentials, replace(options, port=port))
        address = f"127.0.0.1:{node.listen()}"
        await node.start()
        return Member(node, address, credentials)

    async def add(self, options: NodeOptions | None = None) -> Member:
        number = len(self.members)
        role = Role.LEARNER if number == 0 else Role.WORKER
        folder = self.folder / f"node{number}"
        member = await self.start(self.credentials(role), options or NodeOptions(folder, chunk_bytes=16 << 10))
        self.members.append(member)
        if number:
            learner = self.members[0]
            member.node.set_publisher(learner.node.peer_id, learner.address)
        return member

    def plan(self, members: list[Member] | None = None) -> BroadcastPlan:
        """Sends the plan of these members to all."""
        self._epoch += 1
        links = [
            NodeLink(m.node.peer_id, f"n{i}", (m.address,), 25e6, 50e6, 0.001)
            for i, m in enumerate(members or self.members)
        ]
        made = plan(links, self._epoch)
        for member in self.members:
            member.node.set_plan(made)
        return made

    async def stop(self, member: Member) -> None:
        await member.node.stop()


@asynccontextmanager
async def fleet(
    folder: Path, workers: int, options: Callable[[int], NodeOptions] | None = None
) -> AsyncIterator[Fleet]:
    made = Fleet(folder)
    try:
        for number in range(workers + 1):
            await made.add(options(number) if options else None)
        made.plan()
        await until(lambda: all(len(m.node.stats().links) == workers for m in made.members), "all are connected")
        yield made
    finally:
        for member in made.members:
            await made.stop(member)


async def until(holds: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Waits for a fact about real processes and sockets; fails naming it."""
    end = asyncio.get_running_loop().time() + limit_s
    while not holds():
        assert asyncio.get_running_loop().time() < end, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.02)


async def blocks_of(node: BroadcastNode, artifact: ArtifactId, limit_s: float = WAIT_S) -> list[bytes]:
    """The blocks handed out until `artifact` is sealed, those of dropped artifacts left out."""
    blocks: list[bytes] = []
    async with asyncio.timeout(limit_s):
        async for step in node.progress():
            match step:
                case ArtifactBegun() | ArtifactDropped():
                    blocks = []
                case BlockArrived():
                    blocks.append(step.payload)
                case ArtifactSealed() if step.artifact == artifact:
                    return blocks
    raise AssertionError(f"the node stopped before {artifact}")


async def gathered(*work: Awaitable[list[bytes]]) -> list[list[bytes]]:
    return list(await asyncio.gather(*work))


async def hostile(f: Fleet, victim: Member) -> tuple[tls.Credentials, Connection]:
    """A member of the run with a link, that speaks the protocol by hand."""
    credentials = f.credentials(Role.WORKER)
    connection = await Transport(credentials).dial(victim.address, victim.node.peer_id)
    await connection.send(wire.hello(tls.PROTOCOL_VERSION, credentials.run_id))
    assert await connection.receive() is not None
    await until(lambda: credentials.peer_id in victim.node.exchange.links, "the link is there")
    return credentials, connection
