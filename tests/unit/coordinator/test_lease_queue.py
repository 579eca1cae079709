from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import GroupSpec, SamplingParams, Work
from echo2.coordinator.lease_events import GroupPhase, OpenGroup
from echo2.coordinator.lease_queue import LeaseQueue, may_take

BOUND = 2
OFFERS = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12)


def groups_of(offers: list[tuple[bool, int]]) -> list[OpenGroup]:
    made = []
    for number, (is_exam, at) in enumerate(offers):
        work, exact = (Work.EVALUATE, Version(at)) if is_exam else (Work.TRAIN, None)
        spec = GroupSpec(GroupId(f"g{number}"), (1,), 1, SamplingParams(), at, work, exact)
        made.append(OpenGroup(spec, GroupPhase.QUEUED, 0.0))
    return made


@given(OFFERS, st.lists(st.integers(0, 8).map(Version), max_size=4), st.data())
def test_whoever_might_take_a_group_is_told_that_there_is_work(
    offers: list[tuple[bool, int]], versions: list[Version], data: st.DataObject
) -> None:
    queue, groups = LeaseQueue(BOUND), groups_of(offers)
    for group in groups:
        queue.add(group)
    for group in data.draw(st.lists(st.sampled_from(groups), unique_by=id)) if groups else []:
        queue.remove(group)
        groups.remove(group)
    assert len(queue) == len(groups) and (queue.first is None) == (not groups)
    fitting = {g.spec.group_id for g in groups if any(may_take(g.spec, version, BOUND) for version in versions)}
    assert queue.has_work_for(versions) == bool(fitting)
    exact = {g.spec.group_id for g in groups if g.spec.exact_version in versions}
    assert {one for version in queue.exact_versions(versions) for one in queue.exact(version)} == exact
    paced = list(queue.paced())
    assert [step for step, _ in paced] == sorted(step for step, _ in paced)
    assert {group_id for _, group_id in paced} == {g.spec.group_id for g in groups if g.spec.exact_version is None}
