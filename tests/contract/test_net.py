"""One contract for both networks that daemons are handed: gRPC on TLS, and the simulator's wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from echo2.base.errors import PortBusy, TrustError, Unreachable
from echo2.base.rng import derived_rng
from echo2.outside import entered, here
from echo2.sim.machine import Process, VirtualDisk, VirtualMachine
from echo2.sim.memory_net import MemoryNet
from echo2.sim.virtual_loop import VirtualLoop
from echo2.sim.wires import AccessLink, Wires
from echo2.trust import tls
from echo2.trust.enrolment import check_coordinator
from echo2.trust.identity import Identity, JoinLink, RunAuthority
from tests.certificates import issued
from tests.loops import OwnLoop, Scene, T
from tests.patience import WAIT_S

SERVICE = "echo2.test.Net"
EOF_: Any = grpc.aio.EOF  # type: ignore[attr-defined]
pytestmark = pytest.mark.usefixtures("network")


class OnGrpc(OwnLoop):
    def run(self, scene: Scene[T]) -> T:
        async def whole() -> T:
            result = await scene()
            await tls.calls_have_ended()
            return result

        return super().run(whole)


class OnWires(OwnLoop):
    def __init__(self, folder: Path) -> None:
        self._disk = VirtualDisk(folder / "disk")

    def run(self, scene: Scene[T]) -> T:
        loop = VirtualLoop()
        wires = Wires(loop, derived_rng(1, "network"))
        broke: list[BaseException] = []
        machine = VirtualMachine("one", "127.0.0.1", AccessLink(1e8, 1e8, 0.02), self._disk, 1)
        wires.names[machine.host] = machine.name
        process = Process(machine, loop, lambda owner: MemoryNet(owner, wires, lambda name, error: broke.append(error)))
        try:
            with entered(process):
                return loop.run_until_complete(scene())
        finally:
            loop.close()
            assert not broke and not loop.errors


@pytest.fixture(params=["grpc", "wires"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> OwnLoop:
    return OnGrpc() if request.param == "grpc" else OnWires(tmp_path)


class Servicer:
    """Says what came of its calls."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def double(self, request: bytes, context: Any) -> bytes:
        if request == b"refused":
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")
        if request == b"slow":
            await asyncio.sleep(30.0)
        return tls.peer_of(context).peer_id.encode() if request == b"who" else request * 2

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"refused":
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no more")
            yield request

    async def hold(self, _: AsyncIterator[bytes], context: Any) -> None:
        try:
            await context.read()
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def handlers(self) -> Any:
        return {
            "Double": grpc.unary_unary_rpc_method_handler(self.double),
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            "Hold": grpc.stream_stream_rpc_method_handler(self.hold),
        }


class Rig:
    """A server of a run's coordinator, and a worker's channel to it."""

    def __init__(self) -> None:
        now = tls.unix_now()
        self.authority = RunAuthority.create(Identity.generate(), "run", now)  # type: ignore[arg-type]
        self.coordinator = tls.coordinator_credentials(self.authority, "127.0.0.1:0")
        self.worker = issued(self.authority)
        self.servicer = Servicer()
        self.server = here().net.server(())
        self.server.add_registered_method_handlers(SERVICE, self.servicer.handlers())
        self.port = here().net.listen(self.server, "127.0.0.1", 0, tls.server_credentials(self.coordinator))

    def channel(self, credentials: tls.Credentials | None = None) -> Any:
        own = credentials or self.worker
        return tls.open_channel(f"127.0.0.1:{self.port}", self.authority.identity.peer_id, own)

    async def __aenter__(self) -> Rig:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


