"""What every connection between nodes guarantees: the same scenes on sockets, in the simulator, and over a punched hole."""

import asyncio
import functools
import gc
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import RunId
from echo2.base.units import address_of
from echo2.broadcast.connection import CLOSE_S, Connection
from echo2.broadcast.nat.reach import HostOptions, Nat
from echo2.broadcast.reachability import LinkKind
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.identity import Identity, RunAuthority
from tests.certificates import issued
from tests.contract.test_net import OnWires
from tests.loops import OwnLoop, Scene, T
from tests.patience import WAIT_S

RUN = RunId("contract")
HOST = "127.0.0.1"
FRAME_BYTES = 64 << 10


@dataclass
class End:
    """One node: what it accepted waits in `accepted`."""

    credentials: tls.Credentials
    transport: Transport
    address: str = ""
    nat: Nat | None = None
    accepted: asyncio.Queue[Connection] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def accept(self, connection: Connection) -> None:
        await self.accepted.put(connection)
        await self.ended.wait()


class World(OwnLoop):
    """Nodes of one run, in the world of that name; in that of holes, pairs are connected over them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.is_punched = name == "hole"
        self.ends: list[End] = []
        self._loop = OnWires(folder) if name == "simulator" else OwnLoop()

    def run(self, scene: Scene[T]) -> T:
        async def whole() -> T:
            try:
                return await scene()
            finally:
                await self.close()

        return self._loop.run(whole)

    @functools.cached_property
    def authority(self) -> RunAuthority:
        """By the clock of the world."""
        return RunAuthority.create(Identity.generate(), RUN, tls.unix_now())

    async def node(self) -> End:
        credentials = issued(self.authority)
        end = End(credentials, Transport(credentials))
        self.ends.append(end)
        end.address = address_of(HOST, end.transport.listen(HOST, 0))
        end.transport.serve(end.accept)
        return end

    async def _met(self, first: End, second: End) -> Connection:
        """Over libp2p, on a connection without a relay between, as a punched hole is; here `first` dials, as if to a relay."""
        second.nat = Nat(second.credentials, second.accept)
        port = await second.nat.serve(HostOptions(HOST))
        settled = asyncio.Event()
        first.nat = Nat(
            first.credentials, first.accept, HostOptions(HOST), lambda facts: settled.set() if facts.relays else None
        )
        first.nat.use_relay(second.credentials.peer_id, f"{HOST}:{port}")
        await asyncio.wait_for(settled.wait(), WAIT_S)
        first.nat.punch(second.credentials.peer_id, second.credentials.peer_id)
        return await asyncio.wait_for(first.accepted.get(), WAIT_S)

    async def pair(self) -> tuple[Connection, Connection, End, End]:
        """The dialler's end, the other's, and both nodes. The first frame makes the connection known to the other side."""
        first, second = await self.node(), await self.node()
        ours: Connection
        if self.is_punched:
            ours = await self._met(first, second)
            assert ours.way.kind is LinkKind.HOLE_PUNCHED
        else:
            ours = await first.transport.dial(second.address, second.credentials.peer_id)
        await ours.send(b"first")
        theirs = await asyncio.wait_for(second.accepted.get(), WAIT_S)
        assert await theirs.receive() == b"first"
        return ours, theirs, first, second

    async def close(self) -> None:
        for end in self.ends:
            end.ended.set()
            await end.transport.close()
            if end.nat is not None:
                await end.nat.close()


@pytest.fixture(params=["sockets", "simulator", "hole"])
def w(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(request.param, tmp_path)


async def test_both_ends_know_each_other_and_frames_keep_their_order_both_ways(w: World) -> None:
    ours, theirs, first, second = await w.pair()
    assert (ours.peer.peer_id, theirs.peer.peer_id) == (second.credentials.peer_id, first.credentials.peer_id)
    assert ours.is_outgoing and not theirs.is_outgoing
    frames = [random.Random(i).randbytes(size) for i, size in enumerate((1, 100_000, 3, 1 << 20, 17))]

    async def talk(sender: Connection, receiver: Connection) -> list[bytes | None]:
        async def send_all() -> None:
            for frame in frames:
                await sender.send(frame[:1], frame[1:])

        sending = asyncio.create_task(send_all())
        got = [await receiver.receive() for _ in frames]
        await sending
        return got

    assert await asyncio.gather(talk(ours, theirs), talk(theirs, ours)) == [frames, frames]
    await ours.close()


@pytest.mark.parametrize("closer", ["dialler", "acceptor"])
async def test_after_a_close_the_other_side_reads_the_end_and_cannot_send(w: World, closer: str) -> None:
    ours, theirs, first, second = await w.pair()
    closing, other, end = (ours, theirs, first) if closer == "dialler" else (theirs, ours, second)
    await closing.close()
    end.ended.set()  # its handler returns, as a node's does after a close
    assert await asyncio.wait_for(other.receive(), WAIT_S) is None
    with pytest.raises(Unreachable):
        for _ in range(200):
            await asyncio.wait_for(other.send(bytes(1000)), WAIT_S)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(closing.send(b"more"), WAIT_S)


async def test_a_close_that_is_given_up_ends_its_connection_at_once(w: World) -> None:
    """The loop may end with it, and what served a caller closes its socket."""
    ours, _, _, _ = await w.pair()

    async def flood() -> None:  # nobody takes it, so the other side does not come to our farewell
        while True:
            await ours.send(bytes(FRAME_BYTES))

    flooding = asyncio.create_task(flood())
    await asyncio.wait({flooding}, timeout=1.0)
    flooding.cancel()
    await asyncio.wait({flooding})
    closing = asyncio.create_task(ours.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    async with asyncio.timeout(CLOSE_S / 4):
        await ours.ended.wait()


async def test_sending_waits_while_the_other_side_does_not_read(w: World) -> None:
    ours, theirs, _, _ = await w.pair()
    limit = 1024  # frames of 64 KiB: 64 MiB, far beyond what a connection may hold
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
        assert await asyncio.wait_for(theirs.receive(), WAIT_S) is not None
    await flooding
    await ours.close()


async def test_a_silent_connection_stays_and_a_peer_that_is_gone_ends_it(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.broadcast.connection.STILL_HERE_S", 0.2)
    monkeypatch.setattr("echo2.broadcast.connection.SILENT_S", 1.0)
    ours, theirs, _, _ = await w.pair()
    await asyncio.sleep(2.0)
    await ours.send(b"still there")
    assert await asyncio.wait_for(theirs.receive(), WAIT_S) == b"still there"
    timer = theirs._beating  # type: ignore[attr-defined]
    timer.cancel()  # as a process that is frozen
    assert await asyncio.wait_for(ours.receive(), WAIT_S) is None


def test_a_node_that_has_no_time_for_its_good_byes_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest makes an error of the warning with which a socket goes that nobody closed."""
    monkeypatch.setattr("echo2.broadcast.nat.host.CLOSE_S", 0.0)
    world = World("hole", tmp_path)
    world.run(world.pair)
    gc.collect()


async def test_nobody_somebody_else_and_a_member_of_another_run_meet_nobody(w: World) -> None:
    first, second = await w.node(), await w.node()
    foreign = RunAuthority.create(Identity.generate(), RUN, tls.unix_now())
    for caller, address, peer in (
        (first.transport, second.address, Identity.generate().peer_id),
        (Transport(issued(foreign)), second.address, second.credentials.peer_id),  # we do not trust its run
    ):
        with pytest.raises(Unreachable, match="refused, or it is another peer"):
            await caller.dial(address, peer)
    with pytest.raises(Unreachable):
        await first.transport.dial(f"{HOST}:1", second.credentials.peer_id)
    assert second.accepted.empty()
