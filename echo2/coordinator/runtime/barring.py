"""What the learner is told of workers whose rollouts are not trained on, and of those that are taken back."""

from __future__ import annotations

from collections.abc import Iterable

from echo2.coordinator.membership import Member
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb


def barring_of(member: Member) -> pb.LearnerOrder:
    """Whether this worker is barred now, and why."""
    is_lifted = not member.activation.is_barred
    banned = pb.WorkerBanned(peer_id=member.peer_id, reason=member.setting_reason, is_lifted=is_lifted)
    return pb.LearnerOrder(banned=banned)


def barrings_of(members: Iterable[Member]) -> list[pb.LearnerOrder]:
    """Of all that are barred: for a learner that has just come."""
    return [barring_of(member) for member in members if member.activation.is_barred]
