"""A node's stream to the coordinator, for worker and learner alike.

    away ──connected──▶ greeting ──welcome──▶ open ──stream ends──▶ away (after a pause)
     ▲                     │ refusal              │ refusal
     └──no answer──────────┴──────▶ refused ◀─────┘      `run` ends with the error that the refusal names

Guarantees: the stream is kept for ever, with jittered pauses that start over once a stream outlived the pause before it; a
coordinator that was not met `FAILURES_BEFORE_SEARCH` times in a row is looked for anew. Each stream begins with a hello, and
what is said after the hello was made is queued behind it, however long the opening takes: so nothing falls between what the
hello could say and what the stream carries. A beat follows the welcome and then every interval. A refusal that a retry may
cure (`_TEMPORARY`) is a stream that ended; any other ends the session. Waits for a connection, orders, the next beat.
Leaves to others: what is said and what orders mean (worker/runtime/session, learner/runtime/session).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from echo2.base import errors
from echo2.base.errors import EchoError, MalformedMessage, ProtocolError
from echo2.control.backoff import Backoff
from echo2.control.waits import Waits
from echo2.outside import monotonic
from echo2.outside.guard import handling
from echo2.trust.runtime.enrolling import FAILURES_BEFORE_SEARCH
from echo2.trust.runtime.tls import Credentials, error_of, open_channel
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2

OUTBOX_MESSAGES_MAX = 8192
"""Said and not yet taken by the stream; a stream that falls this far behind is opened anew."""
CONNECT_S = 20.0
WELCOME_S = 20.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.01, 3600.0
_TEMPORARY = (errors.Unreachable, errors.LimitExceeded, MalformedMessage)
_WHOSE = "the coordinator"
MESSAGE_BYTES_MAX = 64 << 20
"""A learner's hello holds every open group."""
_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
_log = logging.getLogger("echo2.control")

Said = TypeVar("Said")


class Welcome(Protocol):
    """What both kinds of welcome say."""

    @property
    def run_id(self) -> str: ...

    @property
    def heartbeat_interval_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Party(Generic[Said]):
    """What a role says on its stream, and what it does with what it hears."""

    dial: Callable[[grpc.aio.Channel], Any]  # begins the role's call
    hello: Callable[[], Said]
    beat: Callable[[], Said]
    welcomed: Callable[[Any], None]
    ordered: Callable[[Any], None]
    lost: Callable[[], None] = lambda: None
    find: Callable[[], Awaitable[None]] | None = None  # has the credentials name the address of the coordinator now


def refusal_error(refusal: coordinator_pb2.Refusal) -> EchoError:
    """The exception that a refusal names; ProtocolError where the name is none of ours."""
    kind = getattr(errors, refusal.code, None)
    if not (isinstance(kind, type) and issubclass(kind, EchoError)):
        return ProtocolError(f"the coordinator refused this node: {refusal.code}: {refusal.message[:2000]}")
    if issubclass(kind, errors.Dismissed):
        return kind(refusal.message[:2000])
    return kind(f"the coordinator refused this node: {refusal.message[:2000]}")


