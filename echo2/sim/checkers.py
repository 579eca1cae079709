"""The invariants of a simulated run, checked from outside by what the world's observers (observer, inspector) report, which no
daemon sees. A `Violation` names the invariant:

1. No token with lag above S is ever trained on.
2. A rollout is trained at most once; a finished, admitted rollout is not lost.
3. A worker's weights are bit-identical to the version it claims, or it does not generate under that version.
4. Applying a version is atomic.
5. Any process can be killed at any moment and come back; the run goes on.
6. Once faults stop, every active worker reaches the newest version and the learner makes progress.
7. No wait is unbounded and none is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import Rollout, VersionSpan
from echo2.broadcast.artifact import ArtifactKey
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Insertion, TurnOf, evaluated_version, root_of
from echo2.sim.tiny_model import FINGERPRINT_KEY, logprobs_of
from echo2.weights import HostWeights

RolloutName = tuple[GroupId, int]


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: int, text: str) -> None:
        super().__init__(f"invariant {invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The sampled tokens of one turn, under the group ID with which it was leased."""

    group_id: GroupId
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]


def turns_of(rollout: Rollout, insertions: Sequence[Insertion]) -> list[SampledTurn]:
    """Splits a multi-turn rollout into its turns: each insertion by the task world begins a new one."""
    versions = [span.version for span in rollout.version_spans for _ in range(span.count)]
    cuts = [0, *(insertion.position for insertion in insertions), len(versions)]
    turns = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        spans = tuple(VersionSpan(version, 1) for version in versions[begin:end])
        name, index = TurnOf(rollout.group_id, rollout.index, number).group_id, 0 if number else rollout.index
        turns.append(SampledTurn(name, index, rollout.token_ids[begin:end], rollout.logprobs[begin:end], spans))
    return turns


