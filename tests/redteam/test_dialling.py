"""A worker with a join link names addresses that are not its own: nobody is told to dial them, and nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.connections import GRACE_S
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.trees import PlanPace
from echo2.trust.identity import Role
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
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
        "services of the machine that dials": [
            f"127.0.0.1:{victim}",
            f"[::1]:{victim}",
            f"[::ffff:127.0.0.1]:{victim}",
        ],
        "its network and its cloud": ["169.254.169.254:8080", "10.0.0.1:8080", "192.168.1.1:8080", "[fe80::1]:8080"],
        "names": [f"localhost:{victim}", "metadata.google.internal:8080", f"127.1:{victim}", f"0:{victim}"],
        "others of the world": ["198.41.0.4:5000", "203.0.113.7:5000"],
        "services of the system": [f"{ELSEWHERE}:22", f"{ELSEWHERE}:25", f"{ELSEWHERE}:1023"],
    }


async def node_of(plan_reader: Node, peer_id: PeerId, is_it: Callable[[NodeLink], bool]) -> BroadcastPlan:
    """The first plan in which that peer is as expected."""
    while True:
        plan = plan_from_message(await plan_reader.until("broadcast_plan"))
        if any(node.peer_id == peer_id and is_it(node) for node in plan.nodes):
            return plan


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


async def test_where_the_relay_has_met_a_worker_is_told_though_it_is_seen_elsewhere_and_for_no_other(
    tmp_path: Path,
) -> None:
    """As one whose control stream comes by IPv6 and whose port listens by IPv4."""
    async with running(options(tmp_path)) as daemon:
        learner, worker, liar = [await Node.join(daemon, role) for role in (Role.LEARNER, Role.WORKER, Role.WORKER)]
        await learner.hello()
        async with seen_from(ELSEWHERE, worker.credentials.coordinator_address) as detour:
            met, address = [], "127.0.0.1:7000"
            for one in (worker, liar):
                met.append(node := Node(replace(one.credentials, coordinator_address=detour)))
                await node.hello(addresses=[address])
            daemon.hub.proven.note(worker.credentials.peer_id, address, daemon.hub.clock.now())
            for node in met:
                await node.say(heartbeat=pb.Heartbeat(reach=pb.Reach(addresses=[address])))
            plan = await node_of(learner, worker.credentials.peer_id, lambda n: bool(n.addresses))
            told = {one.peer_id: one.addresses for one in plan.nodes}
            assert told[worker.credentials.peer_id] == (address,)
            assert told[liar.credentials.peer_id] == ()


async def test_a_worker_whose_link_and_addresses_jump_causes_few_plans_and_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of three workers tells other rates, then other addresses, fifty times a second, and often that it leaves."""
    beats, pause_s = 200, 0.02
    caplog.set_level(logging.INFO, "echo2.coordinator")
    plans: list[int] = []

    async def read_plans(node: Node) -> None:
        while (order := await node.call.read()) is not grpc.aio.EOF:
            if order.WhichOneof("kind") == "broadcast_plan":
                plans.append(order.broadcast_plan.epoch)

    async with running(options(tmp_path, suspect_after=60.0, gone_after=90.0)) as daemon:
        learner, *workers = [await Node.join(daemon, role) for role in (Role.LEARNER, *[Role.WORKER] * 3)]
        await learner.hello()
        for worker in workers:
            await worker.hello(addresses=["127.0.0.1:4001"])
        reading = asyncio.create_task(read_plans(workers[0]))
        jumping = workers[-1]
        await asyncio.sleep(1.5)  # a plan of all is made
        plans.clear()
        caplog.clear()
        for number in range(beats):
            link = pb.Link(uplink_bytes_per_s=1e5 * 10 ** (number // 4 % 4), downlink_bytes_per_s=1e8, rtt_s=0.05)
            await jumping.say(heartbeat=pb.Heartbeat(link=link))
            await asyncio.sleep(pause_s)
        assert len(plans) <= 2, "a link's rates alone"
        plans.clear()
        for number in range(beats):
            named = [f"10.{number % 250}.0.{place}:4000" for place in range(3)]
            reach = pb.Reach(addresses=[f"127.0.0.1:{5000 + number}", *named])
            await jumping.say(heartbeat=pb.Heartbeat(reach=reach))
            if number % 10 == 9:
                await jumping.say(leaving=pb.WorkerLeaving(reason="bored"))
            await asyncio.sleep(pause_s)
        assert 1 <= len(plans) <= PlanPace.BURST + beats * pause_s, "its addresses"
        about = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        assert len(about) <= 5 and sum("are not told" in line for line in about) == 1, about
        for node in (learner, *workers):
            await node.close()
        reading.cancel()
