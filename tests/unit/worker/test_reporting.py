"""The report stream against a real gRPC learner on loopback, over mutual TLS."""

from __future__ import annotations

import asyncio
import random
import time
from typing import cast

import grpc.aio
import pytest

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, LeaseId, Version
from echo2.base.rollout import FinishReason, GroupSpec, SamplingParams
from echo2.control.backoff import Backoff
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Role
from echo2.trust.runtime.tls import Credentials
from echo2.wire.gen.echo2.v1 import ingest_pb2
from echo2.wire.ticket import Ticket, sign_ticket
from echo2.worker import duties as d
from echo2.worker.assignments import Assignments
from echo2.worker.engine import TokenChunk
from echo2.worker.options import WorkerLimits
from echo2.worker.runtime import reporting as reporting_module
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.reporting import LearnerAddress, Reporting
from echo2.worker.runtime.session import WorkerSession
from echo2.worker.telemetry import RateWindow
from tests.unit.worker.peers import RUN, SmallRun, issued

STOP = 9


class Bench:
    """A desk without engine whose learner is real."""

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        self.peer_id = credentials.peer_id
        self.clock = SteadyClock()
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.reporting = Reporting(
            credentials,
            lambda event: self.desk.send(event),  # noqa: PLW0108 - the desk is made next
            Waits(self.clock),
            backoff,
            connect_s=5.0,
        )
        self.coordinator = WorkerSession(ControlSession(credentials, Waits(self.clock), backoff))
        self.desk = Desk(Assignments(WorkerLimits(), 0.05), self.clock, RateWindow(), self.reporting, self.coordinator)
        self.task = asyncio.create_task(self.reporting.run())
        self.reporting.move_to(LearnerAddress(run.learner_credentials.peer_id, run.learner_address))

    def grant(self, name: str, count: int, is_continuation: bool = False) -> None:
        sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(STOP,))
        group = GroupSpec(GroupId(f"g{name}"), (1, 2), count, sampling, 0)
        lease_id = LeaseId(f"l{name}")
        ticket = Ticket(lease_id, group.group_id, self.peer_id, 1, time.time() + 60, RUN)
        self.reporting.keep_ticket(sign_ticket(ticket, self.run.authority.identity))
        self.desk.send(d.Granted(lease_id, group, self.clock.now() + 60, is_continuation))

    def sample(self, request_id: str, *tokens: int) -> None:
        reason = FinishReason.STOP if tokens[-1] == STOP else FinishReason.UNFINISHED
        logprobs = (-0.5,) * len(tokens)
        self.desk.send(d.Sampled((TokenChunk(request_id, tokens, logprobs, logprobs, Version(2), reason),)))

    async def close(self) -> None:
        self.desk.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_tokens_reach_the_learner_and_a_finished_group_ends_its_lease() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            bench.desk.engine = NullEngine()
            bench.grant("1", 2)
            bench.sample("l1/0", 3, 4)
            await run.learner.until(lambda it: ("g1", 0) in it.held)
            bench.sample("l1/0", STOP)
            bench.sample("l1/1", 5, STOP)
            await run.learner.until(lambda it: len(it.finished) == 2)
            assert run.learner.finished[("g1", 0)].token_ids == (3, 4, STOP)
            assert run.learner.finished[("g1", 1)].version_spans[0].version == 2
            await until(lambda: not bench.desk.machine.lease_ids)
            tickets = [report.HasField("ticket") for report in run.learner.reports]
            assert tickets == [True] + [False] * (len(tickets) - 1), "a ticket travels once a stream"
            await bench.close()

    asyncio.run(scene())


def test_nothing_is_lost_while_the_learner_is_away_and_nothing_doubled_when_it_is_back() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            bench.desk.engine = NullEngine()
            bench.grant("1", 1)
            bench.sample("l1/0", 3)
            await run.learner.until(lambda it: ("g1", 0) in it.held)
            await run.stop("learner")
            bench.sample("l1/0", 4, 5, STOP)
            bench.grant("2", 1)
            bench.sample("l2/0", 6, STOP)
            await run.start_learner()
            await run.learner.until(lambda it: len(it.finished) == 2)
            assert run.learner.finished[("g1", 0)].token_ids == (3, 4, 5, STOP)
            assert run.learner.finished[("g2", 0)].token_ids == (6, STOP)
            await bench.close()

    asyncio.run(scene())


def test_a_report_that_the_learner_refuses_costs_its_lease_and_no_other() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            run.learner.refuses = {"g1"}
            bench = Bench(run)
            bench.desk.engine = NullEngine()
            bench.grant("1", 1)
            bench.grant("2", 1)
            bench.sample("l1/0", 3)
            bench.sample("l2/0", 4, STOP)
            await run.learner.until(lambda it: ("g2", 0) in it.finished)
            await until(lambda: not bench.desk.machine.lease_ids)
            assert ("g1", 0) not in run.learner.held
            await bench.close()

    asyncio.run(scene())


