"""The worker's control stream with the coordinator.

Guarantees: the stream is kept for ever, with jittered pauses between attempts; a coordinator that was not met
`FAILURES_BEFORE_SEARCH` times in a row is looked for anew; after each reconnect the hello says
which leases are still held; a heartbeat goes out every interval; a refusal ends the session with the error that the
coordinator named. Waits for a connection, for orders, for the next heartbeat. Leaves to others: what orders mean for
leases (worker/assignments), for chunks (broadcast) and for the engine (daemon), which are told by callbacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from echo2.base import errors
from echo2.base.errors import EchoError, MalformedMessage, ProtocolError
from echo2.base.ids import LeaseId, Version
from echo2.outside.guard import handling
from echo2.trust.runtime.enrolling import FAILURES_BEFORE_SEARCH
from echo2.trust.runtime.tls import Credentials, error_of, open_channel
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from echo2.worker import duties
from echo2.worker.backoff import Backoff
from echo2.worker.runtime.waits import Waits

OUTBOX_MESSAGES_MAX = 8192
WELCOME_S = 20.0
REPORT_INTERVAL_S_MIN, REPORT_INTERVAL_S_MAX = 0.01, 3600.0
_TEMPORARY = (errors.Unreachable, errors.LimitExceeded)
_REASONS = {
    duties.EndReason.FINISHED: coordinator_pb2.LeaseEnded.REASON_FINISHED,
    duties.EndReason.HANDED_BACK: coordinator_pb2.LeaseEnded.REASON_HANDED_BACK,
    duties.EndReason.REFUSED: coordinator_pb2.LeaseEnded.REASON_REFUSED,
}
_log = logging.getLogger("echo2.worker")


@dataclass(frozen=True, slots=True)
class SessionHooks:
    """What the session asks of and tells to the rest of the worker, on the loop's thread."""

    hello: Callable[[], coordinator_pb2.WorkerHello]
    heartbeat: Callable[[], coordinator_pb2.Heartbeat]
    welcomed: Callable[[coordinator_pb2.WorkerWelcome], None]
    lost: Callable[[], None]
    ordered: Callable[[coordinator_pb2.WorkerOrder], None]
    find: Callable[[], Awaitable[None]] | None = None  # has the credentials name the address of the coordinator now


def refusal_error(refusal: coordinator_pb2.Refusal) -> EchoError:
    """The exception that a refusal names; ProtocolError where the name is none of ours."""
    kind = getattr(errors, refusal.code, None)
    if not (isinstance(kind, type) and issubclass(kind, EchoError)):
        return ProtocolError(f"the coordinator refused this worker: {refusal.code}: {refusal.message[:2000]}")
    return kind(f"the coordinator refused this worker: {refusal.message[:2000]}")


