"""Estimates how many tokens a running rollout will still take, from finished rollouts of its group and of this worker.

A rollout that has reached `length` resembles only those that got at least that far, so the estimate is the mean of (t - length)
over finished lengths t > length. Siblings answer the same prompt and weigh more than other rollouts. If no finished rollout got
that far, the rollout is taken to be half way (as likely as not for a heavy tail), within its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SIBLING_WEIGHT = 4.0


def expected_remaining(length: int, limit: int, siblings: Sequence[int], others: Iterable[int]) -> int:
    """Estimated remaining tokens, from 1 to limit - length, of an unfinished rollout with `length` of at most `limit` tokens.

    `siblings`, `others`: lengths of finished rollouts of its group and of recent rollouts of this worker.
    """
    room = max(limit - length, 1)
    weight = 0.0
    total = 0.0
    for longer, each in ((siblings, SIBLING_WEIGHT), (others, 1.0)):
        for finished in longer:
            if finished > length:
                weight += each
                total += each * (finished - length)
    guess = total / weight if weight else max(length, 1)
    return max(1, min(room, round(guess)))
