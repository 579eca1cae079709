"""Asks the long-tail rule which leases to move and recalls them. Called at each tick; costs nothing while no worker has room."""

from __future__ import annotations

from echo2.coordinator import lease_events as le
from echo2.coordinator.long_tail import TailRule, is_quiet, moves, pace_of, prefill_rate
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.hub import Hub
from echo2.coordinator.sightings import work_of


def consolidate(hub: Hub) -> int:
    """Recalls the leases that would finish faster elsewhere; returns how many."""
    if not is_quiet(hub.book, hub.clock.now()):
        return 0
    rule = TailRule(hub.options.report_interval_s + 1.0, recycles=hub.options.over_provision > 1)
    members = hub.membership.members
    work, gpus = work_of(hub.board), built_in_catalogue()
    reads = {gpu: prefill_rate(gpu, *work, gpus) for gpu in {member.hello.gpu for member in members.values()}}
    paces = {peer_id: pace_of(member, reads[member.hello.gpu]) for peer_id, member in members.items()}
    names = {peer_id: member.name for peer_id, member in members.items()}
    found = moves(hub.book, paces, hub.board.report.step, rule, names)
    for move in found:
        lease = hub.book.leases[move.lease_id]
        hub.note("lease", f"group {lease.group_id} is moved: {move.reason}")
        hub.apply(hub.book.handle(le.Recall(move.lease_id, move.reason, move.to), hub.clock.now()))
    return len(found)
