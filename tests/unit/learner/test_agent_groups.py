"""Episodes of agents on the shelf: calls become chains, chains become what is trained on, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.noise import rollout_seed, turn_seed, uniforms
from echo2.base.rollout import FinishReason, RolloutSegment, SamplingParams, Verdict, VersionSpan
from echo2.learner import batcher_events as b
from echo2.learner.audit import _uniforms_of
from echo2.learner.batch import Batch
from echo2.learner.batcher import Batcher
from echo2.learner.group import Draw
from echo2.learner.history import EpisodeScored, History
from echo2.learner.offers import OfferConfig
from echo2.learner.runtime.batch_bytes import batch_from_bytes, batch_to_bytes
from echo2.learner.runtime.journal import _from_message, _to_message
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger
from tests.unit.learner.test_trainer import new_trainer
from tests.unit.learner.tiny import make_tiny_model

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(1,), seed=77)
ROOT = GroupId("a00000000")
ALICE = PeerId("alice")


class Desk:
    """A batcher, with what it kept and offered."""

    def __init__(self) -> None:
        config = ShelfConfig(2, 2, 2, 100, is_driven=True)
        self.batcher = Batcher(Shelf(config, Ledger(2)), OfferConfig(2, 2, 2))
        self.records: list[object] = []
        self.actions: list[b.Action] = []
        self.tell(b.Resumed())

    def tell(self, event: b.Event) -> list[b.Action]:
        actions = self.batcher.handle(event)
        for action in actions:
            if isinstance(action, b.Keep):
                self.records.append(_from_message(_to_message(action.record).SerializeToString(), Path("journal")))
        self.actions += actions
        asked = [a for a in actions if isinstance(a, b.AskPrompts)]
        if asked and not any(isinstance(a, b.Drive) for a in self.actions):
            draws = (*asked[0].again, Draw(0, 0, (0,), SAMPLING))[: 1 + len(asked[0].again)]
            actions += self.tell(b.PromptsDrawn(draws))
        return actions

    def call(self, chain: int | None, prompt: tuple[int, ...]) -> GroupId:
        actions = self.tell(b.CallAsked(ROOT, chain, prompt, SAMPLING))
        (opened,) = [a for a in actions if isinstance(a, b.CallOpened)]
        (offered,) = [a for a in actions if isinstance(a, b.OfferGroups)]
        assert opened.group_id is not None and offered.specs[0].group_id == opened.group_id
        assert offered.specs[0].prompt_token_ids == prompt
        return opened.group_id

    def sampled(self, group_id: GroupId, *tokens: int, version: int = 0) -> None:
        logprobs = tuple(-0.1 * token for token in tokens)
        spans = (VersionSpan(Version(version), len(tokens)),)
        segment = RolloutSegment(group_id, 0, 0, tokens, logprobs, logprobs, spans, FinishReason.STOP)
        actions = self.tell(b.Reported((segment,), 1, ALICE))
        (answer,) = [a for a in actions if isinstance(a, b.AnswerReport)]
        assert answer.verdicts[0].verdict is Verdict.ADMITTED
        assert [a for a in actions if isinstance(a, b.CallSampled)] and not [
            a for a in actions if isinstance(a, b.Score)
        ]


@pytest.mark.parametrize("prompt", [(), (-1,), (5, 100), (10**12,)], ids=str)
def test_a_call_with_tokens_that_the_model_does_not_have_opens_nothing(prompt: tuple[int, ...]) -> None:
    desk = Desk()
    before, offered = desk.batcher.held.open_rollouts, len(desk.actions)
    with pytest.raises(MalformedMessage, match="token ids below 100"):
        desk.tell(b.CallAsked(ROOT, None, prompt, SAMPLING))
    assert desk.batcher.held.open_rollouts == before and len(desk.actions) == offered
    assert desk.call(None, (99,)) == f"{ROOT}.0.1", "nor does it begin a chain"


def played() -> Desk:
    """Two seats: the first with two turns and a branch, the second lost once and then whole."""
    desk = Desk()
    first = desk.call(None, (5, 6, 7))
    desk.sampled(first, 10, 11, 1)
    desk.sampled(desk.call(0, (5, 6, 7, 10, 11, 1, 8)), 12, 1)
    desk.sampled(desk.call(None, (5, 6, 9)), 13, 1)
    desk.sampled(desk.call(None, (5, 6, 4)), 20, 1)
    desk.tell(b.EpisodeEnded(ROOT, {2: 1}, None, is_final=False))
    desk.sampled(desk.call(None, (5, 6, 4)), 21, 1)
    abandoned = desk.call(3, (5, 6, 4, 21, 1, 30))
    desk.tell(b.EpisodeEnded(ROOT, {0: 2, 1: 1}, 1.0))
    assert desk.tell(b.BatchWanted()) == [] or not [a for a in desk.actions if isinstance(a, b.Train)]
    actions = desk.tell(b.EpisodeEnded(ROOT, {3: 1}, 0.0))
    assert (abandoned,) in [a.group_ids for a in actions if isinstance(a, b.Close)]
    return desk


def batch_of(desk: Desk) -> Batch:
    (train,) = [a for a in desk.tell(b.BatchWanted()) if isinstance(a, b.Train)]
    return train.batch


def test_calls_become_chains_that_are_trained_on_token_for_token() -> None:
    (group,) = batch_of(played()).groups
    assert group.spec.prompt_token_ids == (5, 6), "what all chains begin with"
    assert [r.index for r in group.rollouts] == [0, 1, 3] and group.rewards == (1.0, 1.0, 0.0)
    assert [r.token_ids for r in group.rollouts] == [(10, 11, 1, 12, 1), (13, 1), (21, 1)]
    texts = [group.text_of(place) for place in range(3)]
    assert texts[0] == ([7, 10, 11, 1, 8, 12, 1], [1, 2, 3, 5, 6])
    assert texts[1] == ([9, 13, 1], [1, 2]) and texts[2] == ([4, 21, 1], [1, 2])
    assert all(r.group_id == ROOT for r in group.rollouts) and group.senders[0][0].peer_id == ALICE


def test_a_call_that_goes_on_is_told_as_it_grows() -> None:
    desk = Desk()
    group_id = desk.call(None, (5, 6))
    for offset, tokens, finish in (
        (0, (10,), FinishReason.UNFINISHED),
        (1, (11, 12), FinishReason.UNFINISHED),
        (3, (1,), FinishReason.STOP),
    ):
        numbers, spans = (-0.1,) * len(tokens), (VersionSpan(Version(0), len(tokens)),)
        desk.tell(b.Reported((RolloutSegment(group_id, 0, offset, tokens, numbers, numbers, spans, finish),), 1, ALICE))
    grown = [action.rollout.token_ids for action in desk.actions if isinstance(action, b.CallGrown)]
    assert grown == [(10,), (10, 11, 12)]
    (sampled,) = [action.rollout.token_ids for action in desk.actions if isinstance(action, b.CallSampled)]
    assert sampled == (10, 11, 12, 1)


def test_audits_know_the_random_numbers_of_every_call() -> None:
    (group,) = batch_of(played()).groups
    seeds = [rollout_seed(turn_seed(77, 0, depth), 0) for depth in (1, 2)]
    found = _uniforms_of(group.rollouts[0], group.spec.sampling.seed, group.insertions[0])
    assert found.tolist() == [*uniforms(seeds[0], 3).tolist(), *uniforms(seeds[1], 2).tolist()]


def test_a_journal_gives_the_same_batch_again() -> None:
    desk = played()
    batch = batch_of(desk)
    history, shelf = History(), Shelf(ShelfConfig(2, 2, 2, 100, is_driven=True), Ledger(2))
    for record in desk.records:
        history.apply(record, Step(0))  # type: ignore[arg-type]
    history.restore(shelf)
    (again,), (group,) = (history.next_batch(shelf) or batch).groups, batch.groups
    assert [r.token_ids for r in again.rollouts] == [r.token_ids for r in group.rollouts]
    assert (again.spec, again.rewards, again.insertions) == (group.spec, group.rewards, group.insertions)
    assert not shelf.groups, "it was drawn again from the journal"
    assert batch_from_bytes(batch_to_bytes(batch)).groups[0].insertions == group.insertions


def test_after_a_restart_whole_episodes_wait_and_unfinished_ones_are_drawn_again() -> None:
    desk = played()
    for is_whole in (True, False):
        ends = [r for r in desk.records if isinstance(r, EpisodeScored)]
        records = desk.records if is_whole else [r for r in desk.records if r != ends[-1]]
        history, shelf = History(), Shelf(ShelfConfig(2, 2, 2, 100, is_driven=True), Ledger(2))
        for record in records:
            history.apply(record, Step(0))  # type: ignore[arg-type]
        history.restore(shelf)
        again = Batcher(shelf, OfferConfig(2, 2, 2))
        actions = again.handle(b.Resumed())
        if is_whole:
            (train,) = [a for a in again.handle(b.BatchWanted()) if isinstance(a, b.Train)]
            assert [r.token_ids for r in train.batch.groups[0].rollouts] == [(10, 11, 1, 12, 1), (13, 1), (21, 1)]
        else:
            (asked,) = [a for a in actions if isinstance(a, b.AskPrompts)]
            assert [draw.retry for draw in asked.again] == [1] and not shelf.groups


@pytest.mark.parametrize("has_common", [True, False])
def test_chains_with_and_without_a_common_beginning_train(tmp_path: Path, has_common: bool) -> None:
    torch.set_num_threads(1)
    desk = Desk()
    for number in range(2):
        opening = (5, 6, 7 + number) if has_common else (5 + number, 6, 7)
        desk.sampled(desk.call(None, opening), 10 + number, 11, 1)
        desk.tell(b.EpisodeEnded(ROOT, {number: 1}, float(number)))
    batch = batch_of(desk)
    assert batch.groups[0].spec.prompt_token_ids == ((5, 6) if has_common else ())
    trainer = new_trainer(make_tiny_model(tmp_path / "model"))
    whole = torch.tensor([[*((5, 6, 8) if has_common else (6, 6, 7)), 11, 11, 1]])
    with torch.no_grad():
        logits = trainer.model.hf_model(input_ids=whole).logits[0].log_softmax(-1)
    expected = torch.stack([logits[at - 1, whole[0, at]] for at in (3, 4, 5)])
    assert torch.allclose(trainer.logprobs(batch.groups)[1], expected, atol=1e-4)
    assert trainer.step(batch).sampled_tokens == 6
