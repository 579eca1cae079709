"""Limits the harm of a message to the end of the call or stream that it came on.

Guarantees: an unexpected exception while handling a peer's message ends that peer's call and is logged once with the
peer's name (again after QUIET_S, with the count of those not logged); bytes that are not a message end their call with
INVALID_ARGUMENT and no traceback; a caller that leaves before its answer is not an error.

Every server is guarded this way; dialled streams record unexpected errors with the same `Mishaps`. Leaves to others:
expected errors (`EchoError`), which have answers of their own.
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
    """Logs unexpected exceptions, rate-limited so that no peer can fill the disk with them."""

    def __init__(self, log: logging.Logger = _log) -> None:
        self._log = log
        self.count = 0
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def note(self, what: str, whose: str, error: BaseException) -> None:
        """Records that `what` was ended by `error`, caused by a message of `whose`."""
        self.count += 1
        key, now = (whose, type(error).__name__), monotonic()
        at, unsaid = self._seen.pop(key, (float("-inf"), 0))
        if now - at < QUIET_S:
            self._seen[key] = (at, unsaid + 1)
            return
        self._seen[key] = (now, 0)
        while len(self._seen) > KEYS_MAX:
            self._seen.popitem(last=False)
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        self._log.error("%s of %s ended by an unforeseen error%s", what, whose, more, exc_info=error)


class Refusals:
    """Logs at most five warnings about peers a second; the next one says how many were dropped."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._at, self._unsaid = float("-inf"), 0

    def warn(self, text: str, *arguments: object) -> None:
        """Like `Logger.warning`."""
        now = monotonic()
        if now - self._at < REFUSALS_QUIET_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more not logged)" if self._unsaid else ""
        self._at, self._unsaid = now, 0
        self._log.warning(text + "%s", *arguments, more)


class FairShare:
    """Limits one peer to SHARE of a loop's time, plus a burst of BURST_S; beyond that, it is read more slowly."""

    SHARE, BURST_S, PAUSE_MAX_S = 0.2, 0.1, 1.0

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._at = float("-inf")

    def pause_s(self, worked_s: float, now: float) -> float:
        """Seconds to wait before reading the peer's next message, after its last one took `worked_s` to handle."""
        passed_s = min(self.BURST_S / self.SHARE, now - self._at)
        self._owed_s = max(0.0, self._owed_s - passed_s * self.SHARE) + worked_s
        self._at = now
        return min(self.PAUSE_MAX_S, max(0.0, self._owed_s - self.BURST_S) / self.SHARE)


class FairShares:
    """The shares of all peers. They survive the end of a stream: a new stream does not bring a new share."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, FairShare] = OrderedDict()

    def of(self, peer: str) -> FairShare:
        """The peer's share; the PEERS_MAX most recently used ones are remembered."""
        share = self._by_peer.pop(peer, None) or FairShare()
        self._by_peer[peer] = share
        while len(self._by_peer) > PEERS_MAX:
            self._by_peer.popitem(last=False)
        return share


class Pace:
    """Limits the rate of a caller's calls: BURST at once, then PER_S a second; further calls queue."""

    PER_S, BURST, WAIT_MAX_S = 20.0, 200, 5.0

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, now: float) -> float:
        """Seconds that the next call must wait. Above WAIT_MAX_S, refuse it after WAIT_MAX_S; it then uses up no turn."""
        level, at = self._levels.pop(caller, (float(self.BURST), now))
        level = min(float(self.BURST), level + (now - at) * self.PER_S)
        wait_s = max(0.0, 1.0 - level) / self.PER_S
        self._levels[caller] = (level - 1.0 if wait_s <= self.WAIT_MAX_S else level, now)
        while len(self._levels) > PEERS_MAX:
            self._levels.popitem(last=False)
        return wait_s


MISHAPS = Mishaps()
"""The mishaps of this process."""


@contextmanager
def noting(what: str, whose: str = "this process") -> Iterator[None]:
    """Wraps one iteration of a loop that serves all peers: an unexpected exception is recorded, and the loop goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, whose, error)


@contextmanager
def handling(what: str, whose: str) -> Iterator[None]:
    """Wraps handling of a message of `whose`: an unexpected exception is recorded and becomes a MalformedMessage."""
    try:
        yield
    except (EchoError, grpc.aio.AbortError, grpc.aio.AioRpcError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001
        MISHAPS.note(what, whose, error)
        raise MalformedMessage(f"{whose}: expected a message that can be handled, got one that cannot") from None


class _Unreadable:
    """Stands in for a message whose bytes could not be parsed."""

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
    """Wraps every handler of a server."""

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
    """Ends the call with a status for the caller. A caller that left meanwhile counts as having cancelled."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    try:
        if isinstance(error, MalformedMessage):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:2000])
        if not isinstance(error, grpc.aio.InternalError):
            MISHAPS.note(f"a call of {method}", _name_of(context), error)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}; see the server's log")
    except grpc.aio.InternalError as gone:
        error = gone
    _log.debug("a call of %s ended before its answer: %s", method, error)
    raise asyncio.CancelledError
