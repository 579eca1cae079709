"""A gRPC server that admits callers first, and weighs their messages before parsing them.

Guarantees: messages of a call that is not admitted are never read; a message is parsed only within the limits of its call
(wire/weighing); the message of a unary call must arrive within BODY_S; a caller's calls are rate-limited (outside/guard), no matter
how they end, and at most CALLS_PER_CALLER run at a time; a bad message ends its call with a status and at most five log lines a
second, never with a traceback. Leaves to others: connections (doors), what calls do.
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

from echo2.base.errors import EchoError, LimitExceeded, MalformedMessage
from echo2.outside import MACHINE, here, monotonic
from echo2.outside.guard import Pace, Refusals
from echo2.outside.net import Shown
from echo2.trust.runtime.doors import DOORS
from echo2.trust.runtime.port_limits import PortLimits, merged
from echo2.wire.weighing import limits_of, parsed

BODY_S = 20.0
CALLS_PER_CALLER = 64
_log = logging.getLogger("echo2.ports")
_STATUS: dict[type[EchoError], grpc.StatusCode] = {
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
}


class GatedServer:
    """Generated `add_…Servicer_to_server` functions register their calls behind the gate. `admit` names the caller or raises."""

    def __init__(self, limits: PortLimits, admit: Callable[[Any], str]) -> None:
        self._server: Any = here().net.server(merged(limits.options()))
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

    def add_frames(self, service_name: str, handlers: dict[str, Any]) -> None:
        """Registers calls with raw bytes as messages, which their service weighs and counts itself; only the rate is limited."""
        paced = {
            name: handler._replace(stream_stream=self._gate.framed(handler.stream_stream))
            if handler.stream_stream
            else handler
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, paced),))

    def listen(self, host: str, port: int, shown: Shown) -> int:
        """Starts listening (port 0: any); returns the port."""
        bound = here().net.listen(self._server, host, port, shown)
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

    def __init__(self, admit: Callable[[Any], str]) -> None:
        self._admit = admit
        self._open: Counter[str] = Counter()
        self._pace = Pace()
        self._refusals = Refusals(_log)

    async def paced(self, context: Any) -> str:
        """Admits the caller and waits for its turn; returns its name. LimitExceeded if it calls too often."""
        caller = self._admit(context)
        wait_s = self._pace.wait_s(caller, monotonic())
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, Pace.WAIT_MAX_S))
        if wait_s > Pace.WAIT_MAX_S:
            raise LimitExceeded(f"{caller}: expected at most {Pace.PER_S:.0f} calls a second")
        return caller

    @contextlib.contextmanager
    def _admitted(self, caller: str) -> Any:
        if self._open[caller] >= CALLS_PER_CALLER:
            raise LimitExceeded(f"{caller}: expected at most {CALLS_PER_CALLER} calls at a time")
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    def gated(self, method: str, handler: Any) -> Any:
        kind: type[Message] = handler.request_deserializer.__self__
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._one_for_one(handler.unary_unary, method, kind), _as_is, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._many_for_one(handler.unary_stream, method, kind), _as_is, handler.response_serializer
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._streamed(handler.stream_unary, method, kind), _as_is, handler.response_serializer
            )
        serve = handler.stream_stream
        wrap = self._many_for_many if inspect.isasyncgenfunction(serve) else self._streamed
        return grpc.stream_stream_rpc_method_handler(wrap(serve, method, kind), _as_is, handler.response_serializer)

    def framed(self, serve: Callable[[Any, Any], Any]) -> Any:
        async def gated(messages: Any, context: Any) -> None:
            try:
                await self.paced(context)
            except EchoError as error:
                await self._refuse(context, error, "a stream of frames")
            await serve(messages, context)

        return gated

    def _one_for_one(self, serve: Any, method: str, kind: type[Message]) -> Any:
        async def gated(_: Any, context: Any) -> Any:
            async with self._entered(context, method, kind) as entered:
                return await serve(await entered.only(), entered)

        return gated

    def _many_for_one(self, serve: Any, method: str, kind: type[Message]) -> Any:
        async def gated(_: Any, context: Any) -> AsyncIterator[Any]:
            async with self._entered(context, method, kind) as entered:
                async with contextlib.aclosing(serve(await entered.only(), entered)) as answers:
                    async for answer in answers:
                        yield answer

        return gated

    def _many_for_many(self, serve: Any, method: str, kind: type[Message]) -> Any:
        async def gated(_: Any, context: Any) -> AsyncIterator[Any]:
            async with self._entered(context, method, kind) as entered:
                async with contextlib.aclosing(serve(entered.messages(), entered)) as answers:
                    async for answer in answers:
                        yield answer

        return gated

    def _streamed(self, serve: Any, method: str, kind: type[Message]) -> Any:
        async def gated(_: Any, context: Any) -> Any:
            async with self._entered(context, method, kind) as entered:
                return await serve(entered.messages(), entered)

        return gated

    @contextlib.asynccontextmanager
    async def _entered(self, context: Any, method: str, kind: type[Message]) -> AsyncIterator[GatedCall]:
        try:
            with self._admitted(caller := await self.paced(context)):
                yield GatedCall(context, kind, method, caller)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected a message within {BODY_S:.0f} s")
        except EchoError as error:
            await self._refuse(context, error, method)

    async def _refuse(self, context: Any, error: EchoError, what: str) -> None:
        self._refusals.warn("%s refused: %s: %s", what, type(error).__name__, error)
        code = _STATUS.get(type(error), grpc.StatusCode.UNAUTHENTICATED)
        await context.abort(code, f"{type(error).__name__}: {error}"[:2000])


class GatedCall:
    """Wraps gRPC's context of a call; `read` returns messages parsed within their limits."""

    def __init__(self, context: Any, kind: type[Message], method: str, caller: str) -> None:
        self._context, self._kind, self._caller = context, kind, caller
        self._limits = limits_of(method)
        self._whose = f"{method.rpartition('/')[2]} of {caller}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message, or gRPC's EOF. MalformedMessage if the bytes are not a valid message or exceed its limits."""
        data = await self._context.read()
        if not isinstance(data, bytes):
            return data
        DOORS.took(self._context.peer(), len(data))
        return parsed(self._kind, data, self._limits, self._whose)

    async def only(self) -> Any:
        """The message of a unary call."""
        async with asyncio.timeout(BODY_S):
            message = await self.read()
        if not isinstance(message, Message):
            raise MalformedMessage(f"{self._whose}: expected a message, got none")
        return message

    async def messages(self) -> AsyncIterator[Any]:
        """Yields all messages until the caller ends its side."""
        while isinstance(message := await self.read(), Message):
            yield message


def _as_is(data: bytes) -> bytes:
    return data
