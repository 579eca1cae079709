from __future__ import annotations

from echo2.base.ids import Version
from echo2.broadcast.catch_up import ArtifactOffer, Way, link_of, plan_way
from echo2.broadcast.manifest import ArtifactId, ArtifactKey
from echo2.weights.policy import BaseCheckpoint

SNAPSHOT = 10**9
LINK = link_of(1e6, 0.1, 1e12, 1e12)


def offer(parent: int | None, version: int, missing: float, *, begun: bool = False) -> ArtifactOffer:
    artifact = ArtifactId(Version(version), None if parent is None else Version(parent))
    is_pushed = parent is not None and version - parent == 1
    key = ArtifactKey(f"{parent}>{version}".encode())
    return ArtifactOffer(key, artifact, missing, SNAPSHOT, is_pushed, begun)


def way(start: int | None, *offers: ArtifactOffer) -> tuple[str, list[str]]:
    found = plan_way(offers, None if start is None else Version(start), LINK)
    assert isinstance(found, Way)
    return found.kind, [key.decode() for key in found.keys]


STEPS = [offer(v, v + 1, 1e6) for v in range(8)]
MERGED = offer(0, 8, 4e6)
KEYFRAME = offer(None, 8, 6e8)


def test_a_worker_takes_what_is_expected_first() -> None:
    assert way(7, *STEPS, MERGED, KEYFRAME) == ("delta", ["7>8"])
    assert way(6, *STEPS, MERGED, KEYFRAME) == ("chain", ["6>7", "7>8"])
    assert way(0, *STEPS, MERGED, KEYFRAME) == ("merged", ["0>8"])
    assert way(0, *STEPS, KEYFRAME) == ("chain", [f"{v}>{v + 1}" for v in range(8)])
    assert way(None, *STEPS, MERGED, KEYFRAME) == ("keyframe", ["None>8"])
    assert way(None, *STEPS, MERGED, offer(None, 0, 6e8)) == ("keyframe+merged", ["None>0", "0>8"])
    assert plan_way([*STEPS, KEYFRAME], Version(8), LINK) is None
    assert plan_way(STEPS, None, LINK) is None


def test_who_has_the_base_begins_there_where_that_is_sooner() -> None:
    base = BaseCheckpoint(Version(0), 0.0)

    def begun_at(start: int | None, *offers: ArtifactOffer) -> tuple[str, list[str]] | None:
        found = plan_way(offers, None if start is None else Version(start), LINK, (), base)
        return (found.kind, [key.decode() for key in found.keys]) if found is not None else None

    assert begun_at(None, *STEPS, MERGED, KEYFRAME) == ("base+merged", ["0>8"])
    assert begun_at(None, *STEPS, KEYFRAME) == ("base+chain", [f"{v}>{v + 1}" for v in range(8)])
    assert begun_at(None, offer(None, 0, 6e8)) == ("keyframe", ["None>0"]), "its seal proves the base"
    assert begun_at(None) is None
    assert begun_at(6, *STEPS, MERGED, KEYFRAME) == ("chain", ["6>7", "7>8"])
    assert begun_at(None, offer(0, 8, 7e8), KEYFRAME) == ("keyframe", ["None>8"])


def test_what_comes_by_itself_is_left_only_for_a_clear_gain() -> None:
    """The pushed deltas' bytes are on their way in any case."""
    two = [offer(0, 1, 0.3e6), offer(1, 2, 1e6)]
    assert way(0, *two, offer(0, 2, 1.1e6))[0] == "chain"
    assert way(0, *two, offer(0, 2, 0.2e6)) == ("merged", ["0>2"])


def test_a_way_that_was_begun_is_not_left_for_one_that_is_a_little_shorter() -> None:
    assert way(0, *STEPS, offer(0, 8, 3.9e6, begun=True), offer(0, 4, 1.9e6), offer(4, 8, 1.9e6)) == (
        "merged", ["0>8"],
    )  # fmt: skip


def test_a_slow_decoder_rather_takes_a_keyframe_than_a_long_chain() -> None:
    slow = link_of(1e9, 0.001, 1e9, 1e9)
    found = plan_way([*STEPS, KEYFRAME], Version(0), slow)
    assert found is not None and found.kind == "keyframe" and "expected to take 1 s" in found.reason


def test_a_way_that_has_stopped_coming_is_left_for_one_that_leads_as_far() -> None:
    """A chunk of 6>7 is lost to its publisher's disk: the keyframe is dearer, and comes."""
    lost = {STEPS[6].key}
    found = plan_way([*STEPS, KEYFRAME], Version(6), LINK, lost)
    assert found is not None and found.keys == (KEYFRAME.key,) and "has stalled" in found.reason
    only = plan_way(STEPS, Version(6), LINK, lost)
    assert only is not None and only.keys == (STEPS[6].key, STEPS[7].key), "there is no other way to version 8"
    older = plan_way([*STEPS, offer(None, 7, 6e8)], Version(6), LINK, {STEPS[7].key})
    assert older is not None and older.keys[-1] == STEPS[7].key, "version 7 is not as far"
