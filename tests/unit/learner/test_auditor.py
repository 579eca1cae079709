"""The audit at work: what a step asks of the event loop."""

from __future__ import annotations

import random

import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Habits, Passage, passage_of
from echo2.learner.audit_draw import NEWCOMER_TOKENS
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import SentTokens
from echo2.learner.runtime import auditor as auditor_module
from echo2.learner.runtime.auditor import AuditCalls, Auditor

WORKER, TOKENS = PeerId("w"), 64


def group(number: int) -> TrainGroup:
    spec = GroupSpec(GroupId(f"g{number}"), (5, 6), 1, SamplingParams(seed=number), 0)
    numbers = (-1.0,) * TOKENS
    rollout = Rollout(
        spec.group_id, 0, (7,) * TOKENS, numbers, numbers, (VersionSpan(Version(1), TOKENS),), FinishReason.STOP
    )
    return TrainGroup(spec, number, (rollout,), (1.0,), (), ((SentTokens(WORKER, TOKENS),),))


def test_only_what_the_dice_fall_on_is_made_ready_to_be_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is most of a batch, and its tokens are not touched."""
    made: list[Passage] = []

    def counted(*arguments: object) -> Passage:
        made.append(passage_of(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(auditor_module, "passage_of", counted)
    auditor = Auditor(0.1, random.Random(1), 0.3, AuditCalls(habits_of=lambda peer: Habits(True)))
    auditor.consider([group(number) for number in range(2000)], 0.0)
    newcomer = NEWCOMER_TOKENS // TOKENS
    assert newcomer < len(made) < newcomer + 0.15 * 2000
    seen = auditor.draw._accounts[WORKER].seen
    assert seen.total() == 2000, "all count in the share that is looked at"
    auditor.close()
