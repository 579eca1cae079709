"""Who of the seekers a group goes to: as if all were weighed for each group, at the cost of a look at the first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.coordinator import lease_events as le
from echo2.coordinator.lease_book import LeaseBook
from echo2.coordinator.lease_events import GroupPhase, OpenGroup, Seeker
from echo2.coordinator.lease_seekers import LeaseRules, Ranking

PLACES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)


@given(PLACES, st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["moved", "drop"])), max_size=30))
def test_ranking_stays_sorted_whatever_is_given_and_whoever_leaves(places, happens) -> None:
    workers = {PeerId(f"w{number}"): place for number, place in enumerate(places)}
    load = dict.fromkeys(workers, 0.0)
    members = {w: Seeker(1, Version(0), place[1]) for w, place in workers.items()}
    ranking = Ranking(members, lambda w: (workers[w][0] + load[w], float(workers[w][1]), w))
    for number, what in happens:
        worker = PeerId(f"w{number}")
        if worker not in members:
            continue
        if what == "moved":
            load[worker] += 2.0
            ranking.moved(worker)
        else:
            ranking.drop(worker)
        assert list(ranking) == sorted(members, key=lambda w: (workers[w][0] + load[w], workers[w][1], w))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([None, 0, 5]),
)
def test_group_goes_to_the_best_of_all_who_may_have_it(workers, preferred) -> None:
    book = LeaseBook(LeaseRules(4, 30.0))
    seekers = book.seekers
    seekers.now = 10.0
    group = OpenGroup(GroupSpec(GroupId("g"), (1,), 4, SamplingParams(max_new_tokens=8), 8), GroupPhase.QUEUED, 0.0)
    for number, (leases, since, version, is_avoided) in enumerate(workers):
        worker = PeerId(f"w{number}")
        seekers.allow(worker, True)
        seekers.wanting[worker] = Seeker(4, Version(version), float(since))
        book._of_worker[worker] = set(range(leases))
        if is_avoided:
            group.avoid[worker] = 20.0
    group.preferred = None if preferred is None else PeerId(f"w{preferred}")
    may = [
        (PeerId(f"w{number}") != group.preferred, leases, since, PeerId(f"w{number}"))
        for number, (leases, since, version, is_avoided) in enumerate(workers)
        if not is_avoided and version >= 4
    ]
    assert seekers.best(group, seekers.ranked(seekers.open())) == (min(may)[3] if may else None)


def test_a_wish_asks_about_no_other_worker_and_about_none_while_nothing_waits(monkeypatch) -> None:
    book, asked = LeaseBook(LeaseRules(4, 30.0)), []
    for number in range(50):
        book.handle(le.WorkerAllowed(PeerId(f"w{number}"), True), 0.0)
        book.handle(le.RolloutsWanted(PeerId(f"w{number}"), 4, Version(0)), 0.0)
    has_room = type(book.seekers).has_room
    monkeypatch.setattr(
        type(book.seekers), "has_room", lambda self, worker: asked.append(worker) or has_room(self, worker)
    )
    book.handle(le.RolloutsWanted(PeerId("w7"), 4, Version(0)), 1.0)
    assert asked == []
    too_new = GroupSpec(GroupId("g"), (1,), 4, SamplingParams(max_new_tokens=8), 8)
    book.handle(le.GroupsOffered((too_new,)), 1.0)
    asked.clear()
    book.handle(le.RolloutsWanted(PeerId("w7"), 4, Version(1)), 1.5)
    assert set(asked) <= {"w7"}
