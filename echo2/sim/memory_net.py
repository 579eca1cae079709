"""`Net` of a virtual machine over its wires: servers, channels, handshakes, streams of the bytes that production sends over TLS.

Guarantees: those of outside/net and outside/streams; the handshake checks both certificates as TLS would; an address is a machine's
loopback address and a port. A dishonest machine's `message_filter` alters whole frames of a stream; chunks weigh what a large
model's would; bytes arrive cut at random.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from echo2.base.errors import EchoError, PortBusy, TrustError, Unreachable
from echo2.broadcast.connection import HEAD, FrameCutter
from echo2.outside.net import Dialled, NetOptions, Shown
from echo2.outside.streams import StreamReader
from echo2.sim.machine import PEERS
from echo2.sim.memory_grpc import LINK_BACKLOG_S, WINDOW_BYTES, CallStream, Link, MemoryCall, MemoryContext, rpc_error
from echo2.trust.identity import NodeCertificate, dns_name_of
from echo2.wire.broadcast import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from echo2.sim.machine import Process
    from echo2.sim.wires import End, Wires

CONNECT_S = 20.0  # as production's (control/session)
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 5.0  # as production's channels (trust/tls)
FIRST_PORT = 20_000  # above those that scenarios name
LOOK_S = 0.02  # a fiftieth of a second: finer than any timer of the session
STILL_HERE = b"\0"  # a keepalive, which the other side drops


@functools.lru_cache(maxsize=4096)
def certificate_of(pem: bytes) -> NodeCertificate:
    return NodeCertificate.parse(pem, "a certificate")


@functools.lru_cache(maxsize=4096)
def _is_issued_by(pem: bytes, root_pem: bytes) -> bool:
    try:
        certificate_of(pem).check_issuer(root_pem)
    except EchoError:
        return False
    return True


def is_good(pem: bytes, root_pem: bytes, unix_now: float) -> bool:
    """Whether a certificate is in force, and is or was issued by that of the root."""
    certificate = certificate_of(pem)
    in_force = certificate.not_before_unix_s <= unix_now <= certificate.not_after_unix_s
    return in_force and (pem == root_pem or _is_issued_by(pem, root_pem))


def _is_chunk(frame: bytes) -> bool:
    """By the tag of its field, which comes first or after a route or an answer mark."""
    begin = 2 + frame[1] if frame[:1] == b"\x4a" else 2 if frame[:1] == b"\x50" else 0
    return frame[begin : begin + 1] == b"\x1a"


class MemoryStream:
    """One end. On the wire go whole frames, each with the stream that sent it."""

    def __init__(self, reader: StreamReader, end: End, remote: tuple[str, int], shown_pem: bytes) -> None:
        self._reader, self._end = reader, end
        self._said = FrameCutter(FRAME_BYTES_MAX, "a stream")
        self._inbox: deque[tuple[bytes, MemoryStream]] = deque()
        self._is_reading, self._is_paused, self._is_closing = True, False, False
        self._in_flight = 0
        self._looking: asyncio.TimerHandle | None = None
        end.on_frame, end.on_closed = self._frame, self._closed
        reader.connection_made(self, remote, ssl.PEM_cert_to_DER_cert(shown_pem.decode()))

    # ---- what its reader calls

    def write(self, data: bytes | memoryview) -> None:
        if self._is_closing:
            return
        rest = memoryview(data)
        while rest:
            room = self._said.room()
            count = min(len(room), len(rest))
            room[:count], rest = rest[:count], rest[count:]
            for frame in self._said.take(count):
                self._say(frame)
        self._look_at_backlog()

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        self.write(b"".join(parts))

    def _say(self, frame: bytes) -> None:
        message_filter, wires = self._end.process.machine.message_filter, self._end.wire.wires
        is_honest = message_filter is None or frame == STILL_HERE
        for message in (frame,) if is_honest else message_filter.says(PEERS, self._end.side, frame):  # type: ignore[union-attr]
            self._in_flight += len(message)
            self._end.send((message, self), len(message) * (wires.chunk_scale if _is_chunk(message) else 1))

    def _look_at_backlog(self) -> None:
        """Asks the writer to pause, or to go on."""
        self._looking = None
        behind_s = self._end.wire.wires.backlog_s(self._end)
        is_full = self._in_flight >= WINDOW_BYTES or behind_s > LINK_BACKLOG_S
        if is_full and not self._is_closing:
            wait_s = max(LOOK_S, behind_s - LINK_BACKLOG_S)
            self._looking = asyncio.get_running_loop().call_later(wait_s, self._look_at_backlog)
        if is_full != self._is_paused:
            self._is_paused = is_full
            (self._reader.pause_writing if is_full else self._reader.resume_writing)()

    def set_write_buffer_limits(self, high: int) -> None:
        """The wire has its own."""

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._deliver()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._end.close("closed")
            asyncio.get_running_loop().call_soon(self._reader.connection_lost, None)

    def abort(self) -> None:
        self.close()

    # ---- what its wire calls

    def _frame(self, frame: tuple[bytes, MemoryStream]) -> None:
        message_filter = self._end.process.machine.message_filter
        if message_filter is None or frame[0] == STILL_HERE or message_filter.hears(PEERS, self._end.side, frame[0]):
            self._inbox.append(frame)
            self._deliver()

    def _deliver(self) -> None:
        rng = self._end.process.rng
        while self._inbox and self._is_reading and not self._is_closing:
            data, sender = self._inbox.popleft()
            sender._in_flight -= len(data)
            rest = memoryview(HEAD.pack(len(data)) + data)
            records = 0
            while rest and not self._is_closing:
                room = self._reader.get_buffer(-1)
                count = min(len(room), len(rest), rng.choice((1, 3, 1000, 1 << 20, 1 << 20)))
                room[:count], rest = rest[:count], rest[count:]
                self._reader.buffer_updated(count)
                records = 1
            self._reader.worked(0.0, records, len(data))

    def _closed(self, reason: str) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._reader.connection_lost(None)


class MemoryCaller:
    """A `StreamCaller` that came over a wire."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.host = end.peer.process.machine.host
        self._is_taken = False
        self._early: list[tuple[bytes, MemoryStream]] = []
        end.on_frame = self._early.append

    async def shake_hands(self, reader: StreamReader, shown: Shown, within_s: float) -> None:
        pair, now = self._end.wire.caller_pair, self._end.process.clock.unix_now()
        assert shown.authority_pem is not None, "streams are authenticated both ways"
        if pair is None or not is_good(pair[1], shown.authority_pem, now):
            raise ConnectionError("handshake failed")
        if not self._end.is_open:
            raise ConnectionResetError("it ended during the handshake")
        self._is_taken = True
        stream = MemoryStream(reader, self._end, (self.host, self._end.wire.caller_port), pair[1])
        for frame in self._early:
            stream._frame(frame)

    def close(self) -> None:
        if not self._is_taken:
            self._end.close("refused")


