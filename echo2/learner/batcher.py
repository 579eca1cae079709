"""The only entry point to the learner's groups: `handle` takes an event and returns all actions that follow from it.

    opened --Reported--> sampled --Rewarded--> ready --BatchWanted--> trained
       |                    |   ^                 |
       |                  Said: the next turn     |
       '----------- stale, quarantined, ... ------'--> closed, maybe drawn again

Guarantees: the actions that `handle` returns report every closed group, offer again every group that is now due earlier, and
ask for as many prompts as the cap allows; callers need not poll for anything. Callers can read the groups (`held`), but
only `handle` changes them. Leaves to others: which tokens may be trained on (shelf), drawing prompts and tokenising
(runtime/prompts), rewards (tasks), carrying out the actions in order (runtime/intake).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import GroupSpec, Verdict
from echo2.learner.batcher_events import (
    AccuseWorker,
    Action,
    AnswerReport,
    AskPrompts,
    BatchWanted,
    CallAsked,
    CallGrown,
    CallOpened,
    CallSampled,
    CapPlanned,
    Close,
    Drive,
    EpisodeEnded,
    Event,
    ExamDue,
    ExamTick,
    Fared,
    Hand,
    Keep,
    OfferGroups,
    OffersEnded,
    PromptsDrawn,
    QuestionsDrawn,
    Reported,
    Resumed,
    Rewarded,
    Said,
    Score,
    TakenOver,
    Train,
    VersionLeft,
    WakeTrainer,
    WorkerBarred,
    WorkerReleased,
)
from echo2.learner.deliveries import Deliveries
from echo2.learner.episodes import Turn, is_later_turn
from echo2.learner.exam import ExamRules
from echo2.learner.examining import Examining
from echo2.learner.group import Draw, Group, is_driven, is_driven_root
from echo2.learner.history import EpisodeScored, Finished, GroupDropped, Opened, drawn_of
from echo2.learner.offers import OfferConfig, consume_step, groups_wanted
from echo2.learner.shelf import Closure, Counts, Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger


class Held(Protocol):
    """The read-only view of a shelf."""

    @property
    def config(self) -> ShelfConfig: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def next_step(self) -> Step: ...
    @property
    def published(self) -> Sequence[Version]: ...
    @property
    def groups(self) -> Mapping[GroupId, Group]: ...
    @property
    def in_flight_groups(self) -> int: ...
    @property
    def open_rollouts(self) -> int: ...
    @property
    def buffered_rollouts(self) -> int: ...
    @property
    def is_batch_ready(self) -> bool: ...
    def incomplete_specs(self) -> list[GroupSpec]: ...
    def held_tokens(self, group_id: GroupId) -> int: ...
    def turns(self, root: GroupId, index: int) -> list[Turn]: ...


class Batcher:
    """Takes ownership of `shelf`: no other code may change it. Offers nothing before `Resumed`."""

    def __init__(self, shelf: Shelf, offers: OfferConfig, exams: ExamRules | None = None) -> None:
        self._shelf = shelf
        self._exams = Examining(exams or ExamRules(), shelf)
        self.offers = offers
        self._cap_rollouts: int | None = None
        self._retries: deque[Draw] = deque()
        self._asked = 0
        self._is_offering = self._is_exhausted = False

    @property
    def held(self) -> Held:
        return self._shelf

    @property
    def deliveries(self) -> Deliveries:
        """What each worker delivered; reported to the coordinator from here."""
        return self._shelf.deliveries

    def group(self, group_id: GroupId) -> Group | None:
        """An open training or evaluation group, read-only; None if it is not open."""
        return self._home_of(group_id).groups.get(group_id)

    def turns(self, root: GroupId, index: int) -> list[Turn]:
        return self._home_of(root).turns(root, index)

    def lacking(self) -> list[tuple[GroupSpec, int]]:
        """Every group that still needs a worker, and how many of its tokens have arrived."""
        homes = [self._shelf, *self._exams.shelves]
        return [(spec, home.held_tokens(spec.group_id)) for home in homes for spec in home.incomplete_specs()]

    @property
    def exam_waits_for(self) -> str:
        """What the running evaluation is waiting for, as text; empty if none is running."""
        return self._exams.waits_for

    @property
    def is_short(self) -> bool:
        """Whether the prompts are exhausted and the groups in flight cannot fill another batch."""
        return self._is_exhausted and self._shelf.in_flight_groups < self.offers.groups_per_step

    def handle(self, event: Event) -> list[Action]:
        """Processes the event; returns the actions in the order in which they must be carried out."""
        return [*self._handled(event), *self._settled(), *self._exams.settled()]

    def _home_of(self, group_id: GroupId) -> Shelf:
        return self._exams.home_of(group_id) or self._shelf

    def _handled(self, event: Event) -> list[Action]:
        match event:
            case Resumed(exams):
                return [*self._resumed(), *self._exams.resumed(exams)]
            case Reported():
                return self._reported(event)
            case TakenOver(group_id, attempt):
                held = self._home_of(group_id).held_rollouts(group_id, attempt)
                return [Hand(None if held is None else tuple(held))]
            case Rewarded():
                return self._rewarded(event)
            case Said(before, token_ids):
                spec = self._home_of(before.root).open_turn(before, token_ids)
                return [] if spec is None else self._opened([spec])
            case CallAsked():
                return self._asked_call(event)
            case EpisodeEnded():
                return self._ended_episode(event)
            case PromptsDrawn(draws):
                return self._drawn(draws)
            case CapPlanned(rollouts):
                self._cap_rollouts = rollouts
            case VersionLeft(version):
                self._shelf.publish(version)
                self._exams.version_left(version)
            case WorkerBarred(peer_id):
                self._shelf.drop_sent_by(peer_id)
                self._exams.drop_sent_by(peer_id)
            case WorkerReleased(peer_id):
                self._shelf.untruths.forget(peer_id)
            case BatchWanted():
                return self._drawn_batch()
            case ExamDue(version):
                return self._exams.due(version)
            case QuestionsDrawn():
                return self._exams.drawn(event)
            case ExamTick(now):
                return self._exams.tick(now)
            case OffersEnded():
                self._is_offering = False
                self._exams.ended()
        return []

    # ---- events

    def _resumed(self) -> list[Action]:
        """Starts offering. Finished rollouts restored from the journal have no reward or next turn yet, so they are scored."""
        shelf = self._shelf
        self._is_offering = True
        shelf.drop_unfinished_episodes()
        shelf.drop_stale()
        # The journal has the steps that groups were first offered for. The specs are not offered here: the next hello sends them.
        shelf.move_up()
        actions: list[Action] = []
        for group_id, group in shelf.groups.items():
            if is_driven(group_id):
                continue
            for index in range(0 if is_later_turn(group_id) else len(group.rollouts)):
                last = shelf.turns(group_id, index)[-1].rollout
                if last.is_finished and index not in group.scored:
                    actions.append(Score(last))
        return actions

    def _reported(self, event: Reported) -> list[Action]:
        shelf = self._shelf
        verdicts = tuple(
            self._home_of(segment.group_id).receive(segment, event.attempt, event.sender) for segment in event.segments
        )
        actions: list[Action] = []
        for verdict in verdicts:
            group = self.group(verdict.group_id)  # None if a later segment of this report made the group stale
            if verdict.verdict is Verdict.ADMITTED and group is not None:
                rollout = group.rollouts[verdict.index]
                follows = CallSampled(rollout) if is_driven(verdict.group_id) else Score(rollout)
                actions += [Keep(Finished(rollout, group.senders.get(verdict.index, ()))), follows]
            elif verdict.verdict is Verdict.HELD and group is not None and is_driven(verdict.group_id):
                grown = group.rollouts[verdict.index]
                actions += (
                    [] if grown.is_finished else [CallGrown(grown)]
                )  # finished: by a later segment of this report
        # A duplicate is synced too: if the first acknowledgement was lost, the first copy may not be on disk yet.
        is_final = any(verdict.verdict in (Verdict.ADMITTED, Verdict.DUPLICATE) for verdict in verdicts)
        accused = [AccuseWorker(peer_id, text) for peer_id, text in shelf.untruths.take()]
        return [*actions, AnswerReport(verdicts, is_final), *accused]

    def _rewarded(self, event: Rewarded) -> list[Action]:
        if self._exams.home_of(event.group_id) is not None:
            return self._exams.rewarded(event)
        group = self._shelf.groups.get(event.group_id)
        self._shelf.reward(event.group_id, event.index, event.reward)
        return _fared(group)

    def _asked_call(self, event: CallAsked) -> list[Action]:
        if self._exams.home_of(event.root) is not None:
            return self._exams.asked_call(event)
        spec = self._shelf.open_call(event.root, event.chain, event.prompt_token_ids, event.sampling)
        return [CallOpened(None)] if spec is None else [CallOpened(spec.group_id), *self._opened([spec])]

    def _ended_episode(self, event: EpisodeEnded) -> list[Action]:
        if self._exams.home_of(event.root) is not None:
            return self._exams.ended_episode(event)
        group = self._shelf.groups.get(event.root)
        if group is None:
            return []
        self._shelf.end_episode(event.root, event.chains, event.reward, is_final=event.is_final)
        counted = tuple(chain for chain, calls in event.chains.items() if calls and event.is_final)
        lost = tuple(chain for chain in event.chains if chain not in counted)
        return [Keep(EpisodeScored(event.root, counted, event.reward, lost, event.is_final)), *_fared(group)]

    def _drawn(self, draws: tuple[Draw, ...]) -> list[Action]:
        self._is_exhausted = self._is_exhausted or len(draws) < self._asked
        self._asked = 0
        specs = []
        for draw in draws:
            step = consume_step(self.offers, self._shelf.next_step, self._shelf.in_flight_groups)
            specs.append(self._shelf.open_group(draw, step))
        return self._opened(specs)

    def _drawn_batch(self) -> list[Action]:
        batch = self._shelf.draw_batch()
        return [] if batch is None else [Keep(drawn_of(batch)), Train(batch)]

    # ---- what follows from any event

    def _opened(self, specs: Sequence[GroupSpec]) -> list[Action]:
        homes = [(self._home_of(spec.group_id), spec) for spec in specs]
        kept: list[Action] = [Keep(Opened(home.groups[spec.group_id].draw, spec)) for home, spec in homes]
        driven = [spec for spec in specs if is_driven_root(spec.group_id)]
        kept += [Drive(spec, self._shelf.groups[spec.group_id].draw) for spec in driven]
        offered = tuple(spec for spec in specs if spec not in driven)
        return [*kept, OfferGroups(offered)] if offered and self._is_offering else kept

    def _settled(self) -> list[Action]:
        """Reports closures, moves up the groups behind them, asks for prompts and wakes the trainer."""
        closures = self._shelf.take_closures()
        early = [closure for closure in closures if closure.reason != "complete"]
        self._retries += [closure.retry for closure in early if closure.retry is not None]
        actions: list[Action] = [Keep(GroupDropped(closure.group_id)) for closure in early]
        for reason in dict.fromkeys(closure.reason for closure in closures):
            actions.append(Close(_ids_of(closures, reason), reason))
        if early and (moved := self._shelf.move_up()):
            actions.append(OfferGroups(tuple(moved)))
        actions += self._asks()
        if self._shelf.is_batch_ready or self.is_short:
            actions.append(WakeTrainer())
        return actions

    def _asks(self) -> list[Action]:
        if self._asked or not self._is_offering:
            return []
        wanted = groups_wanted(self.offers, self._cap_rollouts, self._shelf.in_flight_groups)
        again = tuple(self._retries.popleft() for _ in range(min(wanted, len(self._retries))))
        fresh = 0 if self._is_exhausted else wanted - len(again)
        self._asked = len(again) + fresh
        return [AskPrompts(again, fresh)] if self._asked else []


def _fared(group: Group | None) -> list[Action]:
    """The group's rewards, for the curriculum, once they are complete."""
    if group is None or not group.is_ready:
        return []
    return [Fared(group.draw.cursor, tuple(value for value in group.rewards.values() if value is not None))]


def _ids_of(closures: Sequence[Closure], reason: str) -> tuple[GroupId, ...]:
    return tuple(closure.group_id for closure in closures if closure.reason == reason)
