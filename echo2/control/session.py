"""A node's stream to the coordinator, for worker and learner alike.

    away ──connected──▶ greeting ──welcome──▶ open ──stream ends──▶ away (after a backoff)
     ▲                     │ refusal              │ refusal
     └──no answer──────────┴──────▶ refused ◀─────┘      `run` raises the error that the refusal names

Guarantees: the stream is reopened forever, with a jittered backoff that resets once a stream outlives the pause before it;
after `FAILURES_BEFORE_SEARCH` failures in a row the coordinator's address is looked up again. Each stream starts with a hello;
messages sent after the hello was composed are queued behind it, however long opening takes, so nothing is lost between the
hello's contents and the stream. A heartbeat follows the welcome and then every interval. A refusal that a retry may cure
(`_TEMPORARY`) counts as a lost stream; any other ends the session. Waits for a connection, orders, the next heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from echo2.base import errors
from echo2.base.clock import Backoff, Waits
from echo2.base.errors import EchoError, MalformedMessage, ProtocolError, Unreachable
from echo2.outside import monotonic
from echo2.outside.guard import cancel_all, handling
from echo2.trust.enrolment import FAILURES_BEFORE_SEARCH, enrol
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.trust.tls import Credentials, error_of, open_channel
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2

OUTBOX_MESSAGES_MAX = 8192
"""Queued messages that the stream has not taken yet; a stream that falls this far behind is reopened."""
CONNECT_S = 20.0  # three SYNs of TCP (1, 3, 7 s) and a handshake over a slow link
WELCOME_S = 20.0  # a coordinator that has just started answers after it has loaded its state
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.01, 3600.0  # from what simulations use to where nobody would notice a loss
# A restart of the other side, or patience, cures these.
_TEMPORARY = (errors.Unreachable, errors.LimitExceeded, MalformedMessage)
_WHOSE = "the coordinator"  # names the other side in errors
MESSAGE_BYTES_MAX = 64 << 20
"""As the coordinator may answer (trust/ports.SERVICES). Of a learner's messages it takes 16 MiB."""
# GRPC allows 4 MiB unless told.
_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
_log = logging.getLogger("echo2.control")

Said = TypeVar("Said")
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Party(Generic[Said]):
    """A role's callbacks: what it sends on its stream, and how it handles what it receives."""

    dial: Callable[[grpc.aio.Channel], Any]  # starts the role's call
    hello: Callable[[], Said]
    beat: Callable[[], Said]
    on_welcome: Callable[[Any], None]
    on_order: Callable[[Any], None]
    on_lost: Callable[[], None] = lambda: None
    find: Callable[[], Awaitable[None]] | None = None  # updates the coordinator's address in the credentials


def refusal_error(refusal: coordinator_pb2.Refusal) -> EchoError:
    """The exception that a refusal names; ProtocolError if the name is unknown."""
    kind = getattr(errors, refusal.code, None)
    if not (isinstance(kind, type) and issubclass(kind, EchoError)):
        return ProtocolError(f"the coordinator refused this node: {refusal.code}: {refusal.message[:2000]}")
    if issubclass(kind, errors.Dismissed):
        return kind(refusal.message[:2000])
    return kind(f"the coordinator refused this node: {refusal.message[:2000]}")