async def test_a_call_is_answered_refused_late_or_unknown() -> None:
    async with Rig() as rig, rig.channel() as channel:
        double = channel.unary_unary(f"/{SERVICE}/Double")
        assert await double(b"ab") == b"abab"
        assert await double(b"who") == rig.worker.peer_id.encode()
        for request, code in (
            (b"refused", grpc.StatusCode.NOT_FOUND),
            (b"slow", grpc.StatusCode.DEADLINE_EXCEEDED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await double(request, timeout=0.5)
            assert raised.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(f"/{SERVICE}/Missing")(b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_echoes_ends_in_order_and_is_refused_in_the_middle() -> None:
    async with Rig() as rig, rig.channel() as channel:
        call = channel.stream_stream(f"/{SERVICE}/Echo")()
        for number in range(5):
            await call.write(bytes([number]))
            assert await call.read() == bytes([number])
        await call.done_writing()
        assert await call.read() is EOF_
        assert await call.code() is grpc.StatusCode.OK
        call = channel.stream_stream(f"/{SERVICE}/Echo")()
        await call.write(b"refused")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, "no more")
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"more")


async def test_a_handler_whose_caller_goes_is_cancelled_and_the_caller_hears_nothing_more() -> None:
    async with Rig() as rig, rig.channel() as channel:
        call = channel.stream_stream(f"/{SERVICE}/Hold")()
        await call.write(b"x")
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(rig.servicer.cancelled.wait(), WAIT_S)


async def test_a_writer_waits_while_the_other_side_does_not_read() -> None:
    async with Rig() as rig, rig.channel() as channel:
        call = channel.stream_stream(f"/{SERVICE}/Hold")()
        taken = 0

        async def write() -> None:
            nonlocal taken
            while True:
                await call.write(bytes(1 << 19))
                taken += 1

        writing, before = asyncio.create_task(write()), -1
        async with asyncio.timeout(WAIT_S):
            while taken != before:  # gRPC's window grows for a while
                before = taken
                await asyncio.sleep(2.0)
        assert taken >= 1
        assert not writing.done(), "it waits, it has not failed"
        writing.cancel()
        call.cancel()


async def test_a_server_that_stops_ends_calls_and_further_ones_find_nobody() -> None:
    async with Rig() as rig, rig.channel() as channel:
        call = channel.stream_stream(f"/{SERVICE}/Hold")()
        await call.write(b"x")
        await asyncio.sleep(0.3)
        await rig.server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        async with rig.channel() as another:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await another.unary_unary(f"/{SERVICE}/Double")(b"ab", timeout=3.0)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_strangers_and_wrong_servers_fail_the_handshake() -> None:
    async with Rig() as rig:
        other = RunAuthority.create(Identity.generate(), "other", tls.unix_now())  # type: ignore[arg-type]
        stranger = replace(issued(other), authority_pem=rig.authority.certificate_pem)
        for channel in (
            rig.channel(stranger),
            tls.open_channel(f"127.0.0.1:{rig.port}", rig.worker.peer_id, rig.worker),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await channel.unary_unary(f"/{SERVICE}/Double")(b"ab", timeout=3.0)
                assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_taken_port_is_named_and_a_certificate_can_be_looked_at() -> None:
    async with Rig() as rig:
        with pytest.raises(PortBusy, match=str(rig.port)):
            here().net.listen(here().net.server(()), "127.0.0.1", rig.port, tls.server_credentials(rig.coordinator))
        enrolment = here().net.server(())
        shown = tls.enrolment_server_credentials(rig.authority)
        port = here().net.listen(enrolment, "127.0.0.1", 0, shown)
        await enrolment.start()
        link = JoinLink("127.0.0.1", port, rig.authority.identity.peer_id, "secret")
        await asyncio.to_thread(check_coordinator, link, 5.0)
        wrong = JoinLink("127.0.0.1", port, rig.worker.peer_id, "secret")
        with pytest.raises(TrustError):
            await asyncio.to_thread(check_coordinator, wrong, 5.0)
        await enrolment.stop(None)
        with pytest.raises(Unreachable):
            await asyncio.to_thread(check_coordinator, link, 1.0)
