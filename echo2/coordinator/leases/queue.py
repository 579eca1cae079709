"""Queues the groups that wait for a worker, in the order in which they are handed out, and says which version may take which.

    exact (evaluation)   by the version that each needs: only for workers at exactly that version, before all training
    paced (training)     by consume step: only for workers that `staleness.may_begin`; within a step, continuations come first,
                         then the groups with the most expected tokens

Guarantees: matching skips whole ranges that no worker may take, without a look at each group: exact groups of other versions
and, because paced groups are sorted by step, all groups behind the first that is too new for every worker.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import GroupSpec
from echo2.coordinator.leases.lease import OpenGroup
from echo2.staleness.rule import may_begin

_Key = tuple[int, bool, float, GroupId]


def may_take(spec: GroupSpec, version: Version, staleness_bound: int) -> bool:
    """Whether a worker at `version` may be given the group."""
    if spec.exact_version is not None:
        return version == spec.exact_version
    return may_begin(version, spec.consume_step, staleness_bound)


@dataclass(slots=True)
class LeaseQueue:
    """The queue. A group's sort key is computed when it is added, so the fields that make up the key may change only while the
    group is not queued."""

    staleness_bound: int
    _paced: list[_Key] = field(default_factory=list)
    _exact: dict[Version, list[_Key]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: OpenGroup) -> None:
        exact = group.spec.exact_version
        insort(self._paced if exact is None else self._exact.setdefault(exact, []), _key(group))
        self._count += 1

    def remove(self, group: OpenGroup) -> None:
        exact, key = group.spec.exact_version, _key(group)
        keys = self._paced if exact is None else self._exact[exact]
        at = bisect_left(keys, key)
        assert keys[at] == key, f"group {key[3]} is queued under another key"
        del keys[at]
        self._count -= 1
        if exact is not None and not keys:
            del self._exact[exact]

    @property
    def paced_count(self) -> int:
        return len(self._paced)

    @property
    def has_exact(self) -> bool:
        return bool(self._exact)

    @property
    def first(self) -> GroupId | None:
        """The group at the front, for reports on why groups wait: training first, because evaluations may have to wait for their
        version anyway."""
        if self._paced:
            return self._paced[0][3]
        return min(self._exact.items())[1][0][3] if self._exact else None

    def exact_versions(self, versions: Collection[Version]) -> list[Version]:
        """The versions among `versions` that exact groups wait for, in order."""
        return sorted(self._exact.keys() & set(versions)) if self._exact else []

    def exact(self, version: Version) -> list[GroupId]:
        """Groups for workers at exactly this version, in order. They may be removed during the iteration."""
        return [key[3] for key in self._exact.get(version, ())]

    def paced(self) -> Iterator[tuple[int, GroupId]]:
        """Training groups with their consume steps, in order. They may be removed during the iteration."""
        for key in list(self._paced):
            yield key[0], key[3]

    def has_work_for(self, versions: Collection[Version]) -> bool:
        """Whether any queued group could be given to a worker at one of these versions."""
        if self._exact and not self._exact.keys().isdisjoint(versions):
            return True
        if not self._paced or not versions:
            return False
        return may_begin(max(versions), self._paced[0][0], self.staleness_bound)


def _key(group: OpenGroup) -> _Key:
    return (group.spec.consume_step, not group.is_continuation, -group.expected_tokens, group.spec.group_id)


PROMPTS_MAX = 20_000  # two megabytes; of larger data sets a prompt seldom comes twice
BLEND = 0.3  # the last five groups of a prompt make up five sixths of its average


def prompt_key(spec: GroupSpec) -> bytes:
    """A digest of the prompt, 16 bytes."""
    return hashlib.sha256(b",".join(b"%d" % token for token in spec.prompt_token_ids)).digest()[:16]


@dataclass(slots=True)
class ExpectedLength:
    """Guesses how many tokens a group will take. Longest first keeps the end of a step short, so the queue is ordered by this
    guess.

    Moving averages (exponential) of tokens per rollout, by prompt; the least recently used prompts are forgotten first."""

    _by_prompt: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _overall: float = 0.0

    def learn(self, spec: GroupSpec, tokens: int, rollouts: int) -> None:
        """Notes that `rollouts` finished completions of the prompt took `tokens` together. The numbers are a worker's claim, so the
        token limit bounds them."""
        if rollouts <= 0:
            return
        each = min(tokens / rollouts, float(spec.sampling.max_new_tokens))
        key = prompt_key(spec)
        before = self._by_prompt.pop(key, each)
        self._by_prompt[key] = before + BLEND * (each - before)
        self._overall = self._overall + BLEND * (each - self._overall) if self._overall else each
        while len(self._by_prompt) > PROMPTS_MAX:
            self._by_prompt.popitem(last=False)

    def guess(self, spec: GroupSpec) -> float:
        """Expected tokens of the whole group, bounded by the token limit."""
        each = self._by_prompt.get(prompt_key(spec), self._overall)
        return min(each, float(spec.sampling.max_new_tokens)) * spec.rollout_count

    def rest(self, spec: GroupSpec, tokens: int, finished_rollouts: int) -> float:
        """Expected tokens still to come in a group that holds `tokens`. An unfinished rollout is expected to reach the expected
        length; past that, to grow by half of what it has. The token limit bounds both."""
        unfinished = max(0, spec.rollout_count - finished_rollouts)
        held, each = tokens / spec.rollout_count, self.guess(spec) / spec.rollout_count
        left = each - held if held < each else held / 2
        return unfinished * max(0.0, min(left, spec.sampling.max_new_tokens - held))
