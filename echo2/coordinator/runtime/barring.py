"""Tells other nodes which workers are barred, and which no longer are.

The learner is told of banned and quarantined workers, because it does not train on their rollouts; workers are told only of banned
ones, with which they exchange no chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo2.coordinator.membership import Activation, Change, Member
from echo2.coordinator.runtime.session import StreamSession
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb


def barring_of(member: Member) -> pb.LearnerOrder:
    """The order that tells the learner whether this worker is barred now, and why."""
    is_lifted = not member.activation.is_barred
    banned = pb.WorkerBanned(
        peer_id=member.peer_id,
        reason=member.setting_reason,
        is_lifted=is_lifted,
        is_banned=member.activation is Activation.BANNED,
    )
    return pb.LearnerOrder(banned=banned)


def barrings_of(members: Iterable[Member]) -> list[pb.LearnerOrder]:
    """The orders for all barred workers, for a learner that has just connected."""
    return [barring_of(member) for member in members if member.activation.is_barred]


def tell_ban(change: Change, workers: Iterable[StreamSession[pb.WorkerOrder]]) -> None:
    """Tells all workers if a worker was banned or its ban was lifted."""
    if Activation.BANNED in (change.activation, change.worked):
        is_lifted = change.activation is not Activation.BANNED
        order = pb.WorkerOrder(banned=pb.BannedPeer(peer_id=change.member.peer_id, is_lifted=is_lifted))
        for session in workers:
            session.send(order)
