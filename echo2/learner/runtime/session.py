"""Sends the learner's messages to the coordinator on its control session.

Guarantees: the learner never waits for the coordinator; messages sent while no stream is open are dropped, and the next hello,
which carries every open group, makes up for them. Leaves to others: the stream (control/runtime/session), orders (orders).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from echo2.base.ids import GroupId, PeerId
from echo2.base.rollout import GroupSpec
from echo2.control.runtime.session import ControlSession, Party
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from echo2.wire.rollout import group_to_message

LEAVE_S = 1.0


class LearnerSession:
    """The learner's session. `run` is its loop; it ends only if the coordinator refuses the learner."""

    def __init__(self, control: ControlSession[coordinator_pb2.LearnerMessage]) -> None:
        self._control = control

    @property
    def is_connected(self) -> bool:
        return self._control.is_connected

    async def run(
        self,
        hello: Callable[[], coordinator_pb2.LearnerHello],
        report: Callable[[], coordinator_pb2.LearnerReport],
        ordered: Callable[[coordinator_pb2.LearnerOrder], None],
        find: Callable[[], Awaitable[None]] | None = None,
        welcomed: Callable[[coordinator_pb2.LearnerWelcome], None] = lambda welcome: None,
    ) -> None:
        """Keeps the stream open until it is refused or cancelled. `find` looks up the coordinator's current address and stores it
        in the credentials."""
        await self._control.run(
            Party(
                dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).LearnerSession(),
                hello=lambda: coordinator_pb2.LearnerMessage(hello=hello()),
                beat=lambda: coordinator_pb2.LearnerMessage(report=report()),
                welcomed=welcomed,
                ordered=ordered,
                find=find,
            )
        )

    def report(self, report: coordinator_pb2.LearnerReport) -> None:
        self._control.send(coordinator_pb2.LearnerMessage(report=report))

    def offer(self, specs: Sequence[GroupSpec], held_tokens: Sequence[int] = ()) -> None:
        """Offers groups. `held_tokens`: in a reminder, the tokens of each group received so far."""
        groups = [group_to_message(spec) for spec in specs]
        offer = coordinator_pb2.OfferGroups(groups=groups, held_tokens=held_tokens)
        self._control.send(coordinator_pb2.LearnerMessage(offer=offer))

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None:
        close = coordinator_pb2.CloseGroups(group_ids=group_ids, reason=reason)
        self._control.send(coordinator_pb2.LearnerMessage(close=close))

    def published(self, published: coordinator_pb2.VersionPublished) -> None:
        self._control.send(coordinator_pb2.LearnerMessage(published=published))

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        accused = coordinator_pb2.WorkerAccused(peer_id=peer_id, reason=reason, is_certain=is_certain)
        self._control.send(coordinator_pb2.LearnerMessage(accused=accused))

    def delivered(self, delivered: coordinator_pb2.WorkersDelivered) -> None:
        self._control.send(coordinator_pb2.LearnerMessage(delivered=delivered))

    def show(self, shown: coordinator_pb2.RolloutsShown) -> None:
        """Sends the rollouts that an operator asked to see."""
        self._control.send(coordinator_pb2.LearnerMessage(shown=shown))

    async def leave(self, reason: str) -> None:
        """Disconnects cleanly after all queued messages."""
        leaving = coordinator_pb2.LearnerLeaving(reason=reason)
        await self._control.leave(coordinator_pb2.LearnerMessage(leaving=leaving), LEAVE_S)
