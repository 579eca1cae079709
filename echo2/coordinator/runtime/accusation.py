"""What becomes of a worker that the learner accuses, until the operator lifts it."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.coordinator.membership import OperatorSetting
from echo2.coordinator.runtime.hub import Hub


def accused(hub: Hub, peer_id: PeerId, reason: str, is_certain: bool) -> None:
    """A ban, or a quarantine where the finding is not certain; that softens no ban."""
    member = hub.membership.members.get(peer_id)
    if member is not None and member.setting is not OperatorSetting.BANNED:
        hub.note("audit", f"{member.name}: {reason}")
        hub.set_worker(peer_id, OperatorSetting.BANNED if is_certain else OperatorSetting.QUARANTINED, reason)
