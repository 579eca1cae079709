"""One control session, whoever holds it: against a real gRPC coordinator on loopback that misbehaves."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st

from echo2.base.clock import FLOOR_SHARE, Backoff, Waits
from echo2.base.errors import LimitExceeded, StateError
from echo2.control.session import OUTBOX_MESSAGES_MAX, ControlSession, Party, unless
from echo2.outside import SteadyClock
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.certificates import issued
from tests.patience import WAIT_S
from tests.unit.learner.fleet import RUN, Coordinator, new_authority

Message = coordinator_pb2.LearnerMessage


class Moody(Coordinator):
    """Answers the hello of each stream by the next of `answers`; afterwards it listens, or ends the stream."""

    def __init__(self, answers: list[coordinator_pb2.LearnerOrder]) -> None:
        super().__init__(new_authority())
        self.answers, self.ends, self.reading_s, self.breaks_at = answers, False, 0.0, ""

    async def LearnerSession(
        self, request_iterator: AsyncIterator[Message], context: Any
    ) -> AsyncIterator[coordinator_pb2.LearnerOrder]:
        async for message in request_iterator:
            await asyncio.sleep(self.reading_s)
            if message.WhichOneof("kind") == self.breaks_at:
                self.breaks_at = ""
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
            self._take(message)
            if message.HasField("hello"):
                yield self.answers.pop(0)
                if self.ends and self.answers:
                    return


def welcome(run_id: str = RUN, interval_s: float = 0.05) -> coordinator_pb2.LearnerOrder:
    return coordinator_pb2.LearnerOrder(
        welcome=coordinator_pb2.LearnerWelcome(run_id=run_id, heartbeat_interval_s=interval_s)
    )


def refusal(error: type[Exception]) -> coordinator_pb2.LearnerOrder:
    return coordinator_pb2.LearnerOrder(refusal=coordinator_pb2.Refusal(code=error.__name__, message="why"))


class Bench:
    def __init__(self, *answers: coordinator_pb2.LearnerOrder) -> None:
        self.coordinator = Moody(list(answers))
        self.waits = Waits(SteadyClock())
        self.backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.lost = 0
        self.greets: Callable[[], None] = lambda: None  # while the hello is on its way

    async def __aenter__(self) -> Bench:
        await self.coordinator.start()
        credentials = issued(self.coordinator.authority, Role.LEARNER, self.coordinator.address)
        self.session = ControlSession[Message](credentials, self.waits, self.backoff)
        self.task = asyncio.create_task(self.session.run(self._party()))
        return self

    def _party(self) -> Party[Message]:
        return Party(
            dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).LearnerSession(),
            hello=self._hello,
            beat=lambda: Message(report=coordinator_pb2.LearnerReport(step=3)),
            on_welcome=lambda welcome: None,
            on_order=lambda order: None,
            on_lost=self._lost,
        )

    def _hello(self) -> Message:
        asyncio.get_running_loop().call_soon(self.greets)
        return Message(hello=coordinator_pb2.LearnerHello(run_id=RUN))

    def _lost(self) -> None:
        self.lost += 1

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.coordinator.stop()


async def test_beats_follow_the_welcome_however_much_else_is_said() -> None:
    """A learner that says something every interval still reports."""
    async with Bench(welcome()) as bench:
        await bench.until(lambda: bench.session.is_connected)
        assert bench.waits.longest() == ("", 0.0)

        def says_and_has_heard_three() -> bool:
            bench.session.send(Message(close=coordinator_pb2.CloseGroups(group_ids=["g"])))
            return len(bench.coordinator.reports) >= 3

        await bench.until(says_and_has_heard_three)


async def test_a_refusal_that_passes_is_tried_again_and_one_that_does_not_ends_the_session() -> None:
    async with Bench(refusal(LimitExceeded), welcome(interval_s=1e9), welcome(), refusal(StateError)) as bench:
        bench.coordinator.ends = True
        with pytest.raises(StateError, match="why"):
            await asyncio.wait_for(bench.task, WAIT_S)
        assert len(bench.coordinator.hellos) == 4
        assert bench.lost == 1, "of the streams only one was welcome, by an interval within its bounds"
    async with Bench(welcome("another")) as bench:
        with pytest.raises(StateError, match=f"expected run {RUN}, got another; remove this node's folder"):
            await asyncio.wait_for(bench.task, WAIT_S)


async def test_streams_that_end_right_after_their_welcome_are_opened_ever_more_seldom() -> None:
    async with Bench(*[welcome() for _ in range(40)]) as bench:
        bench.coordinator.ends, bench.backoff.first_s, bench.backoff.longest_s = (
            True,
            0.2,
            60.0,
        )  # longer than a stream lasts
        await bench.until(lambda: bench.backoff.failures >= 4)
        assert bench.lost >= 4 and bench.waits.longest()[0].startswith("a connection to the coordinator")


async def test_a_stream_that_takes_nothing_is_given_up() -> None:
    async with Bench(refusal(LimitExceeded), refusal(LimitExceeded), welcome(), welcome()) as bench:
        await bench.until(lambda: bench.session.is_connected)
        await asyncio.sleep(bench.backoff.longest_s)
        for _ in range(OUTBOX_MESSAGES_MAX + 1):
            bench.session.send(Message())
        await bench.until(lambda: bench.lost == 1)
        await bench.until(lambda: bench.session.is_connected)
        assert bench.backoff.failures == 1, "a stream that lasted ends the row of failures before it"


async def test_a_good_bye_is_said_behind_all_else_and_holds_nobody_where_it_is_not_heard() -> None:
    for reading_s, within_s, heard in ((0.005, 20.0, 100), (3600.0, 0.2, 0)):
        async with Bench(welcome()) as bench:
            await bench.until(lambda bench=bench: bench.session.is_connected)
            for index in range(100):
                bench.session.send(Message(close=coordinator_pb2.CloseGroups(group_ids=[f"g{index}"])))
            bench.coordinator.reading_s, begun = reading_s, time.monotonic()
            farewell = Message(leaving=coordinator_pb2.LearnerLeaving(reason="done"))
            assert await bench.session.leave(farewell, within_s) is bool(heard)
            assert len(bench.coordinator.closed) == heard, "it was read, not only written"
            assert time.monotonic() - begun < 15, "and it is over as soon as it was read"
            if heard:
                await asyncio.wait_for(bench.task, WAIT_S)
                assert bench.lost == 1, "and no other stream was opened"


async def test_a_good_bye_whose_stream_breaks_is_said_on_the_next_and_one_that_is_refused_holds_nobody() -> None:
    farewell = Message(leaving=coordinator_pb2.LearnerLeaving(reason="done"))
    for answer, is_told in ((welcome(), True), (refusal(StateError), False)):
        async with Bench(welcome(), answer) as bench:
            await bench.until(lambda bench=bench: bench.session.is_connected)
            bench.coordinator.breaks_at = "leaving"
            begun = time.monotonic()
            assert await bench.session.leave(farewell, 20.0) is is_told
            assert time.monotonic() - begun < 15
            if is_told:
                await asyncio.wait_for(bench.task, WAIT_S)


async def test_what_is_said_while_the_stream_is_being_opened_is_heard_behind_the_hello() -> None:
    """The hello was made before, so it does not hold it."""
    async with Bench(welcome()) as bench:
        close = Message(close=coordinator_pb2.CloseGroups(group_ids=["g"]))
        bench.greets = lambda: bench.session.send(close)
        await bench.until(lambda: bench.session.is_connected)
        await bench.until(lambda: bench.coordinator.closed)


async def test_an_enrolment_ends_with_the_start_that_waits_for_it() -> None:
    for is_stopped in (False, True):
        stopped, begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def enrol(begun: asyncio.Event = begun, ended: asyncio.Event = ended) -> Any:
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        starting = asyncio.create_task(unless(stopped, asyncio.create_task(enrol())))
        await begun.wait()
        stopped.set() if is_stopped else starting.cancel()
        (result,) = await asyncio.gather(starting, return_exceptions=True)
        assert ended.is_set() and (result is None if is_stopped else isinstance(result, asyncio.CancelledError))
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody waits for the stop any more"


# ----


class _Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def test_all_waits_are_told_and_the_longest_comes_first() -> None:
    clock = _Clock()
    waits = Waits(clock)
    assert waits.longest() == ("", 0.0) and waits.by_age() == []
    waits.begin("learner", "the learner to join the run")
    clock.time_s = 5.0
    waits.begin("coordinator", "a connection to the coordinator")
    clock.time_s = 7.0
    assert waits.by_age() == [("the learner to join the run", 7.0), ("a connection to the coordinator", 2.0)]
    waits.begin("learner", "a connection to the learner")
    assert waits.longest() == ("a connection to the learner", 7.0), "another text is the same wait"
    waits.end("learner")
    assert waits.longest() == ("a connection to the coordinator", 2.0)


@given(seed=st.integers(), failures=st.integers(0, 200))
def test_pauses_grow_to_the_longest_and_start_over_after_success(seed: int, failures: int) -> None:
    backoff = Backoff(random.Random(seed), first_s=0.2, longest_s=5.0)
    pauses = [backoff.next_pause_s() for _ in range(failures)]
    for i, pause in enumerate(pauses):
        ceiling = min(5.0, 0.2 * 2.0 ** min(i, 30))
        assert FLOOR_SHARE * ceiling <= pause <= ceiling
    backoff.succeeded()
    assert backoff.next_pause_s() <= 0.2
