"""The one door: whatever happens, the event's own actions say everything that the coordinator and the journal must know."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import echo2
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, Rollout, Verdict
from echo2.learner import batcher_events as b
from echo2.learner.batch import Batch
from echo2.learner.batcher import Batcher, Held
from echo2.learner.episodes import turn_of
from echo2.learner.group import Draw
from echo2.learner.history import BatchDrawn as DrawnBatch
from echo2.learner.history import Finished, GroupDropped, History, Opened, Record
from echo2.learner.offers import OfferConfig, cap_groups
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger
from tests.unit.learner.test_shelf import STOP, draw, piece

PER_STEP, PER_GROUP, PROMPTS = 4, 2, 60
WORKERS = (PeerId("a"), PeerId("b"))
SHELF_USERS = {
    "learner/batcher.py",
    "learner/exam.py",
    "learner/examining.py",  # part of the door
    "learner/history.py",
    "learner/runtime/checkpoint.py",
    "learner/runtime/intake.py",
    "learner/runtime/replay.py",
    "learner/runtime/startup.py",
    "sim/checkers.py",
    "sim/witness.py",
}


class Caller:
    """Carries actions out as the runtime does, and knows what it was told: nothing else is asked for."""

    def __init__(self, bound: int, drops_equal_rewards: bool = False) -> None:
        self.offers = OfferConfig(PER_STEP, PER_GROUP, bound)
        self.config = ShelfConfig(bound, PER_STEP, PER_GROUP, 50, drops_equal_rewards=drops_equal_rewards)
        self.batcher = Batcher(Shelf(self.config, Ledger(bound)), self.offers)
        self.cursor = 0
        self.cap: int | None = None
        self.offered: dict[GroupId, GroupSpec] = {}
        self.journal: list[Record] = []
        self.to_score: list[Rollout] = []
        self.verdicts: list[Verdict] = []
        self.batches: list[Batch] = []
        self.is_awake = False

    def tell(self, event: b.Event) -> None:
        self.is_awake = False
        self._do(self.batcher.handle(event))

    def _do(self, actions: Sequence[b.Action]) -> None:
        for action in actions:
            match action:
                case b.Keep(record):
                    self.journal.append(record)
                case b.Score(rollout):
                    self.to_score.append(rollout)
                case b.OfferGroups(specs):
                    self.offered |= {spec.group_id: spec for spec in specs}
                case b.Close(group_ids, _):
                    for group_id in group_ids:
                        del self.offered[group_id]
                case b.AskPrompts(again, fresh):
                    end = min(PROMPTS, self.cursor + fresh)
                    draws = (*again, *(draw(cursor) for cursor in range(self.cursor, end)))
                    self.cursor = end
                    self._do(self.batcher.handle(b.PromptsDrawn(draws)))
                case b.AnswerReport(verdicts, _):
                    self.verdicts = [verdict.verdict for verdict in verdicts]
                case b.Train(batch):
                    self.batches.append(batch)
                case b.WakeTrainer():
                    self.is_awake = True
                case _:
                    pass

    def report(self, group_id: GroupId, index: int, tokens: list[int], version: int, sender: PeerId) -> None:
        group = self.batcher.held.groups.get(group_id)
        held = group.rollouts[index].token_ids if group else ()
        self.tell(b.Reported((piece(group_id, index, tokens, len(held), version),), 0, sender))


class DoorMachine(RuleBasedStateMachine):
    """Any order of events; after each of them the callers know what the batcher holds."""

    @initialize(bound=st.integers(0, 3), drops=st.booleans())
    def begin(self, bound: int, drops: bool) -> None:
        self.caller = Caller(bound, drops)
        self.caller.tell(b.Resumed())
        self.names: list[GroupId] = []

    @rule(pick=st.integers(0, 1000), index=st.integers(0, 1), token=st.sampled_from([STOP, STOP, 2, 49, 50]))
    def report(self, pick: int, index: int, token: int) -> None:
        held = self.caller.batcher.held
        self.names += [name for name in held.groups if name not in self.names]
        group_id = self.names[pick % len(self.names)]
        group = held.groups.get(group_id)
        index = 0 if group is not None and len(group.rollouts) == 1 else index
        spans = group.rollouts[index].version_spans if group else ()
        version = held.published[pick % len(held.published)]
        version = max(version, spans[-1].version) if spans else version
        self.caller.report(group_id, index, [token], version, WORKERS[pick % 2])

    @rule(reward=st.sampled_from([None, 0.0, 1.0]), says=st.integers(0, 3))
    def world_answers(self, reward: float | None, says: int) -> None:
        if not self.caller.to_score:
            return
        rollout = self.caller.to_score.pop(0)
        at = turn_of(rollout.group_id, rollout.index)
        if says == 0 and at.turn < 2:
            self.caller.tell(b.Said(at, (7,)))
        else:
            self.caller.tell(b.Rewarded(at.root, at.index, reward))

    @rule()
    def trainer_is_free(self) -> None:
        self.caller.tell(b.BatchWanted())

    @rule()
    def publish(self) -> None:
        held = self.caller.batcher.held
        if held.next_step > held.published[-1]:
            self.caller.tell(b.VersionLeft(Version(held.next_step)))

    @rule(worker=st.sampled_from(WORKERS), is_back=st.booleans())
    def bar(self, worker: PeerId, is_back: bool) -> None:
        self.caller.tell(b.WorkerReleased(worker) if is_back else b.WorkerBarred(worker))

    @rule(rollouts=st.none() | st.integers(1, 40))
    def plan(self, rollouts: int | None) -> None:
        self.caller.cap = rollouts
        self.caller.tell(b.CapPlanned(rollouts))

    @invariant()
    def the_coordinator_was_told_of_every_group_and_its_step(self) -> None:
        if hasattr(self, "caller"):
            held = {group_id: group.spec for group_id, group in self.caller.batcher.held.groups.items()}
            told = self.caller.offered
            assert told.keys() == held.keys()
            unsampled = {spec.group_id: spec for spec in self.caller.batcher.held.incomplete_specs()}
            assert {group_id: told[group_id] for group_id in unsampled} == unsampled

    @invariant()
    def as_many_groups_are_in_flight_as_the_cap_allows(self) -> None:
        if hasattr(self, "caller") and self.caller.cursor < PROMPTS:
            in_flight = self.caller.batcher.held.in_flight_groups
            assert in_flight >= cap_groups(self.caller.offers, self.caller.cap)

    @invariant()
    def the_trainer_is_woken(self) -> None:
        if hasattr(self, "caller"):
            has_news = self.caller.batcher.held.is_batch_ready or self.caller.batcher.is_short
            assert self.caller.is_awake == has_news

    @invariant()
    def the_journal_gives_back_what_is_held(self) -> None:
        if not hasattr(self, "caller"):
            return
        history, shelf = History(), Shelf(self.caller.config, Ledger(self.caller.offers.staleness_bound))
        for record in self.caller.journal:
            history.apply(record, shelf.next_step)
        history.restore(shelf)
        while history.next_batch(shelf) is not None:
            pass
        held = self.caller.batcher.held
        assert shelf.next_step == held.next_step and shelf.groups.keys() == held.groups.keys()
        for group_id, group in held.groups.items():
            finished = [rollout if rollout.is_finished else None for rollout in group.rollouts]
            assert [r if r.is_finished else None for r in shelf.groups[group_id].rollouts] == finished


TestDoorMachine = DoorMachine.TestCase
TestDoorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_events_of_a_batch_say_all_that_is_to_be_kept_and_told() -> None:
    caller = Caller(bound=2)
    caller.tell(b.Resumed())
    first, second = list(caller.offered)[:2]
    for group_id in (first, second):
        for index in range(PER_GROUP):
            caller.report(group_id, index, [9, STOP], 0, WORKERS[0])
            caller.tell(b.Rewarded(group_id, index, float(index)))
    assert caller.is_awake
    caller.tell(b.BatchWanted())
    (batch,) = caller.batches
    assert [group.spec.group_id for group in batch.groups] == [first, second]
    kinds = [type(record) for record in caller.journal]
    assert kinds.count(Opened) == 6 and kinds.count(Finished) == 4 and kinds.count(DrawnBatch) == 1
    assert not {first, second} & caller.offered.keys() and len(caller.offered) == 4


def test_what_a_barred_worker_sent_is_dropped_told_and_drawn_again_by_the_one_event() -> None:
    caller = Caller(bound=2)
    caller.tell(b.Resumed())
    group_id = next(iter(caller.offered))
    caller.report(group_id, 0, [9], 0, WORKERS[1])
    caller.tell(b.WorkerBarred(WORKERS[1]))
    assert group_id not in caller.offered and f"{group_id}r1" in caller.offered
    assert GroupDropped(group_id) in caller.journal


def test_prompts_that_end_wake_the_trainer_which_finds_no_batch() -> None:
    caller = Caller(bound=0)
    caller.cursor = PROMPTS
    caller.tell(b.Resumed())
    assert caller.is_awake and caller.batcher.is_short
    caller.tell(b.BatchWanted())
    assert not caller.batches


def test_a_draw_that_is_drawn_again_comes_before_new_prompts() -> None:
    caller = Caller(bound=1)
    caller.tell(b.Resumed())
    group_id = next(iter(caller.offered))
    caller.report(group_id, 0, [9], 0, WORKERS[1])
    before = caller.cursor
    caller.tell(b.WorkerBarred(WORKERS[1]))
    opened = caller.journal[-1]
    assert caller.cursor == before and isinstance(opened, Opened) and opened.draw == Draw(0, 1, *_of(draw(0)))


def _of(drawn: Draw) -> tuple[tuple[int, ...], object]:
    return drawn.prompt_token_ids, drawn.sampling


def test_nobody_reaches_past_the_door() -> None:
    """The shelf is changed by its methods, which answer with nothing to carry out: only the door may call them.

    A start puts it together before the door exists; to everyone else it is `Held`, which has nothing that changes it.
    """
    folder = Path(echo2.__file__).parent
    importing: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "echo2.learner.shelf":
                importing.add(path.relative_to(folder).as_posix())
    assert importing <= SHELF_USERS
    changing = {name for name, value in vars(Batcher).items() if not name.startswith("_") and callable(value)}
    assert changing - {"group", "turns", "lacking"} == {"handle"}, "the others read"
    reading = {name for name in vars(Held) if not name.startswith("_")}
    assert not reading & {
        "receive",
        "reward",
        "open_group",
        "open_turn",
        "move_up",
        "drop_stale",
        "drop_sent_by",
        "publish",
    }
