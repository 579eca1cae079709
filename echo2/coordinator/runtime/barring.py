"""What others are told of workers that are barred, and of those that are taken back.

The learner hears of banned and of quarantined ones, whose rollouts it does not train on; workers of banned ones alone, with
whom no chunks are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo2.coordinator.membership import Activation, Change, Member
from echo2.coordinator.runtime.session import StreamSession
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb


def barring_of(member: Member) -> pb.LearnerOrder:
    """Whether this worker is barred now, and why."""
    is_lifted = not member.activation.is_barred
    banned = pb.WorkerBanned(
        peer_id=member.peer_id,
        reason=member.setting_reason,
        is_lifted=is_lifted,
        is_banned=member.activation is Activation.BANNED,
    )
    return pb.LearnerOrder(banned=banned)


def barrings_of(members: Iterable[Member]) -> list[pb.LearnerOrder]:
    """Of all that are barred: for a learner that has just come."""
    return [barring_of(member) for member in members if member.activation.is_barred]


def tell_ban(change: Change, workers: Iterable[StreamSession[pb.WorkerOrder]]) -> None:
    """To all workers, when one is banned or a ban is lifted."""
    if Activation.BANNED in (change.activation, change.worked):
        is_lifted = change.activation is not Activation.BANNED
        order = pb.WorkerOrder(banned=pb.BannedPeer(peer_id=change.member.peer_id, is_lifted=is_lifted))
        for session in workers:
            session.send(order)
