"""What the learner says to the coordinator, on its control session.

Guarantees: the learner never waits for it; what is said while no stream is open goes nowhere, and the next hello, which
carries every open group, makes up for it. Leaves to others: the stream (control/runtime/session), what orders mean (orders).
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
    """One per learner; `run` is its loop and ends by a refusal only."""

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
        """Keeps the stream until it is refused or cancelled. `find` has the credentials name the coordinator's address of now."""
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
        """`held_tokens`: of each group, in a reminder."""
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
        """The answer to what an operator looks at."""
        self._control.send(coordinator_pb2.LearnerMessage(shown=shown))

    async def leave(self, reason: str) -> None:
        """Says good-bye behind everything queued."""
        leaving = coordinator_pb2.LearnerLeaving(reason=reason)
        await self._control.leave(coordinator_pb2.LearnerMessage(leaving=leaving), LEAVE_S)
