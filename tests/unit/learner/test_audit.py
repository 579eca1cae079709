"""Which tokens are scored under which version, and what equal siblings are worth."""

from __future__ import annotations

import math

import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.learner.audit import TokenScores, copies, examined, pieces_of

A, B = PeerId("a"), PeerId("b")


def rollout_of(spans: list[tuple[int, int]], index: int = 0, tokens: tuple[int, ...] = ()) -> Rollout:
    count = sum(length for _, length in spans)
    numbers = tuple(-float(n) for n in range(count))
    token_ids = tokens or tuple(range(count))
    version_spans = tuple(VersionSpan(Version(version), length) for version, length in spans)
    return Rollout(GroupId("g"), index, token_ids, numbers, numbers, version_spans, FinishReason.STOP)


def test_pieces_end_where_version_or_sender_changes() -> None:
    pieces = pieces_of(rollout_of([(4, 3), (6, 4)]), [(A, 5), (B, 2)])
    assert [(p.worker, p.version, p.start, p.stop) for p in pieces] == [(A, 4, 0, 3), (A, 6, 3, 5), (B, 6, 5, 7)]
    first = pieces_of(rollout_of([(4, 3), (6, 4)]), [(A, 5), (B, 2)], first_span_only=True)
    assert [(p.worker, p.version, p.start, p.stop) for p in first] == [(A, 4, 0, 3)]


def test_each_version_is_loaded_once_and_the_one_before_is_asked_too() -> None:
    asked: list[tuple[int, int]] = []

    def score(version: Version, rollout: Rollout, start: int, stop: int) -> TokenScores:
        asked.append((version, start))
        count = stop - start
        return TokenScores((float(version),) * count, (0.0,) * count, (0.0,) * count, (False,) * count)

    pieces = pieces_of(rollout_of([(2, 2), (4, 3), (6, 1)]), [(A, 6)])
    found = examined(pieces, [Version(4), Version(6)], score)
    assert [version for version, _ in asked] == sorted(version for version, _ in asked)
    assert [(e.piece.version, e.exact.logprobs[0], e.previous) for e in found] == [(4, 4.0, ()), (6, 6.0, (4.0,))]
    assert found[0].claimed == (-2.0, -3.0, -4.0)


def test_copies_count_for_as_much_as_they_were_unlikely() -> None:
    one, same, other = (rollout_of([(2, 3)], n, tokens) for n, tokens in enumerate([(1, 2, 3), (1, 2, 3), (1, 2, 4)]))
    logs = [(-1.0, -1.0, -1.0)] * 3
    assert copies([one, same, other], logs) == pytest.approx(math.exp(3.0) / 3)
    assert copies([one, other], logs[:2]) == 0.0
    assert copies([one], logs[:1]) == 1.0
