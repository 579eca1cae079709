"""The learner's stream to the coordinator: offers, closures, versions and reports out, plans in.

Guarantees: the learner never waits for it; when the stream breaks it is opened again, for ever, with jittered back-off;
each opening begins with a hello that carries every open group, so what was not sent meanwhile is made up for, and from
the very moment at which the hello was made everything else is queued behind it, however long the connecting takes.
`waits_for` says what it waits for. Waits for: orders from the coordinator, messages of the learner, the heartbeat
interval; woken by any of them. Leaves to others: what the orders mean (daemon).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from echo2.base.errors import EchoError, NotAllowed, ProtocolError, StateError, VersionMismatch
from echo2.outside import here, monotonic
from echo2.outside.guard import handling
from echo2.trust.runtime.enrolling import FAILURES_BEFORE_SEARCH
from echo2.trust.runtime.tls import Credentials, open_channel
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc

OUTBOX_MAX = 4096
"""Messages not yet taken by the stream; a stream that falls this far behind is opened again."""
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 15.0
MESSAGE_BYTES_MAX = 64 << 20
_log = logging.getLogger("echo2.learner")

_FATAL_REFUSALS: dict[str, type[EchoError]] = {
    "VersionMismatch": VersionMismatch,
    "NotAllowed": NotAllowed,
    "StateError": StateError,
}
"""Refusals that no retry will mend."""


class CoordinatorSession:
    """`hello` makes the first message of each stream; `report` the heartbeat; `on_order` takes each order; `find` has the
    credentials name the coordinator's address of now, where that can be told."""

    def __init__(
        self,
        credentials: Credentials,
        hello: Callable[[], coordinator_pb2.LearnerHello],
        report: Callable[[], coordinator_pb2.LearnerReport],
        on_order: Callable[[coordinator_pb2.LearnerOrder], None],
        find: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.credentials = credentials
        self._hello = hello
        self._report = report
        self._on_order = on_order
        self._find = find
        self._outbox: asyncio.Queue[coordinator_pb2.LearnerMessage] | None = None
        self._away_since: float | None = monotonic()
        self.heartbeat_interval_s = 5.0
        self.is_connected = False
        self.reconnects = 0

    def send(self, message: coordinator_pb2.LearnerMessage) -> None:
        """Queues a message behind the last hello; without one, the next makes up for it."""
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("coordinator takes no messages: opening the stream again")
            self._outbox = None

    async def leave(self, reason: str, timeout_s: float = 1.0) -> None:
        """Says goodbye behind everything queued; gives up after `timeout_s`."""
        outbox = self._outbox
        if outbox is None:
            return
        self.send(coordinator_pb2.LearnerMessage(leaving=coordinator_pb2.LearnerLeaving(reason=reason)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(outbox.join(), timeout_s)

    @property
    def waits_for(self) -> str:
        """Empty while connected."""
        if self._away_since is None:
            return ""
        away_s = monotonic() - self._away_since
        return f"coordinator at {self.credentials.coordinator_address}, away for {away_s:.0f} s"

    async def run(self) -> None:
        """Keeps the stream open until cancelled. Raises only when the coordinator refuses this learner for good."""
        failures = 0
        while True:
            began = monotonic()
            try:
                await self._one_stream()
                reason = "the coordinator ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.InvalidStateError:
                reason = "the stream ended before the hello was taken"
            except (ProtocolError, ValueError) as error:
                if isinstance(error, VersionMismatch):
                    raise
                reason = str(error)
            failures = 0 if self.is_connected and monotonic() - began > BACKOFF_MAX_S else failures + 1
            self.is_connected = False
            self._outbox = None
            self._away_since = self._away_since or monotonic()
            self.reconnects += 1
            pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures, 10)) * here().rng.uniform(0.5, 1.0)
            _log.info("waiting for the %s (%s); next try in %.1f s", self.waits_for, reason, pause_s)
            await asyncio.sleep(pause_s)
            if self._find is not None and failures and failures % FAILURES_BEFORE_SEARCH == 0:
                await self._find()

    async def _one_stream(self) -> None:
        options = [
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ]
        c = self.credentials
        async with open_channel(c.coordinator_address, c.coordinator_peer_id, c, options) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            outbox: asyncio.Queue[coordinator_pb2.LearnerMessage] = asyncio.Queue(OUTBOX_MAX)
            stream = stub.LearnerSession()
            # No await between these two: what the hello does not say any more must find the queue.
            hello, self._outbox = self._hello(), outbox
            await stream.write(coordinator_pb2.LearnerMessage(hello=hello))
            sender = asyncio.get_running_loop().create_task(self._send_all(stream, outbox))
            try:
                await self._receive_all(stream)
            finally:
                sender.cancel()
                # A write on a stream that has ended raises InvalidStateError; the reader tells why it ended.
                with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await sender
                stream.cancel()

    async def _receive_all(self, stream: Any) -> None:
        while True:
            order = await stream.read()
            if not isinstance(order, coordinator_pb2.LearnerOrder):
                return  # the end of the stream
            check(order, "the coordinator")
            with handling("an order", "the coordinator"):
                self._take(order)

    def _take(self, order: coordinator_pb2.LearnerOrder) -> None:
        kind = order.WhichOneof("kind")
        if kind == "refusal":
            error = _FATAL_REFUSALS.get(order.refusal.code)
            text = f"coordinator refused this learner: {order.refusal.message}"
            raise (error or ProtocolError)(text)
        if kind == "welcome":
            self.is_connected = True
            self._away_since = None
            self.heartbeat_interval_s = min(60.0, max(0.1, order.welcome.heartbeat_interval_s))
            _log.info("connected to the coordinator of run %s", order.welcome.run_id)
        self._on_order(order)

    async def _send_all(self, stream: Any, outbox: asyncio.Queue[coordinator_pb2.LearnerMessage]) -> None:
        while self._outbox is outbox:
            try:
                message = await asyncio.wait_for(outbox.get(), self.heartbeat_interval_s)
            except TimeoutError:
                await stream.write(coordinator_pb2.LearnerMessage(report=self._report()))
                continue
            await stream.write(message)
            outbox.task_done()
        stream.cancel()
