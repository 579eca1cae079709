"""Sends the worker's messages to the coordinator, on its control session.

Guarantees: messages sent while no stream is open are dropped; the next hello lists the leases still held. Leaves to others: the
stream (control/runtime/session), handling orders (orders), the contents of a heartbeat (telling).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason
from echo2.control.runtime.session import ControlSession, Party
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc

_REASONS = {
    EndReason.FINISHED: coordinator_pb2.LeaseEnded.REASON_FINISHED,
    EndReason.HANDED_BACK: coordinator_pb2.LeaseEnded.REASON_HANDED_BACK,
    EndReason.REFUSED: coordinator_pb2.LeaseEnded.REASON_REFUSED,
}


@dataclass(frozen=True, slots=True)
class SessionHooks:
    """Callbacks into the rest of the worker, on the loop's thread."""

    hello: Callable[[], coordinator_pb2.WorkerHello]
    heartbeat: Callable[[], coordinator_pb2.Heartbeat]
    welcomed: Callable[[coordinator_pb2.WorkerWelcome], None]
    lost: Callable[[], None]
    ordered: Callable[[coordinator_pb2.WorkerOrder], None]
    find: Callable[[], Awaitable[None]] | None = None  # updates the credentials with the coordinator's current address


class WorkerSession:
    """One per worker; `run` is its loop, which only a refusal ends."""

    def __init__(self, control: ControlSession[coordinator_pb2.WorkerMessage]) -> None:
        self._control = control

    async def run(self, hooks: SessionHooks) -> None:
        """Keeps the stream until it is refused or cancelled."""
        await self._control.run(
            Party(
                dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).WorkerSession(),
                hello=lambda: coordinator_pb2.WorkerMessage(hello=hooks.hello()),
                beat=lambda: coordinator_pb2.WorkerMessage(heartbeat=hooks.heartbeat()),
                welcomed=hooks.welcomed,
                ordered=hooks.ordered,
                lost=hooks.lost,
                find=hooks.find,
            )
        )

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        ended = coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=_REASONS[reason], message=message[:2000])
        self._control.send(coordinator_pb2.WorkerMessage(lease_ended=ended))

    def tell_progress(self, lease_id: LeaseId, finished_rollouts: int, tokens: int) -> None:
        progress = coordinator_pb2.LeaseProgress(lease_id=lease_id, finished_rollouts=finished_rollouts, tokens=tokens)
        self._control.send(coordinator_pb2.WorkerMessage(lease_progress=progress))

    def request_leases(self, free_rollouts: int, version: Version) -> None:
        request = coordinator_pb2.LeaseRequest(free_rollouts=free_rollouts, version=version)
        self._control.send(coordinator_pb2.WorkerMessage(lease_request=request))

    def tell_heartbeat(self, heartbeat: coordinator_pb2.Heartbeat) -> None:
        """Sends an extra heartbeat because something changed, such as the live version; it precedes any later message."""
        self._control.send(coordinator_pb2.WorkerMessage(heartbeat=heartbeat))

    async def leave(self, reason: str, within_s: float) -> None:
        """Says good-bye, so that the coordinator reassigns the worker's leases at once."""
        leaving = coordinator_pb2.WorkerLeaving(reason=reason)
        await self._control.leave(coordinator_pb2.WorkerMessage(leaving=leaving), within_s)