class MemoryListener:
    """A `StreamListener` at a machine's port."""

    def __init__(self, process: Process, wires: Wires, port: int, shown: Shown) -> None:
        self.port, self._process, self._wires = port, process, wires
        self._waiting: asyncio.Queue[MemoryCaller] = asyncio.Queue()
        if not wires.listen(process, port, lambda end: self._waiting.put_nowait(MemoryCaller(end))):
            raise PortBusy(f"expected to listen on {process.machine.host}:{port}: Address already in use")
        wires.shown[(process.machine.host, port)] = shown

    async def accept(self) -> MemoryCaller:
        return await self._waiting.get()

    def close(self) -> None:
        self._wires.stop_listening(self._process, self.port)


async def connect(
    process: Process, wires: Wires, place: tuple[str, int], dialled: Dialled, within_s: float, *, is_own_checked: bool
) -> tuple[End, bytes]:
    """A wire to the server that `dialled` names, after the handshake, and its certificate. `is_own_checked`: the server checks the
    caller's before it answers. ConnectionError tells why there is none."""
    server = await wires.reach(process, *place, within_s)
    shown = wires.shown.get(place)
    if server is None or shown is None or wires.listener(*place) is None:
        raise ConnectionRefusedError("failed to connect to all addresses")
    pem, is_trusted = shown.pair()[1], False
    with contextlib.suppress(EchoError):
        is_trusted = dns_name_of(certificate_of(pem).peer_id) == dialled.server_name
        is_trusted = is_trusted and is_good(pem, dialled.root_pem, process.clock.unix_now())
        if is_trusted and is_own_checked and shown.authority_pem is not None:
            pair = dialled.pair
            is_trusted = pair is not None and is_good(pair[1], shown.authority_pem, server.clock.unix_now())
    if not is_trusted:
        raise ConnectionError("handshake failed")
    end = wires.connect(process, *place, dialled.pair)
    if end is None:
        raise ConnectionRefusedError("failed to connect to all addresses")
    return end, pem


