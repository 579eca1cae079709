"""A worker with a join link names addresses that are not its own: nobody is told to dial them, and nobody does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from echo2.broadcast.connections import GRACE_S
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.trust.identity import Role
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2 as pb
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, options, running

ELSEWHERE = "127.0.0.9"
"""Where the hostile worker is seen; the others of this machine are at 127.0.0.1."""


class Victim:
    """A service that is none of the run's: counts who connects."""

    def __init__(self) -> None:
        self.count, self.met = 0, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        self.met.set()
        writer.close()


@contextlib.asynccontextmanager
async def listening(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def seen_from(host: str, address: str) -> AsyncIterator[str]:
    """An address here whose connections reach `address` as if they came from `host`."""
    there, _, port = address.rpartition(":")
    pumps, ends = set[asyncio.Task[None]](), list[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        onward, back = await asyncio.open_connection(there, int(port), local_addr=(host, 0))
        ends.append(back)
        pumps.update((asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(onward, writer))))

    async with listening(forward) as bound:
        yield f"127.0.0.1:{bound}"
    for one in pumps:
        one.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    for end in ends:
        end.close()  # a pump that was ended before it began has closed none
    await asyncio.sleep(0)  # the loop lets go of what was closed


def named_by(victim: int) -> dict[str, list[str]]:
    """What it says, each in eight addresses at most: more are no message."""
    return {
        "services of the machine": [f"127.0.0.1:{victim}", f"[::1]:{victim}", f"[::ffff:127.0.0.1]:{victim}"],
        "its network and its cloud": ["169.254.169.254:8080", "10.0.0.1:8080", "192.168.1.1:8080", "[fe80::1]:8080"],
        "names": [f"localhost:{victim}", "metadata.google.internal:8080", f"127.1:{victim}", f"0:{victim}"],
        "others of the world": ["198.41.0.4:5000", "203.0.113.7:5000"],
        "services of the system": [f"{ELSEWHERE}:22", f"{ELSEWHERE}:25", f"{ELSEWHERE}:1023"],
    }


async def test_what_a_worker_names_elsewhere_than_where_it_is_seen_is_dialled_by_nobody(tmp_path: Path) -> None:
    victim, honest_port = Victim(), Victim()
    async with (
        running(options(tmp_path / "coordinator")) as daemon,
        listening(victim.serve) as bad,
        listening(honest_port.serve) as good,
    ):
        learner, honest = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        node = BroadcastNode(learner.credentials, NodeOptions(tmp_path / "node"))
        await node.start()
        await learner.hello()
        async with seen_from(ELSEWHERE, honest.credentials.coordinator_address) as detour:
            attackers = []
            for addresses in named_by(bad).values():
                joined = await Node.join(daemon, Role.WORKER)
                attackers.append(attacker := Node(replace(joined.credentials, coordinator_address=detour)))
                await joined.close()
                assert (await attacker.hello(addresses=addresses)).WhichOneof("kind") == "welcome"
                access = broadcast_pb2.PeerAccess(lan_addresses=addresses, public_host="127.0.0.1")
                await attacker.say(heartbeat=pb.Heartbeat(reach=pb.Reach(addresses=addresses, access=access)))
            hostile = {one.credentials.peer_id for one in attackers}
            await honest.hello(addresses=[f"127.0.0.1:{good}"])  # the control: its own address
            while True:
                plan = plan_from_message(await learner.until("broadcast_plan"))
                told = {one.peer_id: one for one in plan.nodes}
                if told.keys() >= {*hostile, honest.credentials.peer_id}:
                    break
            assert told[honest.credentials.peer_id].addresses == (f"127.0.0.1:{good}",)
            for peer in hostile:
                assert told[peer].addresses == told[peer].access.lan_addresses == ()
                assert told[peer].access.public_host == ""
            node.set_plan(plan)
            await asyncio.wait_for(honest_port.met.wait(), WAIT_S)
            await asyncio.sleep(GRACE_S + 1)  # a real node has no virtual clock: by now it dials whom it may
        assert victim.count == 0
        await node.stop()
