"""`Net` of a virtual machine: servers, channels and handshakes over its wires.

Guarantees: those of memory_grpc; the handshake checks both certificates as TLS would. An address is a machine's loopback
address and a port. Leaves to others: calls (memory_grpc).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from echo2.base.errors import EchoError, PortBusy, TrustError, Unreachable
from echo2.outside.net import Dialled, NetOptions, Shown
from echo2.sim.memory_grpc import Link, MemoryCall, MemoryContext, Stream, rpc_error, serve_call
from echo2.trust.identity import NodeCertificate, dns_name_of

if TYPE_CHECKING:
    from echo2.sim.process import Process
    from echo2.sim.wires import End, Wires

CONNECT_S = 20.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 5.0
FIRST_PORT = 20_000


class MemoryNet:
    """The network of one process. Its servers are reached at its machine's address."""

    def __init__(self, process: Process, wires: Wires, told: Callable[[str, BaseException], None]) -> None:
        self.process, self.wires, self._told = process, wires, told
        self.dialled = 0

    def server(self, options: NetOptions) -> grpc.aio.Server:
        made = MemoryServer(self.process, self.wires, functools.partial(self._told, self.process.name))
        return cast(grpc.aio.Server, made)

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        made: Any = server
        port = port or next(
            p for p in range(FIRST_PORT, FIRST_PORT + 1000) if self.wires.listener(self.process.machine.host, p) is None
        )
        if not self.wires.listen(self.process, port, lambda end: made.accept(end, shown)):
            raise PortBusy(f"expected to listen on {host}:{port}: Address already in use")
        made.bound.append((port, shown))
        return port

    def channel(self, address: str, dialled: Dialled, options: NetOptions) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, MemoryChannel(self, address, dialled))

    def certificate_at(self, host: str, port: int, server_name: str, timeout_s: float) -> bytes:
        """The server's certificate, in DER. Returns at once, but spends twice the link's round-trip time on the caller's thread.
        Raises Unreachable if no server answers, TrustError if it does not use TLS."""
        self.process.loop.spend(2 * self.process.machine.link.rtt_s)
        found = self.wires.listener(host, port)
        if found is None or found[0].is_frozen or self._is_cut_off_from(found[0]):
            raise Unreachable(f"coordinator at {host}:{port}: expected an answer within {timeout_s:.0f} s, got none")
        server = self.wires.shown.get((host, port))
        if server is None:
            raise TrustError(f"coordinator at {host}:{port}: expected TLS, got something else")
        return ssl.PEM_cert_to_DER_cert(server.pair()[1].decode())

    def _is_cut_off_from(self, other: Process) -> bool:
        names = (self.process.name, other.name)
        return self.wires.is_blocked(*names) or self.wires.is_blocked(*reversed(names))


@functools.lru_cache(maxsize=4096)
def _certificate(pem: bytes) -> NodeCertificate:
    return NodeCertificate.parse(pem, "a certificate")


@functools.lru_cache(maxsize=4096)
def _is_issued_by(pem: bytes, root_pem: bytes) -> bool:
    try:
        _certificate(pem).check_issuer(root_pem)
    except EchoError:
        return False
    return True


def _is_good(pem: bytes, root_pem: bytes, unix_now: float) -> bool:
    certificate = _certificate(pem)
    in_force = certificate.not_before_unix_s <= unix_now <= certificate.not_after_unix_s
    return in_force and (pem == root_pem or _is_issued_by(pem, root_pem))