class Truth:
    """State and checks of the invariants. Every check counts in `checks` and raises `Violation` if it fails.

    `liars`: dishonest machines, whose reports are not checked; `liar_ids`: their peer IDs; `tainted`: groups ever leased to
    one of them.
    """

    def __init__(self, staleness_bound: int) -> None:
        self.staleness_bound = staleness_bound
        self.fingerprints: dict[Version, int] = {}
        self.liars: set[str] = set()
        self.liar_ids: set[str] = set()
        self.tainted: set[GroupId] = set()
        self.checks: Counter[int] = Counter()
        self.step = Step(0)
        self._trained_at: dict[GroupId, Step] = {}
        self._models: dict[Step, tuple[tuple[GroupId, ...], int]] = {}
        self._acknowledged: set[RolloutName] = set()
        self._dropped: set[GroupId] = set()

    def check(self, invariant: int, holds: bool, text: str) -> None:
        """Counts a check of an invariant."""
        self.checks[invariant] += 1
        if not holds:
            raise Violation(invariant, text)

    # ---- versions

    def published(self, version: Version, fingerprint: int) -> None:
        """The learner has published a version: its fingerprint must never change."""
        known = self.fingerprints.setdefault(version, fingerprint)
        self.check(5, known == fingerprint, f"version {version} was {known:016x} and is {fingerprint:016x} now")

    def committed(self, who: str, host: HostWeights) -> None:
        """A worker's host copy has moved to another version: checks its bits, not what it reports."""
        version = host.version
        assert version is not None, "what was committed has a version"
        found = HostWeights.from_tensors(host.tensors(), version, FINGERPRINT_KEY, copy=False).fingerprint()
        expected = self.fingerprints.get(version)
        self.check(4, found == expected, f"the host copy of {who} at version {version} has fingerprint {found:016x}")

    def reported(self, who: str, segments: Sequence[Rollout]) -> None:
        """A worker has sent tokens: each must have been sampled by the version that its span names."""
        if who in self.liars:
            return
        for segment in segments:
            if segment.group_id in self.tainted:
                continue
            self._check_tokens(who, segment.group_id, segment.index, segment.offset, segment)
            exact = evaluated_version(segment.group_id)
            others = {span.version for span in segment.version_spans} - {exact}
            self.check(3, exact is None or not others, f"{who} evaluates version {exact} by tokens of {others}")

    def _check_tokens(
        self, who: str, group_id: GroupId, index: int, offset: int, tokens: Rollout | SampledTurn
    ) -> None:
        position = 0
        for span in tokens.version_spans:
            fingerprint = self.fingerprints.get(span.version)
            self.check(3, fingerprint is not None, f"{who}: version {span.version} was never published")
            for _ in range(span.count):
                token = tokens.token_ids[position]
                expected = logprobs_of(fingerprint or 0, group_id, offset + position)[token]
                where = f"{who}: token {offset + position} of rollout {index} of {group_id}"
                text = f"{where} was not sampled by version {span.version}"
                self.check(3, tokens.logprobs[position] == expected, text)
                position += 1

    def accused(self, worker_id: PeerId, reason: str) -> None:
        self.check(2, worker_id in self.liar_ids, f"{worker_id} is honest and accused: {reason}")

    def shunned(self, who: str, worker_id: PeerId) -> None:
        """The coordinator gives a worker no leases for a while, because it claims progress that never arrives."""
        self.check(6, worker_id in self.liar_ids, f"{who} is honest and shunned")

    # ---- training

    def acknowledged(self, group_id: GroupId, index: int) -> None:
        """The learner has acknowledged to a worker that it durably holds this finished rollout."""
        self._acknowledged.add((group_id, index))

    def dropped(self, group_id: GroupId) -> None:
        """The learner has closed a group without training on it."""
        self._dropped.add(group_id)

    def trained(self, batch: Batch, fingerprint: int) -> None:
        """The learner has trained a step, possibly again after a restart."""
        groups = tuple(group.spec.group_id for group in batch.groups)
        known = self._models.get(batch.step)
        if known is not None:
            self.check(2, known[0] == groups, f"step {batch.step} trained {known[0]} and now trains {groups}")
            self.check(5, known[1] == fingerprint, f"step {batch.step} gave other weights when trained again")
        self._models[batch.step] = (groups, fingerprint)
        for group in batch.groups:
            name = group.spec.group_id
            at = self._trained_at.setdefault(name, batch.step)
            self.check(2, at == batch.step, f"group {name} was trained at step {at} and again at step {batch.step}")
            is_evaluation = evaluated_version(name) is not None
            self.check(2, not is_evaluation, f"group {name} of an evaluation is trained at step {batch.step}")
            for span in (span for rollout in group.rollouts for span in rollout.version_spans):
                text = f"a token of version {span.version} is trained at step {batch.step}, S = {self.staleness_bound}"
                self.check(1, batch.step - span.version <= self.staleness_bound, text)
            for number, rollout in enumerate(group.rollouts):
                for turn in turns_of(rollout, group.insertions[number] if group.insertions else ()):
                    if turn.group_id not in self.tainted:
                        self._check_tokens("the learner", turn.group_id, turn.index, 0, turn)
        self.step = max(self.step, Step(batch.step + 1))

    def learner_restored(self, groups: OpenGroups) -> None:
        """A learner has restarted: every rollout that it acknowledged must be trained on, dropped for a reason, or still held."""
        step = groups.next_step
        self.check(2, step >= self.step, f"the learner comes back at step {step}, it had reached {self.step}")
        self.nothing_is_lost(groups, with_evaluations=True)

    def nothing_is_lost(self, groups: OpenGroups, *, with_evaluations: bool = False) -> None:
        """Checks that every acknowledged rollout is trained on, dropped or held. Evaluations' are held until they are complete."""
        for group_id, index in sorted(self._acknowledged):
            root = root_of(group_id)
            if evaluated_version(group_id) is not None and not with_evaluations:
                continue
            if root in self._trained_at or not self._dropped.isdisjoint((group_id, root)):
                continue
            group = groups.groups.get(group_id)
            is_there = group is not None and group.rollouts[index].is_finished
            self.check(2, is_there, f"rollout {index} of {group_id} was admitted and is not there any more")

    # ---- processes and waits

    def waits(self, who: str, is_idle: bool, text: str) -> None:
        """An idle daemon must say what it waits for."""
        self.check(7, bool(text) or not is_idle, f"{who} does nothing and does not say what it waits for")

    def waits_since(self, who: str, seconds: float, limit_s: float, what: str) -> None:
        self.check(7, seconds <= limit_s, f"{who} has waited {seconds:.1f} s for {what}; the limit is {limit_s} s")

    def asks(self, who: str, unasked: Collection[ArtifactKey]) -> None:
        """A worker must request every artifact that it lacks on its way to the newest version. `unasked`: those it does not."""
        self.check(7, not unasked, f"{who} lacks {len(unasked)} artifacts of its way and does not ask for them")

    def agree(self, unknown: Collection[GroupId], closed: Collection[GroupId]) -> None:
        """Learner and coordinator must agree. `unknown`: groups the learner waits for that the coordinator does not know;
        `closed`: groups the learner has closed that the coordinator still has."""
        self.check(7, not unknown, f"the learner waits for {sorted(unknown)}, of which the coordinator does not know")
        self.check(7, not closed, f"the coordinator still gives out {sorted(closed)}, which the learner has closed")
