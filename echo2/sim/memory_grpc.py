"""gRPC calls over virtual wires: real messages, serialised and parsed, into unmodified servicers.

Guarantees: those of `Net`, with gRPC's errors, codes and behaviour: a call on a broken wire ends with UNAVAILABLE; a handler
whose caller is gone is cancelled; a write on a call that has ended raises InvalidStateError; `write` waits while the other
side does not read or the link has a backlog. Leaves to others: handshakes (memory_net), when wires break (wires).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    from echo2.sim.wires import End

WINDOW_BYTES = 2 << 20
"""Flow-control window of one direction of a call: most bytes in flight or unread."""
LINK_BACKLOG_S = 0.3
"""Longest backlog of a connection at its sender; beyond it, `write` waits."""
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_AS_IS: Callable[[bytes], bytes] = lambda data: data  # noqa: E731


class Half:
    """One direction of a call, with the bytes that the receiver has not read yet."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.room = asyncio.Event()
        self.room.set()

    def took(self, size: int) -> None:
        self.unread_bytes += size
        if self.unread_bytes >= WINDOW_BYTES:
            self.room.clear()

    def read(self, size: int) -> None:
        self.unread_bytes -= size
        if self.unread_bytes < WINDOW_BYTES:
            self.room.set()


class CallStream:
    """One side of one call. Frames: (number, kind, payload); kinds: open, message, half, end, reset."""

    def __init__(self, link: Link, number: int, method: str, mine: Half, theirs: Half) -> None:
        self.link, self.number, self.method, self.mine, self.theirs = link, number, method, mine, theirs
        self.inbox: deque[bytes] = deque()
        self.is_half_closed = False
        self.changed = asyncio.Event()
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.on_end: Callable[[grpc.StatusCode, str], None] = lambda code, details: None

    def arrive(self, kind: str, payload: Any) -> None:
        match kind:
            case "message":
                self.inbox.append(payload)
            case "half":
                self.is_half_closed = True
            case "end":
                self.finish(*payload)
            case "reset":
                self.finish(grpc.StatusCode.CANCELLED, "cancelled by the other side")
        self.changed.set()

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        if self.ended is None:
            self.ended = (code, details)
            self.link.streams.pop(self.number, None)
            self.changed.set()
            self.mine.room.set()
            self.on_end(code, details)

    async def send(self, data: bytes) -> None:
        """Sends a message once there is room. Returns without sending if the call ends."""
        while self.ended is None:
            behind_s = self.link.behind_s
            if behind_s > LINK_BACKLOG_S:
                # A shorter sleep could be lost to rounding, and virtual time would stand still.
                await asyncio.sleep(max(1e-4, behind_s - LINK_BACKLOG_S))
            elif not self.mine.room.is_set():
                await self.mine.room.wait()
            else:
                break
        if self.ended is None:
            for said in self.link.said(self.method, data):
                self.mine.took(len(said))
                self.link.send(self.number, "message", said, len(said))

    async def receive(self) -> bytes | None:
        """The next message; None once no more will come (see `ended`)."""
        while True:
            while not self.inbox:
                if self.is_half_closed or self.ended is not None:
                    return None
                self.changed.clear()
                await self.changed.wait()
            data = self.inbox.popleft()
            self.theirs.read(len(data))
            if self.link.is_heard(self.method, data):
                return data


class Link:
    """One side of a wire, with its calls."""

    def __init__(
        self, end: End, on_open: Callable[[CallStream, str], None] | None, on_closed: Callable[[str], None]
    ) -> None:
        self._end, self._on_open, self._on_closed = end, on_open, on_closed
        self.streams: dict[int, CallStream] = {}
        self._next = 0
        end.on_frame = self._frame
        end.on_closed = self._closed

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    @property
    def behind_s(self) -> float:
        return self._end.wire.wires.backlog_s(self._end)

    def open(self, method: str) -> CallStream:
        self._next += 1
        there, back = Half(), Half()
        stream = self.streams[self._next] = CallStream(self, self._next, method, there, back)
        self.send(self._next, "open", (method, there, back), len(method) + 60)
        return stream

    def send(self, number: int, kind: str, payload: Any, size: int = 10) -> None:
        self._end.send((number, kind, payload), size)

    def said(self, method: str, data: bytes) -> Sequence[bytes]:
        """The messages to send instead of `data`; an honest machine sends just `data`."""
        message_filter = self._end.process.machine.message_filter
        return (data,) if message_filter is None else message_filter.says(method, self._end.side, data)

    def is_heard(self, method: str, data: bytes) -> bool:
        """Whether the daemon receives an arrived message."""
        message_filter = self._end.process.machine.message_filter
        return message_filter is None or message_filter.hears(method, self._end.side, data)

    def close(self, reason: str = "closed") -> None:
        self._end.close(reason)

    def _frame(self, frame: Any) -> None:
        number, kind, payload = frame
        if kind == "open":
            assert self._on_open is not None, "only a server is called"
            method, there, back = payload
            stream = self.streams[number] = CallStream(self, number, method, back, there)
            self._on_open(stream, method)
        elif (known := self.streams.get(number)) is not None:
            known.arrive(kind, payload)

    def _closed(self, reason: str) -> None:
        for stream in list(self.streams.values()):
            stream.finish(grpc.StatusCode.UNAVAILABLE, reason)
        self._on_closed(reason)


