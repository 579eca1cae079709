"""What the coordinator expects and measures of a version when some workers are late by the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.ids import PeerId, Version
from echo2.broadcast.trees import weighted_plan
from echo2.coordinator.hub import Hub
from echo2.coordinator.planning.input import broadcast_nodes, needs_of
from echo2.coordinator.store import SqlStore
from echo2.trust.identity import Identity
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, options
from tests.unit.coordinator.test_planner_input import beat, board, fleet, link
from tests.unit.coordinator.test_provisioner import Clock


def never(error: Exception) -> None:
    raise error


async def test_a_version_is_expected_and_complete_when_all_that_are_not_late_hold_it(tmp_path: Path) -> None:
    store, clock = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN), Clock()
    hub = Hub(options(tmp_path), Identity.generate(), store, store.load(), clock, never)
    hub.board, hub.membership = board(10.0), fleet("A100", "A100", "A100", "A100")
    members = hub.membership.members
    for member in members.values():
        member.measures.observe(beat())
    slow = members[PeerId("w2")]
    slow.hello.link.CopyFrom(link(1e5))
    nodes = broadcast_nodes(hub.board, list(members.values()))
    needs = replace(needs_of(nodes, members, None), share=0.7, weights=(2.0, 2.0, 1.9, 2.0))
    hub.adopt_broadcast_plan(weighted_plan(nodes, needs, 1, 10**6))
    assert hub.broadcast_plan is not None and hub.broadcast_plan.late == {slow.peer_id}
    assert hub.learner.predicted_broadcast_s(10**7) == pytest.approx(10 * hub.broadcast_plan.predicted_needed_s)
    assert 5 * hub.learner.predicted_broadcast_s(10**6) < hub.broadcast_plan.predicted_all_s
    hub.learner.on_publish(pb.VersionPublished(version=1, has_parent=True, artifact_bytes=10**6))
    for name in ("w0", "w1", "w3"):
        assert hub.board.newest_complete is None
        hub.board.on_live(PeerId(name), Version(1), clock.now() + 2.0)
    complete = hub.board.newest_complete
    assert complete is not None and complete.complete_s == pytest.approx(2.0)
