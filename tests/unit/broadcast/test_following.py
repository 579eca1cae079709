from __future__ import annotations

from pathlib import Path

from echo2.base.ids import RunId, Version
from echo2.base.link_shape import LinkShape
from echo2.broadcast.artifact import ArtifactId, Header
from echo2.broadcast.catch_up import CatchUpPlanner
from echo2.broadcast.library import Library, LibraryLimits
from echo2.broadcast.pace import Meter
from echo2.broadcast.route import FORGOTTEN_S, STALL_S
from echo2.broadcast.store import ChunkStore
from echo2.trust.identity import Identity

RUN = RunId("a-run")


def test_the_way_is_chosen_anew_when_something_stops_coming_and_when_it_is_tried_again(tmp_path: Path) -> None:
    learner = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits(), "delta 1")
    planner = CatchUpPlanner(Identity.generate().peer_id, library, Meter(), LinkShape())
    delta = ArtifactId(Version(1), Version(0))
    header = Header(delta, RUN, "", 1.0, 1 << 20, True, learner.peer_id).signed(learner)
    library.add_header(header)

    def look(now: float) -> list[bytes] | None:
        found = planner.look(Version(0), True, now)
        return None if found is None else list(found)

    assert look(0.0) is None and look(0.5) is None
    assert look(STALL_S) == [header.key] and planner.stalled == {header.key}
    assert look(STALL_S + 1.0) is None, "it is known"
    assert look(STALL_S + FORGOTTEN_S) == [] and not planner.stalled, "the caller must want it again"