class MemoryServer:
    """The part of `grpc.aio.Server` that the daemons use."""

    def __init__(self, process: Process, wires: Wires, told: Callable[[BaseException], None]) -> None:
        self._process, self._wires, self._told = process, wires, told
        self.bound: list[tuple[int, Shown]] = []
        self._generic: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._links: dict[Link, None] = {}
        self._calls: dict[asyncio.Task[None], None] = {}
        self._is_serving = False

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._registered.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def start(self) -> None:
        self._is_serving = True
        for port, shown in self.bound:
            self._wires.shown[(self._process.machine.host, port)] = shown

    async def stop(self, grace: float | None) -> None:
        self._is_serving = False
        for port, _ in self.bound:
            self._wires.stop_listening(self._process, port)
        if self._calls and grace:
            await asyncio.wait(list(self._calls), timeout=grace)
        for task in list(self._calls):
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls))
        for link in list(self._links):
            link.close("the server stops")

    def accept(self, end: End, shown: Shown) -> None:
        """Accepts a wire after its handshake. Its calls run in this process's context."""
        pair = end.wire.caller_pair
        pem = pair[1] if pair is not None and shown.authority_pem is not None else None
        peer = f"ipv4:{end.peer.process.machine.host}:{end.wire.caller_port}"
        if not self._is_serving:
            end.close("not serving")
            return

        def opened(stream: Stream, method: str) -> None:
            self._called(stream, method, peer, pem)

        link = Link(end, opened, lambda reason: self._links.pop(link, None))
        self._links[link] = None

    def _called(self, stream: Stream, method: str, peer: str, pem: bytes | None) -> None:
        handler = self._registered.get(method) or self._find(method)
        if handler is None:
            stream.link.send(stream.number, "end", (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        context = MemoryContext(stream, handler.response_serializer, handler.request_deserializer, peer, pem)
        loop = asyncio.get_running_loop()
        task = loop.create_task(serve_call(handler, context, self._told))
        self._calls[task] = None
        task.add_done_callback(lambda _: self._calls.pop(task, None))
        stream.on_end = lambda: None if task.done() or task is asyncio.current_task() else _cancel(task)

    def _find(self, method: str) -> Any:
        details = _Details(method)
        return next((found for g in self._generic if (found := g.service(details)) is not None), None)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class MemoryChannel:
    """The part of `grpc.aio.Channel` that the daemons use."""

    def __init__(self, net: MemoryNet, address: str, dialled: Dialled) -> None:
        self._net, self._dialled = net, dialled
        host, _, port = address.rpartition(":")
        self._host, self._port, self._address = host.strip("[]"), int(port), address
        self._state = grpc.ChannelConnectivity.IDLE
        self._changed = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._failures = 0
        self._why = ""
        self.calls: dict[MemoryCall, None] = {}

    # ---- state

    def _set(self, state: grpc.ChannelConnectivity) -> None:
        if self._state is not grpc.ChannelConnectivity.SHUTDOWN and state is not self._state:
            self._state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if try_to_connect:
            self._connect()
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            await self._changed.wait()

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            await self.wait_for_state_change(state)

    def _connect(self) -> None:
        if self._connecting is None and self._state is grpc.ChannelConnectivity.IDLE:
            self._connecting = asyncio.get_running_loop().create_task(self._keep_trying())

    async def _keep_trying(self) -> None:
        try:
            while self._state is not grpc.ChannelConnectivity.SHUTDOWN:
                self._set(grpc.ChannelConnectivity.CONNECTING)
                self._why = await self._once()
                if not self._why:
                    self._failures = 0
                    self._set(grpc.ChannelConnectivity.READY)
                    return
                self._set(grpc.ChannelConnectivity.TRANSIENT_FAILURE)
                pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 1.6**self._failures)
                self._failures += 1
                await asyncio.sleep(pause_s * self._net.process.rng.uniform(0.8, 1.2))
        finally:
            self._connecting = None

    async def _once(self) -> str:
        """Makes one attempt to connect; returns why it failed, or an empty text."""
        net, answered = self._net, asyncio.get_running_loop().create_future()
        net.wires.reach(
            net.process,
            self._host,
            self._port,
            lambda found: None if answered.done() else answered.set_result(found),
            CONNECT_S,
        )
        server = await answered
        shown = net.wires.shown.get((self._host, self._port))
        if server is None or shown is None or net.wires.listener(self._host, self._port) is None:
            return "failed to connect to all addresses"
        if not self._is_trusted(shown, server):
            return "handshake failed"
        end = net.wires.connect(net.process, self._host, self._port, self._dialled.pair)
        if end is None:
            return "failed to connect to all addresses"
        self._link = Link(end, None, self._lost)
        return ""

    def _is_trusted(self, shown: Shown, server: Process) -> bool:
        pem, now = shown.pair()[1], self._net.process.clock.unix_now()
        with contextlib.suppress(EchoError):
            is_it = dns_name_of(_certificate(pem).peer_id) == self._dialled.server_name
            if not is_it or not _is_good(pem, self._dialled.root_pem, now):
                return False
            if shown.authority_pem is None:
                return True
            pair = self._dialled.pair
            return pair is not None and _is_good(pair[1], shown.authority_pem, server.clock.unix_now())
        return False

    def _lost(self, reason: str) -> None:
        self._link = None
        self._set(grpc.ChannelConnectivity.IDLE)

    async def ready_link(self) -> Link:
        """The link for a call. Waits while the channel connects; raises UNAVAILABLE if the last attempt failed, CANCELLED if the
        channel is closed."""
        while True:
            state = self.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY and self._link is not None and self._link.is_open:
                return self._link
            if state is grpc.ChannelConnectivity.READY:
                self._lost("closed")
                continue
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, self._why)
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise rpc_error(grpc.StatusCode.CANCELLED, "Channel is closed.")
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._set(grpc.ChannelConnectivity.SHUTDOWN)

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- calls

    def _callable(self, method: str, encode: Any, decode: Any, is_streaming: bool) -> Any:
        def call(request: Any = None, *, timeout: float | None = None, **_: Any) -> MemoryCall:
            made = MemoryCall(self, method, encode, decode, timeout)
            if not is_streaming or request is not None:
                made.say(request)
            return made

        return call

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._callable(method, request_serializer, response_deserializer, False)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._callable(method, request_serializer, response_deserializer, True)

    unary_stream, stream_unary = unary_unary, stream_stream