class MemoryNet:
    """The network of one process. Its servers are reached at its machine's address."""

    def __init__(self, process: Process, wires: Wires, on_error: Callable[[str, BaseException], None]) -> None:
        self.process, self.wires, self._on_error = process, wires, on_error

    def server(self, options: NetOptions) -> grpc.aio.Server:
        server = MemoryServer(self.process, self.wires, functools.partial(self._on_error, self.process.name))
        return cast(grpc.aio.Server, server)

    def listen(self, server: grpc.aio.Server, host: str, port: int, shown: Shown) -> int:
        memory_server: Any = server
        port = port or self._free_port()
        if not self.wires.listen(self.process, port, lambda end: memory_server.accept(end, shown)):
            raise PortBusy(f"expected to listen on {host}:{port}: Address already in use")
        memory_server.bound.append((port, shown))
        return port

    def channel(self, address: str, dialled: Dialled, options: NetOptions) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, MemoryChannel(self, address, dialled))

    def certificate_at(self, host: str, port: int, server_name: str, timeout_s: float) -> bytes:
        """The server's certificate, in DER. Returns at once, but spends twice the link's round-trip time on the caller's thread.
        Raises Unreachable if no server answers, TrustError if it does not use TLS."""
        self.process.loop.spend(2 * self.process.machine.link.rtt_s)
        listener = self.wires.listener(host, port)
        if listener is None or listener[0].is_frozen or self.wires.is_cut_off(self.process.name, listener[0].name):
            raise Unreachable(f"coordinator at {host}:{port}: expected an answer within {timeout_s:.0f} s, got none")
        server = self.wires.shown.get((host, port))
        if server is None:
            raise TrustError(f"coordinator at {host}:{port}: expected TLS, got something else")
        return ssl.PEM_cert_to_DER_cert(server.pair()[1].decode())

    async def dial_stream(self, reader: StreamReader, host: str, port: int, dialled: Dialled, within_s: float) -> None:
        assert dialled.pair is not None, "streams are authenticated both ways"
        place = (host, port)
        end, pem = await connect(self.process, self.wires, place, dialled, within_s, is_own_checked=False)
        MemoryStream(reader, end, place, pem)

    def listen_for_streams(self, host: str, port: int, shown: Shown, watch: Callable[[int], None]) -> MemoryListener:
        return MemoryListener(self.process, self.wires, port or self._free_port(), shown)

    def _free_port(self) -> int:
        ports = range(FIRST_PORT, FIRST_PORT + 1000)
        return next(port for port in ports if self.wires.listener(self.process.machine.host, port) is None)


