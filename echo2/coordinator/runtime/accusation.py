"""Bans or quarantines a worker that the learner accuses, until the operator lifts it."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.coordinator.membership import OperatorSetting
from echo2.coordinator.runtime.hub import Hub


def accused(hub: Hub, peer_id: PeerId, reason: str, is_certain: bool) -> None:
    """Bans the worker, or quarantines it if the finding is not certain. A worker that is already banned stays banned."""
    member = hub.membership.members.get(peer_id)
    if member is not None and member.setting is not OperatorSetting.BANNED:
        hub.note("audit", f"{member.name}: {reason}")
        hub.set_worker(peer_id, OperatorSetting.BANNED if is_certain else OperatorSetting.QUARANTINED, reason)