class _Outbox(Generic[Said]):
    """The send queue of one stream, from its hello to its end."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Said | None] = asyncio.Queue(OUTBOX_MESSAGES_MAX)  # None: nothing follows
        self.is_full = asyncio.Event()

    def put(self, message: Said | None) -> None:
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.is_full.set()

    def leave(self, farewell: Said) -> None:
        self.put(farewell)
        self.put(None)


class ControlSession(Generic[Said]):
    """One per node; `run` is its loop. Messages sent while no stream is open are dropped: the next hello covers them."""

    def __init__(self, credentials: Credentials, waits: Waits, backoff: Backoff, connect_s: float = CONNECT_S) -> None:
        self.credentials = credentials
        self.is_connected = False
        self._waits = waits
        self._backoff = backoff
        self._connect_s = connect_s
        self._failures = 0  # in a row
        self._outbox: _Outbox[Said] | None = None
        self._farewell: Said | None = None
        self._is_told, self._is_over = False, asyncio.Event()

    def send(self, message: Said) -> None:
        """Queues a message behind the hello and earlier messages; drops it if no stream is open."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def leave(self, farewell: Said, within_s: float) -> bool:
        """Sends a farewell after everything queued, and again on the next stream if this one breaks; `run` returns once it is read.
        Gives up after `within_s`, at once if no stream is open. Returns whether it was read.

        A completed write does not prove that the coordinator read it; only its orderly end of the stream does.
        """
        if self._outbox is None:
            return False
        self._farewell = farewell
        self._outbox.leave(farewell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_over.wait()
        return self._is_told

    async def run(self, party: Party[Said]) -> None:
        pause_s = 0.0
        while True:
            address, begun = self.credentials.coordinator_address, monotonic()
            peer = f"{_WHOSE} at {address}"
            self._waits.begin("coordinator", f"a connection to {peer}")
            try:
                await self._connect(address, party)
                self._is_told = self._farewell is not None
                if not self._is_told:
                    _log.warning("%s closed the stream", peer)
            except grpc.aio.AioRpcError as error:
                refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # our message was at fault, not our identity
                self._survive(MalformedMessage(f"{peer}: {error.details()}") if refused else error_of(error, peer))
            except EchoError as error:
                self._survive(error)
            finally:
                self._outbox = None
                was_welcome, self.is_connected = self.is_connected, False
                if was_welcome:
                    party.on_lost()
            if self._is_told:
                self._is_over.set()
                return
            if was_welcome and monotonic() - begun > pause_s:
                self._backoff.succeeded()
            self._waits.begin("coordinator", f"a connection to {peer}")
            pause_s = self._backoff.next_pause_s()
            await asyncio.sleep(pause_s)
            self._failures = 1 if was_welcome else self._failures + 1
            if party.find is not None and self._failures % FAILURES_BEFORE_SEARCH == 0:
                await party.find()

    def _survive(self, error: EchoError) -> None:
        """Logs the error; raises it if reopening the stream would not help."""
        if not isinstance(error, _TEMPORARY):
            self._is_over.set()
            raise error from None
        _log.log(logging.INFO if isinstance(error, errors.Unreachable) else logging.WARNING, "%s", error)

    async def _connect(self, address: str, party: Party[Said]) -> None:
        async with open_channel(address, self.credentials.coordinator_peer_id, self.credentials, _OPTIONS) as channel:
            call = party.dial(channel)
            try:
                # No await between these two: a message after the hello was composed must find the outbox.
                hello, outbox = party.hello(), _Outbox[Said]()
                self._outbox = outbox
                if self._farewell is not None:
                    outbox.leave(self._farewell)
                await self._greet(call, hello, address)
                interval_s = await self._welcome(call, party)
                await self._talk(call, party, outbox, interval_s)
            finally:
                call.cancel()

    async def _greet(self, call: Any, hello: Said, address: str) -> None:
        """Sends the hello; Unreachable if no connection takes it in time."""
        try:
            async with asyncio.timeout(self._connect_s):
                await _write(call, hello)
        except TimeoutError:
            raise errors.Unreachable(f"{_WHOSE} at {address}: no connection within {self._connect_s:.0f} s") from None

    async def _welcome(self, call: Any, party: Party[Said]) -> float:
        """Waits for the answer to the hello; returns the heartbeat interval."""
        try:
            async with asyncio.timeout(WELCOME_S):
                order = await call.read()
        except TimeoutError:
            raise errors.Unreachable(f"{_WHOSE}: no answer to the hello within {WELCOME_S:.0f} s") from None
        kind = _kind_of(order)
        if kind is None:
            raise errors.Unreachable(f"{_WHOSE} closed the stream without an answer to the hello")
        if kind != "welcome":
            raise MalformedMessage(f"{_WHOSE}: expected a welcome, got {kind}")
        welcome = order.welcome
        check(welcome, _WHOSE)
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
            party.on_welcome(welcome)
        return float(welcome.heartbeat_interval_s)

    async def _talk(self, call: Any, party: Party[Said], outbox: _Outbox[Said], interval_s: float) -> None:
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
            await cancel_all(parts)


def check_interval(name: str, interval_s: float) -> None:
    """Checks an interval of the welcome: the coordinator must not make us spin or fall silent."""
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise MalformedMessage(
            f"{name} of the coordinator's welcome: expected {INTERVAL_S_MIN} to {INTERVAL_S_MAX:.0f}, got {interval_s}"
        )


def _kind_of(order: Any) -> str | None:
    """The kind of an order; None at the end of the stream. Raises the error that a refusal names."""
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
    await asyncio.Event().wait()  # the coordinator ends the stream once it has read everything


async def _write(call: Any, message: object) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # raised by gRPC if the stream has just ended
        raise errors.Unreachable(f"{_WHOSE}: the stream ended during a send") from None


async def _read_all(call: Any, party: Party[Said]) -> None:
    while True:
        order = await call.read()
        if _kind_of(order) is None:
            return
        with handling("an order", _WHOSE):
            check(order, _WHOSE)
            party.on_order(order)


async def _beat(party: Party[Said], outbox: _Outbox[Said], interval_s: float) -> None:
    while True:
        outbox.put(party.beat())
        await asyncio.sleep(interval_s)


async def _overflow(outbox: _Outbox[Said]) -> None:
    await outbox.is_full.wait()
    raise errors.LimitExceeded(
        f"{_WHOSE} does not read: {OUTBOX_MESSAGES_MAX} messages are queued; reopening the stream"
    )


async def enrolled(link: JoinLink, identity: Identity, role: Role, waits: Waits, backoff: Backoff) -> Credentials:
    while True:
        try:
            credentials = await enrol(link, identity, role)
        except Unreachable as error:
            waits.begin("coordinator", f"the coordinator at {link.address} to enrol ({error})")
            await asyncio.sleep(backoff.next_pause_s())
            continue
        waits.end("coordinator")
        return credentials


async def unless(stopped: asyncio.Event, work: asyncio.Task[Done]) -> Done | None:
    """The result of `work`; None, with `work` cancelled, if the node is stopped first. No task outlives the call."""
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        await cancel_all((work, stopping))
