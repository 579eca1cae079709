"""A gRPC server that admits callers first, and weighs their messages before parsing them.

Guarantees: messages of a call that is not admitted are never read; a message is parsed only within the limits of its call
(wire/bounds), and within the caller's fair share of the loop's time, whether it turns out to be good or not; the message of a
unary call must arrive within BODY_S; a caller's calls are rate-limited (outside/guard), no matter how they end, and its connection
ends where it goes on and on; at most CALLS_PER_CALLER run at a time; a bad message ends its call with a status and at most five log
lines a second, never with a traceback; an unexpected error ends its call alone, and is logged once in a while (`Mishaps`); a
caller that leaves before its answer is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from echo2.base.clock import Pace
from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage
from echo2.outside import MACHINE, here, monotonic
from echo2.outside.guard import MISHAPS, FairShare, FairShares, Refusals
from echo2.outside.net import Shown
from echo2.trust.ports import DOORS, PortLimits
from echo2.wire.bounds import limits_of, parsed

BODY_S = 20.0  # 16 MiB over a link of 7 Mbit/s; a unary call's message is far smaller
CALLS_PER_CALLER = 64  # more than any role keeps open: a stream, reports, requests
# Of a caller: further calls queue, and wait so long at most.
CALLS_PER_S, CALLS_BURST, CALL_WAIT_S_MAX = 20.0, 200, 5.0
OVER_MAX = 200  # calls beyond the pace, and as many a second as are within it: then the connection is ended
_log = logging.getLogger("echo2.ports")
# How a kind of error travels; any other is told as UNAUTHENTICATED.
_STATUS: dict[type[EchoError], grpc.StatusCode] = {
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
}


class GatedServer:
    """Generated `add_…Servicer_to_server` functions register their calls behind the gate. `admit` names the caller and its
    share of the loop's time, or raises."""

    def __init__(self, limits: PortLimits, admit: Callable[[Any], tuple[str, float]]) -> None:
        self._server: Any = here().net.server(list(limits.options().items()))
        self._limits = limits
        self._ports: list[int] = []
        self._gate = _Gate(admit)  # calls refer to the gate, not to the server, which would then outlive its loop

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        gated = {
            name: self._gate.gated(f"/{service_name}/{name}", handler) for name, handler in method_handlers.items()
        }
        self._server.add_registered_method_handlers(service_name, gated)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Ignored: otherwise generated code would register the same calls again, without the gate."""

    def listen(self, host: str, port: int, certificates: Shown) -> int:
        bound = here().net.listen(self._server, host, port, certificates)
        if here() is MACHINE:  # in the simulator, connections are not sockets of this process
            self._ports.append(bound)
            DOORS.watch(bound, self._limits)
        return bound

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)
        for port in self._ports:
            DOORS.close(port)


class _Gate:
    """Wraps every call of a server."""

    def __init__(self, admit: Callable[[Any], tuple[str, float]]) -> None:
        self._admit = admit
        self._open: Counter[str] = Counter()
        self._pace = Pace(CALLS_PER_S, CALLS_BURST, CALL_WAIT_S_MAX)
        self._over = Pace(CALLS_PER_S, OVER_MAX)
        self._shares = FairShares()
        self._refusals = Refusals(_log)

    async def paced(self, context: Any) -> tuple[str, FairShare]:
        """Admits the caller and waits for its turn; returns its name and share. LimitExceeded if it calls too often."""
        caller, share = self._admit(context)
        now = monotonic()
        wait_s = self._pace.wait_s(caller, now)
        if wait_s > CALL_WAIT_S_MAX and self._over.wait_s(caller, now) > 0:
            DOORS.offended(context.peer())
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, CALL_WAIT_S_MAX))
        if wait_s > CALL_WAIT_S_MAX:
            raise LimitExceeded(f"{caller}: expected at most {CALLS_PER_S:.0f} calls a second")
        return caller, self._shares.of(caller, share)

    def gated(self, method: str, handler: Any) -> Any:
        """Calls of every kind become streams of unread bytes, and are served once they are admitted."""
        kind: type[Message] = handler.request_deserializer.__self__
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def requests(call: GatedCall) -> Any:
            return call.messages() if handler.request_streaming else await call.only()

        async def answer(_: Any, context: Any) -> Any:
            async with self._entered(context, method, kind) as call:
                return await serve(await requests(call), call)

        async def answers(_: Any, context: Any) -> AsyncIterator[Any]:
            async with self._entered(context, method, kind) as call:
                async with contextlib.aclosing(serve(await requests(call), call)) as replies:
                    async for reply in replies:
                        yield reply

        is_many = handler.unary_stream is not None or inspect.isasyncgenfunction(serve)
        kinds = (grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler)
        return kinds[handler.response_streaming](
            answers if is_many else answer, lambda data: data, handler.response_serializer
        )

    @contextlib.asynccontextmanager
    async def _entered(self, context: Any, method: str, kind: type[Message]) -> AsyncIterator[GatedCall]:
        try:
            caller, share = await self.paced(context)
            if self._open[caller] >= CALLS_PER_CALLER:
                raise LimitExceeded(f"{caller}: expected at most {CALLS_PER_CALLER} calls at a time")
            self._open[caller] += 1
            try:
                call = GatedCall(context, kind, method, caller, share)
                await call.pause(DOORS.charge_s(context.peer()))  # for its connection, and bytes beside messages
                yield call
            finally:
                self._open[caller] -= 1
                if not self._open[caller]:
                    del self._open[caller]
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001
            await self._end(context, method, error)

    async def _end(self, context: Any, method: str, error: Exception) -> None:
        """Ends the call with a status for its caller. If it has left, or this server has stopped, the call counts as cancelled."""
        try:
            match error:
                case grpc.aio.BaseError() if not isinstance(error, grpc.aio.UsageError):
                    raise error
                case TimeoutError():
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected a message within {BODY_S:.0f} s")
                case EchoError():
                    text = f"{type(error).__name__}: {error}"
                    self._refusals.warn("%s refused: %s", method, text)
                    code = _STATUS.get(type(error), grpc.StatusCode.UNAUTHENTICATED)
                    await context.abort(code, text[:2000])
                case _:
                    names = context.auth_context().get("x509_subject_alternative_name", [])
                    peer = " at ".join([*(bytes(name).decode(errors="replace") for name in names[:1]), context.peer()])
                    MISHAPS.note(f"a call of {method}", peer, error)
                    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}; see the server's log")
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as gone:
            _log.debug("a call of %s ended before its answer: %s", method, gone)
            raise asyncio.CancelledError from None


class GatedCall:
    """Wraps gRPC's context of a call; `read` returns messages parsed within their limits. `share`: the caller's, of the loop's
    time, with `charged_s` for the last message, which whoever finds it useful repays."""

    def __init__(self, context: Any, kind: type[Message], method: str, caller: str, share: FairShare) -> None:
        self._context, self._kind, self.share = context, kind, share
        self._limits = limits_of(method)
        self.charged_s = 0.0
        self._whose = f"{method.rpartition('/')[2]} of {caller}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message, or gRPC's EOF. MalformedMessage if the bytes are not a valid message or exceed its limits."""
        data = await self._context.read()
        if not isinstance(data, bytes):
            return data
        DOORS.took(self._context.peer(), len(data))
        begun = monotonic()
        try:
            return parsed(self._kind, data, self._limits, self._whose)
        except MalformedMessage as error:
            DOORS.refused(len(data))
            error.__traceback__ = None  # its frames hold the data, which would be kept while the caller waits
            raise
        finally:
            del data
            await self._charge(monotonic() - begun)

    async def _charge(self, worked_s: float) -> None:
        """Waits as long as the caller's share requires after `worked_s` seconds for its last message."""
        self.charged_s = worked_s + DOORS.charge_s(self._context.peer())
        if (pause_s := self.share.pause_s(self.charged_s, monotonic())) > 0:
            await asyncio.sleep(pause_s)

    async def pause(self, worked_s: float) -> None:
        """After `worked_s` seconds of work for the caller, as long as its share requires; always yields to other tasks."""
        await asyncio.sleep(self.share.pause_s(worked_s, monotonic()))

    async def only(self) -> Any:
        async with asyncio.timeout(BODY_S):
            message = await self.read()
        if not isinstance(message, Message):
            raise MalformedMessage(f"{self._whose}: expected a message, got none")
        return message

    async def messages(self) -> AsyncIterator[Any]:
        while isinstance(message := await self.read(), Message):
            yield message
