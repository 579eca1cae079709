"""Runs the evaluations ("exams") one at a time, and keeps the next one that is due. Part of the batcher.

Guarantees: every group that an exam opens, closes or answers is reported as an action, as for training groups; an exam
without progress ends. Leaves to others: the exam itself (exam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec
from echo2.learner.batch import TrainGroup
from echo2.learner.batcher_events import (
    Action,
    Answered,
    AskQuestions,
    CallAsked,
    CallOpened,
    Close,
    Drive,
    EpisodeEnded,
    Examined,
    Keep,
    OfferGroups,
    QuestionsDrawn,
    Rewarded,
    Score,
)
from echo2.learner.episodes import is_later_turn, root_of
from echo2.learner.exam import BEHIND_VERSIONS, MOVES_MAX, OVERTAKEN_PATIENCE, Exam, ExamResult, ExamRules
from echo2.learner.group import Group, is_driven, is_driven_root
from echo2.learner.history import GroupDropped, Opened
from echo2.learner.shelf import Shelf

OVER = "evaluation over"


class Examining:
    """`training`: the shelf of the training groups."""

    def __init__(self, rules: ExamRules, training: Shelf) -> None:
        self.rules = rules
        self._training = training
        self._exam: Exam | None = None
        self._due: Version | None = None
        self._asked = 0  # questions asked for but not drawn yet
        self._left_after: list[Version] = []  # published versions newer than the exam's
        self._is_ended = False

    @property
    def shelves(self) -> list[Shelf]:
        return [] if self._exam is None else [self._exam.shelf]

    def home_of(self, group_id: GroupId) -> Shelf | None:
        """The shelf of the running exam, if the group belongs to it; else None."""
        return self._exam.shelf if self._exam is not None and self._exam.holds(group_id) else None

    @property
    def waits_for(self) -> str:
        return "" if self._exam is None else self._exam.waits_for

    # ---- events

    def resumed(self, exams: Mapping[Version, Sequence[Group]]) -> list[Action]:
        """Resumes the newest exam that the journal restored and drops the groups of older ones."""
        actions: list[Action] = []
        for version in sorted(exams):
            if version == max(exams) and self.rules.questions:
                self._exam = Exam(self.rules, version, self._training)
                actions += self._taken_back(self._exam, exams[version])
            else:
                actions += [Keep(GroupDropped(group.spec.group_id)) for group in exams[version]]
        return actions

    def _taken_back(self, exam: Exam, groups: Sequence[Group]) -> list[Action]:
        """Restores the groups; finished rollouts are scored again. Agents did not survive the restart, so they play again."""
        if any(is_driven(group.spec.group_id) for group in groups) or self.rules.is_driven:
            roots = [group for group in groups if not is_later_turn(group.spec.group_id)]
            actions: list[Action] = [Keep(GroupDropped(group.spec.group_id)) for group in groups]
            return [*actions, *self._opened(exam, exam.open([root.draw.again() for root in roots]))]
        exam.take_back(groups)
        return [
            Score(last)
            for group_id, group in exam.shelf.groups.items()
            for index in range(0 if is_later_turn(group_id) else len(group.rollouts))
            if (last := exam.shelf.turns(group_id, index)[-1].rollout).is_finished
        ]

    def due(self, version: Version) -> list[Action]:
        """Starts the evaluation of `version`; if one is running, keeps the version as the next, in place of any other."""
        if not self.rules.questions or self._is_ended:
            return []
        if self._exam is None:
            self._begin(Exam(self.rules, version, self._training))
        elif version > self._exam.version:
            self._due = version
        return []

    def drawn(self, event: QuestionsDrawn) -> list[Action]:
        self._asked = 0
        if self._exam is None or self._exam.version != event.version:
            return []
        return self._opened(self._exam, self._exam.open(event.draws))

    def asked_call(self, event: CallAsked) -> list[Action]:
        """Opens a call of an agent that plays a question."""
        assert self._exam is not None, "calls of an exam come to it"
        spec = self._exam.shelf.open_call(
            event.root, event.chain, event.prompt_token_ids, event.sampling, event.temperature
        )
        return [CallOpened(None)] if spec is None else [CallOpened(spec.group_id), *self._opened(self._exam, [spec])]

    def ended_episode(self, event: EpisodeEnded) -> list[Action]:
        assert self._exam is not None, "episodes of an exam come to it"
        answered = self._exam.end_episode(event.root, event.chains, event.reward, event.parts, is_final=event.is_final)
        return self._closed(self._exam, answered)

    def rewarded(self, event: Rewarded) -> list[Action]:
        assert self._exam is not None, "rewards of an exam come to it"
        return self._closed(self._exam, self._exam.reward(event.group_id, event.index, event.reward, event.parts))

    def _closed(self, exam: Exam, answered: TrainGroup | None) -> list[Action]:
        if answered is None:
            return []
        return [Answered(answered), Close(tuple(exam.shelf.family(answered.spec.group_id)), "complete")]

    def version_left(self, version: Version) -> None:
        if self._exam is not None and version > self._exam.version:
            self._left_after.append(version)

    def drop_sent_by(self, peer_id: PeerId) -> None:
        if self._exam is not None:
            self._exam.drop_sent_by(peer_id)

    def tick(self, now: float) -> list[Action]:
        """Moves an exam without progress, or one overtaken before its first sample, to the newest version, or gives it up.

        Workers report the tokens of a lease every second, so an overtaken exam without new tokens has no worker: its version was
        replaced everywhere. Between an agent's calls, and while only rewards are missing, no token comes either: then it gets the
        whole patience.
        """
        exam = self._exam
        if exam is None:
            return []
        idle_s, is_begun = exam.idle_s(now), exam.is_begun
        is_overtaken = len(self._left_after) >= BEHIND_VERSIONS
        patience_s = self.rules.patience_s
        if is_overtaken and not self.rules.is_driven and not exam.is_sampled:
            patience_s *= OVERTAKEN_PATIENCE
        if idle_s < patience_s and (is_begun or not is_overtaken):
            return []
        newest = self._left_after[-1] if self._left_after else None
        if newest is None or exam.moves >= MOVES_MAX:
            reason = f"nothing of the evaluation of version {exam.version} came for {idle_s:.0f} s: no worker is at it"
            return [*self._over(exam), *self._examined(exam.given_up(reason))]
        actions = self._over(exam)
        self._begin(exam.moved(newest, is_begun))
        return actions

    def ended(self) -> None:
        """Stops asking questions."""
        self._is_ended = True

    # ---- what follows from any event

    def settled(self) -> list[Action]:
        exam = self._exam
        if exam is None:
            return []
        actions: list[Action] = []
        closures = exam.shelf.take_closures()
        actions += [Keep(GroupDropped(closure.group_id)) for closure in closures]
        for reason in dict.fromkeys(closure.reason for closure in closures):
            actions.append(Close(tuple(c.group_id for c in closures if c.reason == reason), reason))
        actions += self._opened(exam, exam.open([c.retry for c in closures if c.retry is not None]))
        numbers = exam.wanted()
        if numbers and not self._asked and not self._is_ended:
            self._asked = len(numbers)
            actions.append(AskQuestions(exam.version, numbers))
        if exam.is_answered:
            actions += [*self._over(exam), *self._examined(exam.result())]
        return actions

    def _begin(self, exam: Exam) -> None:
        self._exam, self._asked, self._left_after = exam, 0, []

    def _opened(self, exam: Exam, specs: Sequence[GroupSpec]) -> list[Action]:
        kept: list[Action] = [Keep(Opened(exam.shelf.groups[spec.group_id].draw, spec)) for spec in specs]
        if self._is_ended:
            return kept
        driven = [spec for spec in specs if is_driven_root(spec.group_id)]
        kept += [Drive(spec, exam.shelf.groups[spec.group_id].draw) for spec in driven]
        offered = tuple(spec for spec in specs if spec not in driven)
        return [*kept, OfferGroups(offered)] if offered else kept

    def _over(self, exam: Exam) -> list[Action]:
        """Drops all groups of the exam and closes those not answered yet."""
        open_ids = tuple(group_id for group_id in exam.shelf.groups if root_of(group_id) not in exam.told)
        kept: list[Action] = [Keep(GroupDropped(group_id)) for group_id in exam.shelf.groups]
        return [*kept, Close(open_ids, OVER)] if open_ids else kept

    def _examined(self, result: ExamResult) -> list[Action]:
        due, self._due, self._exam = self._due, None, None
        if due is not None:
            self._begin(Exam(self.rules, due, self._training))
        follow = self.settled() if due is not None else []
        return [Examined(result), *follow]
