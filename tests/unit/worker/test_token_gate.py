from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import FinishReason
from echo2.worker.engine import TokenChunk
from echo2.worker.token_gate import TokenGate


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