class CoordinatorSession:
    """One per worker; `run` is its loop and ends by a refusal only."""

    def __init__(
        self, credentials: Credentials, hooks: SessionHooks, waits: Waits, backoff: Backoff, connect_s: float
    ) -> None:
        self._credentials = credentials
        self._hooks = hooks
        self._waits = waits
        self._backoff = backoff
        self._connect_s = connect_s
        self._outbox: asyncio.Queue[coordinator_pb2.WorkerMessage] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._failures = 0
        self._is_open = False  # messages are taken
        self._is_welcome = False

    # -- called by the desk and the daemon; what is said before a hello is in it, what is said after it waits behind it

    def end_lease(self, lease_id: LeaseId, reason: duties.EndReason, message: str) -> None:
        ended = coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=_REASONS[reason], message=message[:2000])
        self._send(coordinator_pb2.WorkerMessage(lease_ended=ended))

    def tell_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None:
        progress = coordinator_pb2.LeaseProgress(lease_id=lease_id, finished_rollouts=finished_rollouts, tokens=tokens)
        self._send(coordinator_pb2.WorkerMessage(lease_progress=progress))

    def request_leases(self, free_rollouts: int, version: Version) -> None:
        request = coordinator_pb2.LeaseRequest(free_rollouts=free_rollouts, version=version)
        self._send(coordinator_pb2.WorkerMessage(lease_request=request))

    def leave(self, reason: str) -> None:
        """Says good-bye; the coordinator forgets the worker's claim to leases at once."""
        self._send(coordinator_pb2.WorkerMessage(leaving=coordinator_pb2.WorkerLeaving(reason=reason)))

    def heartbeat(self) -> None:
        """Something worth telling has changed, such as the live version: told before whatever is said next."""
        self._send(coordinator_pb2.WorkerMessage(heartbeat=self._hooks.heartbeat()))

    async def flush(self, within_s: float) -> None:
        """Waits until what was said has been handed to the stream, `within_s` at most."""
        until = asyncio.get_running_loop().time() + within_s
        while self._is_open and not self._outbox.empty() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    def _send(self, message: coordinator_pb2.WorkerMessage) -> None:
        if not self._is_open:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("the coordinator takes no messages: %d wait; starting the stream anew", self._outbox.qsize())
            self._is_open = False

    # -- the loop

    async def run(self) -> None:
        """Keeps the stream until it is refused or cancelled."""
        while True:
            address = self._credentials.coordinator_address
            whose = f"the coordinator at {address}"
            self._waits.begin("coordinator", f"a connection to {whose}")
            try:
                await self._connect(address)
                _log.warning("%s closed the stream", whose)
            except grpc.aio.AioRpcError as error:
                refusal = error_of(error, whose)
                if not isinstance(refusal, _TEMPORARY):
                    raise refusal from None
                _log.info("%s", refusal)
            except (*_TEMPORARY, MalformedMessage) as error:  # the next stream may be better
                _log.warning("%s", error)
            finally:
                self._is_open = False
                if self._is_welcome:
                    self._is_welcome = False
                    self._hooks.lost()
            self._waits.begin("coordinator", f"a connection to {whose}")
            await asyncio.sleep(self._backoff.next_pause_s())
            await self._look_elsewhere()

    async def _look_elsewhere(self) -> None:
        """Asks where the coordinator is, when it was not met several times in a row."""
        self._failures += 1
        if self._hooks.find is not None and self._failures % FAILURES_BEFORE_SEARCH == 0:
            await self._hooks.find()

    async def _connect(self, address: str) -> None:
        """One connection, from the attempt to its end."""
        peer_id = self._credentials.coordinator_peer_id
        async with open_channel(address, peer_id, self._credentials) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), self._connect_s)
            except TimeoutError:
                raise errors.Unreachable(
                    f"the coordinator at {address}: no connection within {self._connect_s:.0f} s"
                ) from None
            call = coordinator_pb2_grpc.CoordinatorStub(channel).WorkerSession()
            try:
                await _written(call, coordinator_pb2.WorkerMessage(hello=self._begin()))
                interval_s = await self._welcome(call)
                await self._talk(call, interval_s)
            finally:
                call.cancel()

    def _begin(self) -> coordinator_pb2.WorkerHello:
        """The hello. What happens from now on is not in it, so it is queued behind it."""
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._is_open = True
        return self._hooks.hello()

    async def _welcome(
        self, call: grpc.aio.StreamStreamCall[coordinator_pb2.WorkerMessage, coordinator_pb2.WorkerOrder]
    ) -> float:
        """Waits for the answer to the hello; returns the heartbeat interval."""
        try:
            order = await asyncio.wait_for(call.read(), WELCOME_S)
        except TimeoutError:
            raise errors.Unreachable(f"the coordinator: no answer to the hello within {WELCOME_S:.0f} s") from None
        if not isinstance(order, coordinator_pb2.WorkerOrder):
            raise errors.Unreachable("the coordinator closed the stream without an answer to the hello")
        if order.WhichOneof("kind") == "refusal":
            raise refusal_error(order.refusal)
        if order.WhichOneof("kind") != "welcome":
            raise ProtocolError(f"the coordinator: expected a welcome, got {order.WhichOneof('kind')}")
        welcome = order.welcome
        check(welcome, "the coordinator")
        if welcome.run_id != self._credentials.run_id:
            raise errors.StateError(
                f"the coordinator: expected run {self._credentials.run_id}, got {welcome.run_id}; "
                "remove this worker's folder to join another run"
            )
        for name, value in (
            ("report_interval_s", welcome.report_interval_s),
            ("heartbeat_interval_s", welcome.heartbeat_interval_s),
        ):
            if not REPORT_INTERVAL_S_MIN <= value <= REPORT_INTERVAL_S_MAX:
                raise MalformedMessage(
                    f"{name} of the coordinator's welcome: expected {REPORT_INTERVAL_S_MIN} to "
                    f"{REPORT_INTERVAL_S_MAX:.0f}, got {value}"
                )
        self._backoff.succeeded()
        self._failures = 0
        self._waits.end("coordinator")
        self._is_welcome = True
        with handling("a welcome", "the coordinator"):
            self._hooks.welcomed(welcome)
        return welcome.heartbeat_interval_s

    async def _talk(
        self,
        call: grpc.aio.StreamStreamCall[coordinator_pb2.WorkerMessage, coordinator_pb2.WorkerOrder],
        interval_s: float,
    ) -> None:
        """Until either side ends the stream."""
        parts = [
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._beat(interval_s)),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[coordinator_pb2.WorkerMessage, coordinator_pb2.WorkerOrder]
    ) -> None:
        while True:
            await _written(call, await self._outbox.get())

    async def _read(
        self, call: grpc.aio.StreamStreamCall[coordinator_pb2.WorkerMessage, coordinator_pb2.WorkerOrder]
    ) -> None:
        while True:
            order = await call.read()
            if not isinstance(order, coordinator_pb2.WorkerOrder):
                return
            if order.WhichOneof("kind") == "refusal":
                raise refusal_error(order.refusal)
            with handling("an order", "the coordinator"):
                check(order, "the coordinator")
                self._hooks.ordered(order)

    async def _beat(self, interval_s: float) -> None:
        while self._is_open:
            self.heartbeat()
            await asyncio.sleep(interval_s)


async def _written(
    call: grpc.aio.StreamStreamCall[coordinator_pb2.WorkerMessage, coordinator_pb2.WorkerOrder],
    message: coordinator_pb2.WorkerMessage,
) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # what gRPC raises for a stream that ended a moment ago
        raise errors.Unreachable("the coordinator: the stream ended while something was said on it") from None