class _Outbox(Generic[Said]):
    """Of one stream, from its hello to its end."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Said | None] = asyncio.Queue(OUTBOX_MESSAGES_MAX)  # None: nothing follows
        self.is_full, self.is_over = asyncio.Event(), asyncio.Event()

    def put(self, message: Said | None) -> None:
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.is_full.set()


class ControlSession(Generic[Said]):
    """One per node; `run` is its loop. What is said while no stream is open goes nowhere: the next hello makes up for it."""

    def __init__(self, credentials: Credentials, waits: Waits, backoff: Backoff, connect_s: float = CONNECT_S) -> None:
        self.credentials = credentials
        self.is_connected = False
        self._waits = waits
        self._backoff = backoff
        self._connect_s = connect_s
        self._failures = 0  # in a row
        self._outbox: _Outbox[Said] | None = None
        self._is_leaving = False

    def send(self, message: Said) -> None:
        """Queues a message behind the hello and what was said since."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def leave(self, farewell: Said, within_s: float) -> None:
        """Says good-bye behind everything queued, and `run` ends with the stream; gives up after `within_s`.

        That a write returned does not say that it was read: only the coordinator's end of the stream does.
        """
        outbox = self._outbox
        if outbox is None:
            return
        self._is_leaving = True
        outbox.put(farewell)
        outbox.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(outbox.is_over.wait(), within_s)

    async def run(self, party: Party[Said]) -> None:
        """Keeps the stream until it is refused or cancelled."""
        pause_s = 0.0
        while True:
            address, begun = self.credentials.coordinator_address, monotonic()
            whose = f"{_WHOSE} at {address}"
            self._waits.begin("coordinator", f"a connection to {whose}")
            try:
                await self._connect(address, party)
                if not self._is_leaving:
                    _log.warning("%s closed the stream", whose)
            except grpc.aio.AioRpcError as error:
                refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # what was said is at fault, not who said it
                self._survive(MalformedMessage(f"{whose}: {error.details()}") if refused else error_of(error, whose))
            except EchoError as error:
                self._survive(error)
            finally:
                if self._outbox is not None:
                    self._outbox.is_over.set()
                self._outbox = None
                was_welcome, self.is_connected = self.is_connected, False
                if was_welcome:
                    party.lost()
            if self._is_leaving:
                return
            if was_welcome and monotonic() - begun > pause_s:
                self._backoff.succeeded()
            self._waits.begin("coordinator", f"a connection to {whose}")
            pause_s = self._backoff.next_pause_s()
            await asyncio.sleep(pause_s)
            self._failures = 1 if was_welcome else self._failures + 1
            if party.find is not None and self._failures % FAILURES_BEFORE_SEARCH == 0:
                await party.find()

    def _survive(self, error: EchoError) -> None:
        """Raises what no other stream would cure."""
        if not isinstance(error, _TEMPORARY):
            raise error from None
        _log.log(logging.INFO if isinstance(error, errors.Unreachable) else logging.WARNING, "%s", error)

    async def _connect(self, address: str, party: Party[Said]) -> None:
        """One connection, from the attempt to its end."""
        async with open_channel(address, self.credentials.coordinator_peer_id, self.credentials, _OPTIONS) as channel:
            call = party.dial(channel)
            try:
                # No await between these two: what the hello does not say any more must find the outbox.
                hello, outbox = party.hello(), _Outbox[Said]()
                self._outbox = outbox
                await self._greet(call, hello, address)
                interval_s = await self._welcome(call, party)
                await self._talk(call, party, outbox, interval_s)
            finally:
                call.cancel()

    async def _greet(self, call: Any, hello: Said, address: str) -> None:
        """Returns once there is a connection that has taken the hello."""
        try:
            await asyncio.wait_for(_write(call, hello), self._connect_s)
        except TimeoutError:
            raise errors.Unreachable(f"{_WHOSE} at {address}: no connection within {self._connect_s:.0f} s") from None

    async def _welcome(self, call: Any, party: Party[Said]) -> float:
        """Waits for the answer to the hello; returns the heartbeat interval."""
        try:
            order = await asyncio.wait_for(call.read(), WELCOME_S)
        except TimeoutError:
            raise errors.Unreachable(f"{_WHOSE}: no answer to the hello within {WELCOME_S:.0f} s") from None
        kind = _kind_of(order)
        if kind is None:
            raise errors.Unreachable(f"{_WHOSE} closed the stream without an answer to the hello")
        if kind != "welcome":
            raise MalformedMessage(f"{_WHOSE}: expected a welcome, got {kind}")
        welcome: Welcome = order.welcome
        check(order.welcome, _WHOSE)
        if welcome.run_id != self.credentials.run_id:
            raise errors.StateError(
                f"{_WHOSE}: expected run {self.credentials.run_id}, got {welcome.run_id}; "
                "remove this node's folder to join another run"
            )
        check_interval("heartbeat_interval_s", welcome.heartbeat_interval_s)
        self._waits.end("coordinator")
        _log.info("connected to the coordinator of run %s", welcome.run_id)
        self.is_connected = True
        with handling("a welcome", _WHOSE):
            party.welcomed(welcome)
        return welcome.heartbeat_interval_s

    async def _talk(self, call: Any, party: Party[Said], outbox: _Outbox[Said], interval_s: float) -> None:
        """Until either side ends the stream."""
        parts = [
            asyncio.create_task(_write_all(call, outbox)),
            asyncio.create_task(_read_all(call, party)),
            asyncio.create_task(_beat(party, outbox, interval_s)),
            asyncio.create_task(_overflow(outbox)),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)


def check_interval(name: str, interval_s: float) -> None:
    """Of a welcome: a coordinator may neither have us spin nor fall silent."""
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise MalformedMessage(
            f"{name} of the coordinator's welcome: expected {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f}, got {interval_s}"
        )


def _kind_of(order: Any) -> str | None:
    """Which order it is; None at the end of the stream. Raises what a refusal names."""
    if not hasattr(order, "WhichOneof"):
        return None
    kind = str(order.WhichOneof("kind"))
    if kind == "refusal":
        raise refusal_error(order.refusal)
    return kind


async def _write_all(call: Any, outbox: _Outbox[Said]) -> None:
    while (message := await outbox.messages.get()) is not None:
        await _write(call, message)
    await call.done_writing()
    await asyncio.Event().wait()  # the coordinator ends the stream once it has read all of it


async def _write(call: Any, message: object) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # what gRPC raises for a stream that ended a moment ago
        raise errors.Unreachable(f"{_WHOSE}: the stream ended while something was said on it") from None


async def _read_all(call: Any, party: Party[Said]) -> None:
    while True:
        order = await call.read()
        if _kind_of(order) is None:
            return
        with handling("an order", _WHOSE):
            check(order, _WHOSE)
            party.ordered(order)


async def _beat(party: Party[Said], outbox: _Outbox[Said], interval_s: float) -> None:
    while True:
        outbox.put(party.beat())
        await asyncio.sleep(interval_s)


async def _overflow(outbox: _Outbox[Said]) -> None:
    await outbox.is_full.wait()
    raise errors.LimitExceeded(f"{_WHOSE} takes no messages: {OUTBOX_MESSAGES_MAX} wait; the stream is opened anew")