# ---- the caller's side


class MemoryCall:
    """What a multicallable returns: a stream, or an awaitable for the single reply."""

    def __init__(self, channel: Any, method: str, encode: Any, decode: Any, timeout_s: float | None) -> None:
        self._encode, self._decode, self._channel = encode or _AS_IS, decode or _AS_IS, channel
        self._stream: CallStream | None = None
        self._is_cancelled = self._said_all = False
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[grpc.StatusCode, str]] = self._loop.create_future()
        self._opening = self._loop.create_task(self._open(method))
        self._saying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            late = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = self._loop.call_later(timeout_s, self._reset, *late)
        channel.calls[self] = None

    async def _open(self, method: str) -> None:
        try:
            link = await self._channel.ready_link()
        except grpc.aio.AioRpcError as error:
            self._end(error.code(), error.details() or "")
            return
        if not self.done():
            self._stream = link.open(method)
            self._stream.on_end = self._end

    async def _opened(self) -> None:
        if not self._opening.done():
            await asyncio.wait((self._opening,))

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done():
            self._over.set_result((code, details))
            self._channel.calls.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()

    def _reset(self, code: grpc.StatusCode, details: str) -> None:
        if self._stream is not None:
            self._stream.link.send(self._stream.number, "reset", None)
            self._stream.finish(code, details)
        else:
            self._opening.cancel()
            self._end(code, details)

    def cancel(self) -> bool:
        if self.done():
            return False
        self._is_cancelled = True
        self._reset(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        if self._saying is not None:
            self._saying.cancel()
        return True

    def done(self) -> bool:
        return self._over.done()

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._over))[0]

    def _check(self) -> None:
        """Raises what the call ended with, unless it is well or under way."""
        if self.done() and self._over.result()[0] is not grpc.StatusCode.OK:
            if self._is_cancelled:
                raise asyncio.CancelledError
            raise rpc_error(*self._over.result())

    async def write(self, message: Any) -> None:
        if self.done() or self._said_all:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._opened()
        if self._stream is not None and not self.done():
            await self._stream.send(self._encode(message))
        self._check()

    async def done_writing(self) -> None:
        await self._opened()
        if self._stream is not None and not self.done() and not self._said_all:
            self._said_all = True
            self._stream.link.send(self._stream.number, "half", None)

    async def read(self) -> Any:
        await self._opened()
        data = await self._stream.receive() if self._stream is not None else None
        if data is not None:
            return self._decode(data)
        await asyncio.shield(self._over)
        self._check()
        return EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            reply = await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if reply is EOF:
            raise rpc_error(grpc.StatusCode.INTERNAL, "no answer")
        await asyncio.shield(self._over)
        self._check()
        return reply

    def say(self, messages: Any) -> None:
        """Writes all messages of an async iterator, or one message, then half-closes."""

        async def work() -> None:
            try:
                if hasattr(messages, "__aiter__"):
                    async for message in messages:
                        await self.write(message)
                else:
                    await self.write(messages)
                await self.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the reader gets the error

        self._saying = self._loop.create_task(work())


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details, debug_error_string="")


# ---- the servicer's side


class Aborted(grpc.aio.AbortError):
    """Raised in a servicer by `abort`."""


class MemoryContext:
    """The servicer context of a call."""

    def __init__(self, stream: CallStream, encode: Any, decode: Any, peer: str, certificate_pem: bytes | None) -> None:
        self._stream, self._encode, self._decode = stream, encode or _AS_IS, decode or _AS_IS
        self._peer, self._certificate_pem = peer, certificate_pem

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate_pem]} if self._certificate_pem is not None else {}

    def done(self) -> bool:
        return self._stream.ended is not None

    async def read(self) -> Any:
        data = await self._stream.receive()
        return EOF if data is None else self._decode(data)

    async def write(self, message: Any) -> None:
        if self._stream.ended is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._stream.send(self._encode(message))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.end(code, details)
        raise Aborted("Locally aborted.")

    def end(self, code: grpc.StatusCode, details: str) -> None:
        if self._stream.ended is None:
            self._stream.link.send(self._stream.number, "end", (code, details), 20 + len(details))
            self._stream.finish(code, details)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message


async def serve_call(handler: Any, context: MemoryContext, told: Callable[[BaseException], None]) -> None:
    """Runs a servicer's method of any of the four kinds, coroutine or generator. Reports an unexpected error to `told`."""
    try:
        request: Any = context.requests() if handler.request_streaming else await context.read()
        if request is EOF:
            return
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        answer = serve(request, context)
        if hasattr(answer, "__aiter__"):
            async for message in answer:
                await context.write(message)
        else:
            reply = await answer
            if not handler.response_streaming:
                await context.write(reply)
        context.end(grpc.StatusCode.OK, "")
    except Aborted:
        pass
    except asyncio.CancelledError:
        context.end(grpc.StatusCode.CANCELLED, "cancelled")
        raise
    except Exception as error:  # noqa: BLE001  (as in gRPC: the caller gets the error, the server continues)
        if not context.done():
            told(error)
        context.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