def test_a_learner_that_forgot_its_partials_is_sent_the_whole_again() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            bench.desk.engine = NullEngine()
            bench.grant("1", 1)
            bench.sample("l1/0", 3, 4)
            await run.learner.until(lambda it: ("g1", 0) in it.held)
            run.learner.held.clear()
            bench.sample("l1/0", STOP)
            await run.learner.until(lambda it: it.finished)
            assert run.learner.finished[("g1", 0)].token_ids == (3, 4, STOP)
            await bench.close()

    asyncio.run(scene())


def test_a_continuation_begins_with_what_another_worker_reported() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            first, second = Bench(run), Bench(run)
            first.desk.engine, second.desk.engine = NullEngine(), NullEngine()
            first.grant("1", 2)
            first.sample("l1/0", 3, 4)
            await run.learner.until(lambda it: ("g1", 0) in it.held)
            await first.close()
            second.grant("1", 2, is_continuation=True)
            await until(lambda: second.desk.engine.submitted)  # type: ignore[union-attr]
            assert second.desk.engine.submitted == {"l1/0": (3, 4), "l1/1": ()}  # type: ignore[union-attr]
            second.sample("l1/0", STOP)
            await run.learner.until(lambda it: it.finished)
            assert run.learner.finished[("g1", 0)].token_ids == (3, 4, STOP)
            await second.close()

    asyncio.run(scene())


class NullEngine:
    """Takes requests; the tests say what it samples."""

    version = Version(2)
    slot_count = 8

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[int, ...]] = {}

    def submit(self, request: object) -> None:
        self.submitted[request.request_id] = request.token_ids  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> None:
        self.submitted.pop(request_id, None)


async def until(is_so: object, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # type: ignore[operator]
            await asyncio.sleep(0.005)


class EndedCall:
    """A stream that ends just when something is written to it, as gRPC shows it; its reader says why a moment later."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        self.has_ended = asyncio.Event()

    async def write(self, report: object) -> None:
        self.has_ended.set()
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> object:
        await self.has_ended.wait()
        await asyncio.sleep(0)
        raise self.reason

    def cancel(self) -> None: ...


class EndedStub:
    def __init__(self, call: EndedCall) -> None:
        self.Report = lambda: call


def test_a_stream_that_ends_while_a_report_is_written_ends_with_its_own_reason_and_not_the_worker() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            bench.reporting._outgoing.put_nowait(ingest_pb2.RolloutReport(sequence=1))
            with pytest.raises(MalformedMessage, match="why it ended"):
                await bench.reporting._stream(EndedStub(EndedCall(MalformedMessage("why it ended"))))  # type: ignore[arg-type]
            await bench.close()

    asyncio.run(scene())


class SlowVerdicts:
    """A stream on which a verdict comes after each of the pauses, then its end."""

    def __init__(self, *pauses_s: float) -> None:
        self.pauses_s = list(pauses_s)
        self.count = 0

    async def read(self) -> object:
        if not self.pauses_s:
            return grpc.aio.EOF
        await asyncio.sleep(self.pauses_s.pop(0))
        self.count += 1
        return ingest_pb2.RolloutVerdict(sequence=self.count)


def silent_reporting(told: list[d.Event]) -> Reporting:
    backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
    return Reporting(cast(Credentials, None), told.append, Waits(SteadyClock()), backoff, connect_s=5.0)


@pytest.mark.parametrize(("verdict_after_s", "is_in_time"), [(0.9, True), (5.0, False)])
def test_a_report_that_was_sent_after_a_silence_has_its_whole_time(
    monkeypatch: pytest.MonkeyPatch, verdict_after_s: float, is_in_time: bool
) -> None:
    monkeypatch.setattr(reporting_module, "VERDICT_S", 0.6)

    async def scene() -> None:
        reporting = silent_reporting([])
        reading = asyncio.create_task(reporting._read_one(SlowVerdicts(verdict_after_s)))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        reporting.report(LeaseId("l1"), ())
        if is_in_time:
            assert (await reading) is not None
            return
        await asyncio.sleep(0.3)
        assert not reading.done(), "it was sent 0.3 s ago"
        async with asyncio.timeout(3.0):
            with pytest.raises(TimeoutError, match="no verdict within"):
                await reading

    asyncio.run(scene())


def test_each_verdict_gives_the_next_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting_module, "VERDICT_S", 0.6)

    async def scene() -> list[d.Event]:
        told: list[d.Event] = []
        reporting = silent_reporting(told)
        for name in ("l1", "l2", "l3"):
            reporting.report(LeaseId(name), ())
        await reporting._read(SlowVerdicts(0.35, 0.35, 0.35))  # type: ignore[arg-type]
        return told

    told = asyncio.run(scene())
    assert [event.lease_id for event in told if isinstance(event, d.Judged)] == ["l1", "l2", "l3"]
