"""What trainers of other projects ask for: versions, priority, limits, and what becomes of a request that cannot be answered."""

from types import SimpleNamespace
from typing import Any

import pytest

from echo2.base.ids import Version
from echo2.base.rollout import Verdict, Work
from echo2.gateway.episodes import CallRefused
from echo2.gateway.generate import TokenAnswer, TokenRequest
from echo2.learner.rollouts import request_pool
from echo2.learner.rollouts.request_pool import RequestPool
from echo2.outside import monotonic
from tests.unit.learner.stage import ALICE, BOB, SAMPLING, STOP, Stage, piece

BOUND = 2


class Door(Stage):
    """A stage whose pool answers requests."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts.sampling, self.prompts.context_tokens, self.prompts.vocabulary_size = SAMPLING, 16, 50  # type: ignore[attr-defined]
        self.prompts.stop_strings = SimpleNamespace(pieces_of=lambda texts: ((), ()))  # type: ignore[attr-defined]
        self.prompts.secret_seed = lambda name: hash(name) & 0xFFFF  # type: ignore[attr-defined]
        pool: Any = RequestPool
        history = SimpleNamespace(cursor=0, opened_in={})
        parts = (self.new_groups(), self.journal, history, self.prompts, self.evaluations)
        self.pool = self.loop.run_until_complete(self._made(pool, *parts, self))
        self.tell(self.pool.resume)
        self.offered = {}

    def ask(self, **named: Any) -> TokenAnswer:
        made: TokenAnswer = self.tell(self.pool.generate, TokenRequest(**{"token_ids": (5, 6), **named}))
        return made

    def publish(self, version: int) -> None:
        self.tell(self.pool.begin_version, Version(version))  # type: ignore[attr-defined]
        self.tell(self.pool.on_published, Version(version))


@pytest.fixture
def door() -> Door:
    return Door()


def refusal(answer: TokenAnswer) -> CallRefused:
    error = answer.whole.exception()
    assert isinstance(error, CallRefused)
    return error


def test_an_answer_has_every_choice_whole_with_the_version_of_each_token(door: Door) -> None:
    answer = door.ask(choices=2, seed=7)
    (spec,) = door.offered.values()
    assert (spec.rollout_count, spec.sampling.seed, spec.sampling.max_new_tokens) == (2, 7, 8)
    name = spec.group_id
    assert door.report(piece(name, 0, [9, 9])) == [Verdict.HELD]
    assert answer.rollouts[0].token_ids == (9, 9) and not answer.whole.done()
    door.publish(1)
    both = piece(name, 0, [STOP], 2, 1), piece(name, 1, [8, STOP], version=1)
    assert door.report(*both, sender=BOB) == [Verdict.ADMITTED] * 2
    assert answer.whole.done() and answer.whole.exception() is None
    assert [r.token_ids for r in answer.rollouts] == [(9, 9, STOP), (8, STOP)]
    assert [(int(s.version), s.count) for s in answer.rollouts[0].version_spans] == [(0, 2), (1, 1)]
    assert (name, "complete") in door.closed and not door.offered
    assert [len(group.rollouts) for group in door.answered] == [2], "the audit sees every answer"


def test_more_stops_than_a_message_holds_are_refused(door: Door) -> None:
    """Else every message and hello of the learner would be, as long as the request is under way."""
    door.prompts.vocabulary_size = 400  # type: ignore[attr-defined]
    with pytest.raises(CallRefused, match="stop_token_ids: expected at most 256, got 300") as refused:
        door.ask(stop_token_ids=tuple(range(300)), ignores_end=True)
    assert refused.value.status == 400 and not door.offered


@pytest.mark.parametrize("asked", [{"min_version": 2}, {"exact_version": 2}])
def test_a_version_that_is_not_published_is_refused_until_it_is(door: Door, asked: dict[str, int]) -> None:
    door.publish(1)
    with pytest.raises(CallRefused, match="expected a version up to 1, the newest, got 2") as refused:
        door.ask(**asked)
    assert refused.value.status == 409 and refused.value.retry_after_s > 0 and not door.offered
    door.publish(2)
    door.ask(**asked)
    (spec,) = door.offered.values()
    if "exact_version" in asked:
        assert (spec.work, spec.exact_version) == (Work.EVALUATE, 2)
    else:
        assert spec.consume_step - BOUND == 2, "no worker with an older version may begin it"


def test_no_token_is_older_than_its_request_allows(door: Door) -> None:
    door.publish(1)
    answer = door.ask(min_version=1)
    (name,) = door.offered
    assert door.report(piece(name, 0, [9, STOP], version=0)) == [Verdict.REFUSED]
    assert door.report(piece(name, 0, [9, STOP], version=1)) == [Verdict.ADMITTED]
    assert answer.whole.done()
    late = door.ask()
    (name,) = door.offered
    door.report(piece(name, 0, [9], version=1))
    door.publish(4)
    assert (name, "stale") in door.closed and not late.whole.done(), "it begins anew"
    (again,) = door.offered
    assert door.report(piece(again, 0, [7, STOP], version=1)) == [Verdict.REFUSED], "none begins with it"
    assert again != name and door.report(piece(again, 0, [7, STOP], version=4)) == [Verdict.ADMITTED]
    assert late.rollouts[0].token_ids == (7, STOP)


def test_an_exact_version_that_no_worker_can_hold_any_more_is_told_once_the_newer_is_written(door: Door) -> None:
    old, _ = door.ask(exact_version=0), door.ask()
    door.tell(door.pool.begin_version, Version(3))  # type: ignore[attr-defined]
    assert door.pool.waits_for.startswith("2 requests, 0 begun")  # type: ignore[attr-defined]
    door.tell(door.pool.tick, monotonic() + 60)
    door.tell(door.pool.on_published, Version(3))
    assert refusal(old).status == 409 and "versions that workers may hold, 1 to 3" in refusal(old).message
    with pytest.raises(CallRefused, match="got 0"):
        door.ask(exact_version=0)


def test_an_exact_version_at_which_no_worker_is_any_more_is_told_within_seconds(door: Door) -> None:
    door.publish(1)
    door.publish(2)
    begun, waiting, newest = door.ask(exact_version=1), door.ask(exact_version=1), door.ask(exact_version=2)
    first, second, _ = door.offered
    assert door.report(piece(first, 0, [9], version=1)) == [Verdict.HELD]
    now = monotonic()
    door.tell(door.pool.tick, now + 5)
    assert not waiting.whole.done()
    door.tell(door.pool.tick, now + 11)
    assert refusal(waiting).status == 409 and "expected 2, the newest" in refusal(waiting).message
    assert (second, "unused") in door.closed and not begun.whole.done() and not newest.whole.done()
    assert door.report(piece(first, 0, [STOP], 1, version=1)) == [Verdict.ADMITTED] and begun.whole.done()


def test_tokens_that_cannot_be_used_are_asked_for_again_then_refused(door: Door) -> None:
    answer = door.ask()
    for _ in range(3):
        (name,) = door.offered
        assert door.report(piece(name, 0, [9])) == [Verdict.HELD]
        door.tell(door.pool.accuse, ALICE, "it lies", is_certain=True)
    assert refusal(answer).status == 503 and refusal(answer).retry_after_s > 0 and not door.offered


def test_a_request_that_nobody_waits_for_is_closed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(request_pool, "OFFERED_MAX", 1)
    monkeypatch.setattr(request_pool, "monotonic", lambda: clock[0])
    pool: Any = door.pool
    offered = door.ask()
    clock[0] = 12.0
    waiting = door.ask()
    (name,) = door.offered
    offered.whole.cancel()  # as by a gather that waited for it
    for answer in (waiting, offered):
        clock[0] += 1.0
        door.tell(pool.leave, answer)
    assert (name, "unused") in door.closed and not door.offered and pool.rollouts_asked == 0
    clock[0] = 20.0
    assert [pool.take_busy_s(), pool.take_busy_s()] == [4.0, 0.0], "how long one of them was under way"
    answer = door.ask()
    (name,) = door.offered
    door.report(piece(name, 0, [9]))
    for method, told in ((pool.begin_version, Version(4)), (pool.leave, answer), (pool.on_published, Version(4))):
        door.tell(method, told)
    assert not door.offered and not pool.rollouts_asked, "nor one that a version is too old for which is being written"


def test_what_waits_is_offered_by_priority_and_too_much_is_refused(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_pool, "OFFERED_MAX", 1)
    monkeypatch.setattr(request_pool, "ASKED_MAX", 3)
    door.ask(token_ids=(1,))
    door.ask(token_ids=(2,), priority=5)
    door.ask(token_ids=(3,), priority=-5)
    with pytest.raises(CallRefused) as refused:
        door.ask(token_ids=(4,))
    assert refused.value.status == 429 and refused.value.retry_after_s > 0
    order = []
    while door.offered:
        ((name, spec),) = door.offered.items()
        order.append(spec.prompt_token_ids)
        door.report(piece(name, 0, [STOP]))
    assert order == [(1,), (3,), (2,)], "lower is earlier, as in vLLM"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"token_ids": tuple(range(2, 18))}, "expected at most 15 tokens, got 16"),
        ({"token_ids": (50,)}, "expected ids from 0 to below 50, got 50"),
        ({"max_tokens": 0}, "max_new_tokens: expected 1 to"),
        ({"max_tokens": 9}, "expected at most 8, for which workers keep room"),
        ({"token_ids": (-1,)}, "expected ids from 0 to below 50, got -1"),
        *(({name: number}, "expected") for name, number in (("seed", -1), ("seed", 1 << 64), ("top_k", 1 << 32))),
        ({"stop_token_ids": (-1,)}, "expected"),
    ],
)
def test_a_request_that_has_no_room_anywhere_is_refused(door: Door, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(CallRefused, match=told) as refused:
        door.ask(**asked)
    assert refused.value.status == 400 and not door.offered and not door.pool.rollouts_asked
