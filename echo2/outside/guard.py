"""What a message may bring about at worst: the end of the call or stream that it came on.

Guarantees: an exception that nobody foresaw, in handling what a peer sent, ends that peer's call and is logged once with the
peer's name (again after QUIET_S, with the count of those not logged); bytes that are no message end their call with
INVALID_ARGUMENT and no traceback; a caller that goes before its answer is no error.

Every server is guarded so; streams that are dialled note their mishaps
by the same `Mishaps`. Leaves to others: errors that are foreseen (`EchoError`), which have answers of their own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from echo2.base.errors import EchoError, MalformedMessage
from echo2.outside import monotonic

QUIET_S = 60.0
KEYS_MAX = 1024
REFUSALS_QUIET_S = 0.2
PEERS_MAX = 16_384
_log = logging.getLogger("echo2.guard")


class Mishaps:
    """Exceptions that nobody foresaw, logged seldom enough that no peer fills a disk by them."""

    def __init__(self, log: logging.Logger = _log) -> None:
        self._log = log
        self.count = 0
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def note(self, what: str, whose: str, error: BaseException) -> None:
        """`what` ended by `error`, brought about by a message of `whose`."""
        self.count += 1
        key, now = (whose, type(error).__name__), monotonic()
        at, unsaid = self._seen.pop(key, (float("-inf"), 0))
        if now - at < QUIET_S:
            self._seen[key] = (at, unsaid + 1)
            return
        self._seen[key] = (now, 0)
        while len(self._seen) > KEYS_MAX:
            self._seen.popitem(last=False)
        more = f" ({unsaid} more since it was last said)" if unsaid else ""
        self._log.error("%s of %s ended by an unforeseen error%s", what, whose, more, exc_info=error)


class Refusals:
    """Warnings about peers, of which five a second at most are logged; the next says how many were not."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._at, self._unsaid = float("-inf"), 0

    def warn(self, text: str, *arguments: object) -> None:
        """As `Logger.warning`."""
        now = monotonic()
        if now - self._at < REFUSALS_QUIET_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more not logged)" if self._unsaid else ""
        self._at, self._unsaid = now, 0
        self._log.warning(text + "%s", *arguments, more)


class FairShare:
    """How much of a loop's time what one peer sends may take, beside BURST_S of it at once; beyond, it is read more slowly."""

    SHARE, BURST_S, PAUSE_MAX_S = 0.2, 0.1, 1.0

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._at = float("-inf")

    def pause_s(self, worked_s: float, now: float) -> float:
        """`worked_s` went into its last message: for how long it is to wait for the next to be read."""
        passed_s = min(self.BURST_S / self.SHARE, now - self._at)
        self._owed_s = max(0.0, self._owed_s - passed_s * self.SHARE) + worked_s
        self._at = now
        return min(self.PAUSE_MAX_S, max(0.0, self._owed_s - self.BURST_S) / self.SHARE)


class FairShares:
    """Of each peer, whether or not it has a stream open at the moment: a new stream is no new share."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, FairShare] = OrderedDict()

    def of(self, peer: str) -> FairShare:
        """The PEERS_MAX that were asked for last are remembered."""
        share = self._by_peer.pop(peer, None) or FairShare()
        self._by_peer[peer] = share
        while len(self._by_peer) > PEERS_MAX:
            self._by_peer.popitem(last=False)
        return share


class Pace:
    """How long a caller's next call waits: BURST at once, then PER_S a second, each call behind those that wait already."""

    PER_S, BURST, WAIT_MAX_S = 20.0, 200, 5.0

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, now: float) -> float:
        """Seconds; above WAIT_MAX_S the call is to be refused after so long, and takes nobody's turn."""
        level, at = self._levels.pop(caller, (float(self.BURST), now))
        level = min(float(self.BURST), level + (now - at) * self.PER_S)
        wait_s = max(0.0, 1.0 - level) / self.PER_S
        self._levels[caller] = (level - 1.0 if wait_s <= self.WAIT_MAX_S else level, now)
        while len(self._levels) > PEERS_MAX:
            self._levels.popitem(last=False)
        return wait_s


MISHAPS = Mishaps()
"""Of this process."""


@contextmanager
def noting(what: str, whose: str = "this process") -> Iterator[None]:
    """Around one turn of a loop that serves all: what nobody foresaw is noted, and the loop goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, whose, error)


@contextmanager
def handling(what: str, whose: str) -> Iterator[None]:
    """Around handling what `whose` sent: what nobody foresaw is noted, and is a MalformedMessage of its sender's from here on."""
    try:
        yield
    except (EchoError, grpc.aio.AbortError, grpc.aio.AioRpcError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, whose, error)
        raise MalformedMessage(f"{whose}: expected a message that can be handled, got one that cannot") from None


class _Unreadable:
    """In place of a message: bytes that are none."""

    def __init__(self, error: DecodeError) -> None:
        self.error = MalformedMessage(f"expected a message of the protocol, got bytes that are none: {error}")


def _reader_of(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Unreadable(error)

    return read


async def _readable(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        if isinstance(message, _Unreadable):
            raise message.error
        yield message


def _name_of(context: Any) -> str:
    names = context.auth_context().get("x509_subject_alternative_name", [])
    return f"{bytes(names[0]).decode(errors='replace')} at {context.peer()}" if names else str(context.peer())


class HandlerGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Around every handler of a server."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        kind = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")[
            2 * handler.request_streaming + handler.response_streaming
        ]
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        parse = handler.request_deserializer
        return make(
            _guarded(getattr(handler, kind), details.method, handler.request_streaming),
            request_deserializer=_reader_of(parse) if parse is not None else None,
            response_serializer=handler.response_serializer,
        )


def _guarded(behaviour: Any, method: str, is_stream: bool) -> Any:
    if inspect.isasyncgenfunction(behaviour):

        @functools.wraps(behaviour)
        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async with aclosing(behaviour(_taken(request, is_stream), context)) as answers:
                    async for answer in answers:
                        yield answer
            except Exception as error:  # noqa: BLE001
                await _ended(context, method, error)

        return generate
    if not inspect.iscoroutinefunction(behaviour):
        return behaviour

    @functools.wraps(behaviour)
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(_taken(request, is_stream), context)
        except Exception as error:
            await _ended(context, method, error)
            raise

    return answer


def _taken(request: Any, is_stream: bool) -> Any:
    if is_stream:
        return _readable(request)
    if isinstance(request, _Unreadable):
        raise request.error
    return request


async def _ended(context: Any, method: str, error: Exception) -> None:
    """The caller is told. One that went while it was being answered is as one that cancelled: gRPC has no way to send to it."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    try:
        if isinstance(error, MalformedMessage):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:2000])
        if not isinstance(error, grpc.aio.InternalError):
            MISHAPS.note(f"a call of {method}", _name_of(context), error)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}; see the log of the other side")
    except grpc.aio.InternalError as gone:
        error = gone
    _log.debug("a call of %s ended before its answer: %s", method, error)
    raise asyncio.CancelledError
