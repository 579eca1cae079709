"""Rollouts as they grow, and the gate at which tokens of unproven weights wait."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.rollouts.admission import problem_of_end
from echo2.worker.engines.engine import TokenChunk
from echo2.worker.rollouts import TokenGate, expected_remaining
from tests.unit.worker.test_leases import L1, Surroundings, group, held


def chunk(request_id: str, token: int, version: int, reason: FinishReason = FinishReason.UNFINISHED) -> TokenChunk:
    return TokenChunk(request_id, (token,), (-1.0,), (-1.0,), Version(version), reason)


class Desk:
    def __init__(self) -> None:
        self.passed: list[TokenChunk] = []
        self.spoiled: list[LeaseId] = []
        self.gate = TokenGate(self.passed.extend, self.spoiled.append)


def test_tokens_of_unproven_weights_wait_for_the_proof_and_others_do_not() -> None:
    desk = Desk()
    desk.gate.hold(Version(2))
    desk.gate.take([chunk("a/0", 1, 1), chunk("a/0", 2, 2), chunk("b/0", 3, 1)])
    assert [c.token_ids for c in desk.passed] == [(1,), (3,)]
    desk.gate.release()
    assert [c.token_ids for c in desk.passed] == [(1,), (3,), (2,)]


def test_tokens_of_no_version_are_thrown_away_with_all_that_follows_in_their_sequences() -> None:
    desk = Desk()
    desk.gate.hold(Version(2))
    desk.gate.take([chunk("a/0", 1, 2), chunk("a/1", 2, 2, FinishReason.STOP)])
    desk.gate.discard()
    assert desk.spoiled == ["a"]
    desk.gate.take([chunk("a/0", 5, 3), chunk("b/0", 6, 3), chunk("a/0", 7, 3, FinishReason.ABORTED)])
    assert [(c.request_id, c.token_ids, c.finish_reason) for c in desk.passed] == [
        ("a/1", (), FinishReason.ABORTED),
        ("b/0", (6,), FinishReason.UNFINISHED),
        ("a/0", (), FinishReason.ABORTED),
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["take", "proof", "wrong"])), max_size=40))
def test_no_token_of_wrong_weights_passes_and_sequences_have_no_gaps(steps: list[tuple[int, bool, str]]) -> None:
    desk = Desk()
    version, count = 0, {0: 0, 1: 0, 2: 0}
    wrong: set[int] = set()
    for which, begins_swap, what in steps:
        if begins_swap:
            desk.gate.release()
            version += 1
            desk.gate.hold(Version(version))
        if what == "take":
            desk.gate.take([chunk(f"l/{which}", count[which], version)])
            count[which] += 1
        elif what == "proof":
            desk.gate.release()
        elif desk.gate._unproven is not None:
            wrong.add(version)
            desk.gate.discard()
            version += 1
    desk.gate.release()
    for which in count:
        tokens = [t for c in desk.passed if c.request_id == f"l/{which}" for t in c.token_ids]
        assert tokens == list(range(len(tokens)))
    assert not [c for c in desk.passed if c.token_ids and c.version in wrong]


LENGTHS = st.lists(st.integers(0, 500), max_size=20)


@given(length=st.integers(0, 600), room=st.integers(1, 600), siblings=LENGTHS, others=LENGTHS)
def test_the_guess_is_at_least_one_token_and_at_most_the_room(
    length: int, room: int, siblings: list[int], others: list[int]
) -> None:
    assert 1 <= expected_remaining(length, length + room, siblings, others) <= room


def test_siblings_weigh_more_than_strangers_and_only_longer_ones_count() -> None:
    assert expected_remaining(10, 1000, [20, 20], []) == 10
    assert expected_remaining(10, 1000, [20], [60]) == 18
    assert expected_remaining(50, 1000, [20, 20], [60]) == 10
    assert expected_remaining(64, 1000, [20, 20], [60]) == 64


SPEC = replace(group("g", 1, 20), sampling=replace(
    group("g").sampling, max_new_tokens=20, stop_strings=(b"</a>",), stop_piece_ids=(5, 6), stop_pieces=(b"x</", b"a>"))
)  # fmt: skip


def test_tokens_behind_a_stop_string_are_cut_off_and_the_engine_is_stopped() -> None:
    it = Surroundings().begin()
    it.grant(L1, SPEC)
    it.sample("l1/0", 2, 6, 5)
    assert it.running
    it.sample("l1/0", 6, 3, 4)
    assert not it.running
    it.chunks = [TokenChunk("l1/0", (8,), (-1.0,), (-1.0,), Version(0), FinishReason.UNFINISHED), *it.chunks]
    it.deliver()  # was on its way meanwhile
    it.at(3.0)
    (segment,) = it.reports[L1]
    assert segment.token_ids == (2, 6, 5, 6) and segment.finish_reason is FinishReason.STOP
    it.judge(L1)
    assert L1 in it.ended


def test_whoever_goes_on_with_a_rollout_that_ended_with_a_stop_string_samples_nothing_behind_it() -> None:
    it = Surroundings().begin()
    it.grant(L1, SPEC, is_continuation=True)
    it.leases.on_partials(L1, [held("g", 0, (5, 6))])
    assert not it.running


def test_the_learner_refuses_what_no_stop_string_ends() -> None:
    def problem(tokens: tuple[int, ...], reason: FinishReason, held: int = 0) -> str | None:
        numbers = (-1.0,) * len(tokens)
        spans = (VersionSpan(Version(0), len(tokens)),)
        return problem_of_end(Rollout(SPEC.group_id, 0, tokens, numbers, numbers, spans, reason), held, SPEC)

    assert problem((2, 5, 6), FinishReason.STOP) is None and problem((2, 9), FinishReason.STOP) is None
    assert "expected a stop token" in str(problem((2, 5, 3), FinishReason.STOP))
    assert "first stop string, got 1 tokens behind it" in str(problem((2, 5, 6, 3), FinishReason.UNFINISHED, held=3))