class MemoryServer:
    """The part of `grpc.aio.Server` that the daemons use."""

    def __init__(self, process: Process, wires: Wires, on_error: Callable[[BaseException], None]) -> None:
        self._process, self._wires, self._on_error = process, wires, on_error
        self.bound: list[tuple[int, Shown]] = []
        self._registered: dict[str, Any] = {}
        self._links: dict[Link, None] = {}
        self._calls: dict[asyncio.Task[None], None] = {}
        self._is_serving = False

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
            link.end.close("the server stops")

    def accept(self, end: End, shown: Shown) -> None:
        """Accepts a wire after its handshake. Its calls run in this process's context."""
        pair = end.wire.caller_pair
        pem = pair[1] if pair is not None and shown.authority_pem is not None else None
        peer = f"ipv4:{end.peer.process.machine.host}:{end.wire.caller_port}"
        if not self._is_serving:
            end.close("not serving")
            return

        link = Link(end, lambda stream: self._called(stream, peer, pem), lambda reason: self._links.pop(link, None))
        self._links[link] = None

    def _called(self, stream: CallStream, peer: str, pem: bytes | None) -> None:
        handler = self._registered.get(stream.method)
        if handler is None:
            stream.tell("end", (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        serving = MemoryContext(stream, handler, peer, pem).serve(self._on_error)
        task = asyncio.get_running_loop().create_task(serving)
        self._calls[task] = None
        task.add_done_callback(lambda _: self._calls.pop(task, None))

        def ended(code: grpc.StatusCode, details: str) -> None:
            if task is not asyncio.current_task():
                task.cancel()

        stream.on_end = ended


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

    def _connecting_state(self) -> grpc.ChannelConnectivity:
        if self._connecting is None and self._state is grpc.ChannelConnectivity.IDLE:
            self._connecting = asyncio.get_running_loop().create_task(self._keep_trying())
        return self._state

    async def _change_from(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            await self._changed.wait()

    async def channel_ready(self) -> None:
        while (state := self._connecting_state()) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            await self._change_from(state)

    async def _keep_trying(self) -> None:
        net, place = self._net, (self._host, self._port)
        try:
            while self._state is not grpc.ChannelConnectivity.SHUTDOWN:
                self._set(grpc.ChannelConnectivity.CONNECTING)
                try:
                    end, _ = await connect(net.process, net.wires, place, self._dialled, CONNECT_S, is_own_checked=True)
                except ConnectionError as error:
                    self._why = str(error)
                else:
                    self._link, self._failures = Link(end, None, self._lost), 0
                    self._set(grpc.ChannelConnectivity.READY)
                    return
                self._set(grpc.ChannelConnectivity.TRANSIENT_FAILURE)
                pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 1.6**self._failures)
                self._failures += 1
                await asyncio.sleep(pause_s * net.process.rng.uniform(0.8, 1.2))
        finally:
            self._connecting = None

    def _lost(self, reason: str) -> None:
        self._link = None
        self._set(grpc.ChannelConnectivity.IDLE)

    async def ready_link(self) -> Link:
        """The link for a call. Waits while the channel connects; raises UNAVAILABLE if the last attempt failed, CANCELLED if the
        channel is closed."""
        while True:
            state = self._connecting_state()
            if state is grpc.ChannelConnectivity.READY and self._link is not None and self._link.end.is_open:
                return self._link
            if state is grpc.ChannelConnectivity.READY:
                self._lost("closed")
                continue
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, self._why)
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise rpc_error(grpc.StatusCode.CANCELLED, "Channel is closed.")
            await self._change_from(state)

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.end.close()
            self._link = None
        self._set(grpc.ChannelConnectivity.SHUTDOWN)

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- calls

    def _callable(
        self, is_streaming: bool, method: str, request_serializer: Any = None, response_deserializer: Any = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        def call(request: Any = None, *, timeout: float | None = None, **_: Any) -> MemoryCall:
            memory_call = MemoryCall(self, method, request_serializer, response_deserializer, timeout)
            if not is_streaming or request is not None:
                memory_call.say(request)
            return memory_call

        return call

    unary_unary = unary_stream = functools.partialmethod(_callable, False)
    stream_unary = stream_stream = functools.partialmethod(_callable, True)
