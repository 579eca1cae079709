"""gRPC calls over virtual wires: real messages, serialised and parsed, into unmodified servicers.

Guarantees: those of `Net`, with gRPC's errors, codes and behaviour: a call on a broken wire ends with UNAVAILABLE; a handler
whose caller is gone is cancelled; a write on a call that has ended raises InvalidStateError; `write` waits while the other
side does not read or the link has a backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    from echo2.sim.wires import End

WINDOW_BYTES = 2 << 20  # flow-control window of one direction of a call: most bytes in flight or unread
LINK_BACKLOG_S = 0.3  # longest backlog of a connection at its sender; beyond it, `write` waits
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_AS_IS: Callable[[bytes], bytes] = lambda data: data  # noqa: E731


class CallStream:
    """One side of one call, and `other`, the other one. Frames: (number, kind, payload); kinds: open, message, half, end, reset."""

    def __init__(self, link: Link, number: int, method: str, other: CallStream | None = None) -> None:
        self.link, self.number, self.method, self.other = link, number, method, other
        self.unread_bytes = 0  # of what was sent here
        self.inbox: deque[bytes] = deque()
        self.is_half_closed = False
        self.changed, self.room = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.on_end: Callable[[grpc.StatusCode, str], None] = lambda code, details: None
        link.streams[number] = self

    def tell(self, kind: str, payload: Any = None, size: int = 10) -> None:
        self.link.end.send((self.number, kind, payload), size)

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
            self.room.set()
            self.on_end(code, details)

    async def send(self, data: bytes) -> None:
        """Sends a message once there is room. Returns without sending if the call ends."""
        end = self.link.end
        while self.ended is None:
            behind_s = end.wire.wires.backlog_s(end)
            if behind_s > LINK_BACKLOG_S:
                # A shorter sleep could be lost to rounding, and virtual time would stand still.
                await asyncio.sleep(max(1e-4, behind_s - LINK_BACKLOG_S))
            elif not self.room.is_set():
                await self.room.wait()
            else:
                break
        if self.ended is None:
            message_filter = end.process.machine.message_filter  # of a machine that is dishonest
            for message in (data,) if message_filter is None else message_filter.says(self.method, end.side, data):
                self._account(len(message))
                self.tell("message", message, len(message))

    async def receive(self) -> bytes | None:
        """The next message that the daemon is to hear; None once no more will come (see `ended`)."""
        end = self.link.end
        while True:
            while not self.inbox:
                if self.is_half_closed or self.ended is not None:
                    return None
                self.changed.clear()
                await self.changed.wait()
            data = self.inbox.popleft()
            assert self.other is not None, "it has said something"
            self.other._account(-len(data))
            message_filter = end.process.machine.message_filter
            if message_filter is None or message_filter.hears(self.method, end.side, data):
                return data

    def _account(self, size: int) -> None:
        self.unread_bytes += size
        (self.room.set if self.unread_bytes < WINDOW_BYTES else self.room.clear)()


class Link:
    """One side of a wire, with its calls. `on_open`: of a server."""

    def __init__(
        self, end: End, on_open: Callable[[CallStream], None] | None, on_closed: Callable[[str], None]
    ) -> None:
        self.end, self._on_open, self._on_closed = end, on_open, on_closed
        self.streams: dict[int, CallStream] = {}
        self._count = 0
        end.on_frame, end.on_closed = self._frame, self._closed

    def open(self, method: str) -> CallStream:
        self._count += 1
        stream = CallStream(self, self._count, method)
        stream.tell("open", (method, stream), len(method) + 60)
        return stream

    def _frame(self, frame: Any) -> None:
        number, kind, payload = frame
        if kind == "open":
            assert self._on_open is not None, "only a server is called"
            method, caller = payload
            caller.other = stream = CallStream(self, number, method, caller)
            self._on_open(stream)
        elif (known := self.streams.get(number)) is not None:
            known.arrive(kind, payload)

    def _closed(self, reason: str) -> None:
        for stream in list(self.streams.values()):
            stream.finish(grpc.StatusCode.UNAVAILABLE, reason)
        self._on_closed(reason)


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

    async def _opened(self) -> CallStream | None:
        if not self._opening.done():
            await asyncio.wait((self._opening,))
        return self._stream

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done():
            self._over.set_result((code, details))
            self._channel.calls.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()

    def _reset(self, code: grpc.StatusCode, details: str) -> None:
        if self._stream is not None:
            self._stream.tell("reset")
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
            raise _finished()
        stream = await self._opened()
        if stream is not None and not self.done():
            await stream.send(self._encode(message))
        self._check()

    async def done_writing(self) -> None:
        stream = await self._opened()
        if stream is not None and not self.done() and not self._said_all:
            self._said_all = True
            stream.tell("half")

    async def read(self) -> Any:
        stream = await self._opened()
        data = await stream.receive() if stream is not None else None
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
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error
                if hasattr(messages, "__aiter__"):
                    async for message in messages:
                        await self.write(message)
                else:
                    await self.write(messages)
                await self.done_writing()

        self._saying = self._loop.create_task(work())


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details, debug_error_string="")


def _finished() -> asyncio.InvalidStateError:
    return asyncio.InvalidStateError("RPC already finished.")


class Aborted(grpc.aio.AbortError):
    """Raised in a servicer by `abort`."""


class MemoryContext:
    """The servicer context of a call; `serve` runs the servicer's method."""

    def __init__(self, stream: CallStream, handler: Any, peer: str, certificate_pem: bytes | None) -> None:
        self._stream, self._handler, self._peer, self._certificate_pem = stream, handler, peer, certificate_pem

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate_pem]} if self._certificate_pem is not None else {}

    def done(self) -> bool:
        return self._stream.ended is not None

    async def read(self) -> Any:
        data = await self._stream.receive()
        return EOF if data is None else (self._handler.request_deserializer or _AS_IS)(data)

    async def write(self, message: Any) -> None:
        if self.done():
            raise _finished()
        await self._stream.send((self._handler.response_serializer or _AS_IS)(message))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._end(code, details)
        raise Aborted("Locally aborted.")

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done():
            self._stream.tell("end", (code, details), 20 + len(details))
            self._stream.finish(code, details)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def serve(self, on_error: Callable[[BaseException], None]) -> None:
        """The method may be of any of the four kinds, coroutine or generator. Reports an unexpected error to `on_error`."""
        handler = self._handler
        try:
            request: Any = self._requests() if handler.request_streaming else await self.read()
            if request is EOF:
                return
            method = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
            answer = method(request, self)
            if hasattr(answer, "__aiter__"):
                async for message in answer:
                    await self.write(message)
            else:
                reply = await answer
                if not handler.response_streaming:
                    await self.write(reply)
            self._end(grpc.StatusCode.OK, "")
        except Aborted:
            pass
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "cancelled")
            raise
        except Exception as error:  # noqa: BLE001  (as in gRPC: the caller gets the error, the server continues)
            if not self.done():
                on_error(error)
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
