"""Lengths are learned from earlier groups of the prompt, of all prompts, and from what a group's siblings have."""

from __future__ import annotations

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.coordinator.leases import events as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.queue import PROMPTS_MAX, ExpectedLength
from echo2.coordinator.leases.seekers import LeaseRules


def spec(name: str, prompt: int, limit: int = 1000) -> GroupSpec:
    return GroupSpec(GroupId(name), (prompt,), 4, SamplingParams(max_new_tokens=limit), 0)


def test_guess_comes_from_the_prompt_else_from_all_and_never_beyond_the_limit() -> None:
    lengths = ExpectedLength()
    assert lengths.guess(spec("a", 1)) == 0
    lengths.learn(spec("a", 1), 400, 4)
    assert lengths.guess(spec("b", 1)) == 400
    assert lengths.guess(spec("b", 2)) == 400, "of all prompts"
    lengths.learn(spec("c", 2), 4 * 900, 4)
    assert lengths.guess(spec("d", 2)) == 3600
    assert lengths.guess(spec("d", 1)) == 400
    assert lengths.guess(spec("d", 2, limit=50)) == 200
    lengths.learn(spec("e", 1), 0, 0)
    assert lengths.guess(spec("d", 1)) == 400


def test_what_a_worker_claims_beyond_the_limit_is_soon_forgotten() -> None:
    lengths = ExpectedLength()
    lengths.learn(spec("a", 1, limit=1000), 1 << 60, 1)
    for number in range(12):
        lengths.learn(spec(f"b{number}", 1, limit=1000), 10, 1)
    assert lengths.guess(spec("c", 2, limit=1000)) < 4 * 30


def test_what_is_left_counts_unfinished_siblings_and_goes_on_past_the_expectation() -> None:
    lengths = ExpectedLength()
    lengths.learn(spec("a", 1), 400, 4)
    assert lengths.rest(spec("b", 1), 0, 0) == 400
    assert lengths.rest(spec("b", 1), 240, 1) == 3 * 40
    assert lengths.rest(spec("b", 1), 800, 3) == 100, "200 each, twice the expectation: half as many again"
    assert lengths.rest(spec("b", 1, limit=210), 800, 3) == 10
    assert lengths.rest(spec("b", 1), 800, 4) == 0


def test_memory_is_bounded() -> None:
    lengths = ExpectedLength()
    for prompt in range(PROMPTS_MAX + 10):
        lengths.learn(spec("a", prompt), 4, 4)
    assert len(lengths._by_prompt) == PROMPTS_MAX


def test_of_two_continuations_the_one_with_more_to_go_is_leased_first() -> None:
    book = LeaseBook(LeaseRules(4, 60.0))
    book.lengths.learn(spec("earlier", 9), 4 * 500, 4)
    book.handle(le.WorkerAllowed(PeerId("w"), True), 0.0)
    book.handle(le.GroupsOffered((spec("near", 1), spec("far", 2))), 0.0)
    for grant in book.handle(le.RolloutsWanted(PeerId("w"), 8, Version(0)), 0.0):
        if isinstance(grant, le.Grant):
            tokens = 4 * 480 if grant.group.group_id == "near" else 4 * 10
            book.handle(le.Progressed(PeerId("w"), grant.lease_id, 0, tokens), 1.0)
    book.handle(le.WorkerLost(PeerId("w"), "gone"), 2.0)
    book.handle(le.WorkerAllowed(PeerId("x"), True), 2.0)
    actions = book.handle(le.RolloutsWanted(PeerId("x"), 4, Version(0)), 2.0)
    assert [one.group.group_id for one in actions if isinstance(one, le.Grant)] == ["far"]
