"""Keeps the rollouts of the newest steps, for operators to look at.

Guarantees: keeps at most `tokens_max` tokens, about a quarter of them from one step; from a larger step, every n-th rollout.
After a restart, it is empty. Leaves to others: texts, messages (runtime/showing).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from echo2.base.ids import PeerId, Step
from echo2.base.rollout import VersionSpan
from echo2.learner.batch import Batch, TrainGroup

TOKENS_KEPT_MAX = 2 << 20
"""8 bytes per token, in host memory."""
STEP_SHARE = 4
"""One step gets 1/4 of the tokens kept."""


@dataclass(frozen=True, slots=True)
class SeenRollout:
    """A rollout as step number `step` (counted from 1) trained on it: only the sampled tokens, all turns concatenated."""

    rollout_id: str
    step: Step
    reward: float
    prompt_token_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    peer_ids: tuple[PeerId, ...]

    @property
    def size(self) -> int:
        return len(self.token_ids) + len(self.prompt_token_ids)


class RecentRollouts:
    """Kept rollouts, newest first. `add` each batch that was trained on."""

    def __init__(self, tokens_max: int = TOKENS_KEPT_MAX) -> None:
        self._tokens_max = tokens_max
        self._kept: deque[SeenRollout] = deque()
        self._by_id: dict[str, SeenRollout] = {}
        self._size = 0

    def add(self, batch: Batch) -> None:
        places = [(group, index) for group in batch.groups for index in range(len(group.rollouts))]
        total = sum(_size(group, index) for group, index in places)
        every = max(1, -(-total * STEP_SHARE // self._tokens_max))
        for group, index in islice(places, 0, None, every):
            if _size(group, index) * STEP_SHARE <= self._tokens_max:
                self._keep(_seen(batch.step, group, index))

    def newest(self, count: int) -> list[SeenRollout]:
        return list(islice(self._kept, count))

    def __getitem__(self, rollout_id: str) -> SeenRollout:
        """Raises KeyError if the rollout is not kept."""
        return self._by_id[rollout_id]

    def _keep(self, seen: SeenRollout) -> None:
        if seen.rollout_id in self._by_id:  # the step was trained again after a restart
            return
        self._kept.appendleft(seen)
        self._by_id[seen.rollout_id] = seen
        self._size += seen.size
        while self._size > self._tokens_max:
            dropped = self._kept.pop()
            self._size -= dropped.size
            del self._by_id[dropped.rollout_id]


def _size(group: TrainGroup, index: int) -> int:
    return len(group.rollouts[index].token_ids) + len(group.spec.prompt_token_ids)


def _seen(step: Step, group: TrainGroup, index: int) -> SeenRollout:
    rollout = group.rollouts[index]
    senders = group.senders[index] if group.senders else ()
    return SeenRollout(
        f"{rollout.group_id}/{rollout.index}",
        Step(step + 1),
        group.rewards[index],
        array("i", group.spec.prompt_token_ids),
        array("i", rollout.token_ids),
        array("f", rollout.logprobs),
        rollout.version_spans,
        rollout.finish_reason.value,
        tuple(dict.fromkeys(sent.peer_id for sent in senders)),
    )


def versions_of(seen: SeenRollout) -> Iterator[int]:
    """The version of each sampled token."""
    for span in seen.version_spans:
        yield from (span.version,) * span.count
