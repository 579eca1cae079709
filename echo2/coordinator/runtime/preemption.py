"""Handles workers that will lose their machine: they get no new leases, and hand back those that they have while they still can."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.coordinator import lease_events as le
from echo2.coordinator.membership import OperatorSetting
from echo2.coordinator.runtime.hub import Hub


def send_home(hub: Hub, peer_id: PeerId, reason: str) -> None:
    """Drains the worker and recalls its leases now, with all their tokens."""
    if not hub.membership.members[peer_id].activation.is_barred:
        hub.set_worker(peer_id, OperatorSetting.DRAINING, reason)
    for lease in hub.book.leases_of(peer_id):
        hub.apply(hub.book.handle(le.Recall(lease.lease_id, reason), hub.clock.now()))


def preempted(hub: Hub, peer_id: PeerId, notice: str) -> None:
    """Handles a preemption notice that came from a provider or the operator, not from the worker itself."""
    member = hub.membership.members[peer_id]
    hub.note("worker", f"{member.name} will lose its machine: {notice}")
    hub.journal_worker("preemption notice", member, notice)
    send_home(hub, peer_id, f"preemption: {notice}")
