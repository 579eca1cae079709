"""The report stream against a real gRPC learner on loopback, over mutual TLS."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from echo2.base.ids import GroupId, LeaseId, Version
from echo2.base.rollout import FinishReason, GroupSpec, SamplingParams
from echo2.control.session import ControlSession
from echo2.control.waits import Backoff, Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Role
from echo2.wire.rollout import Ticket, sign_ticket
from echo2.worker import reports as reports_module
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.generation import Generation
from echo2.worker.links import CoordinatorLink
from echo2.worker.options import WorkerLimits
from echo2.worker.reports import Reports
from tests.unit.worker.peers import RUN, SmallRun, issued

STOP = 9


class NullEngine:
    """Takes requests; the tests say what it samples."""

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[int, ...]] = {}

    def submit(self, request: GenerateRequest) -> None:
        self.submitted[request.request_id] = request.token_ids

    async def abort(self, request_id: str) -> None:
        self.submitted.pop(request_id, None)


class Bench:
    """Leases without an engine that samples, whose learner is real."""

    def __init__(self, run: SmallRun) -> None:
        self.run, self.engine, clock = run, NullEngine(), SteadyClock()
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        self.peer_id = credentials.peer_id
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.reports = Reports(credentials, Waits(clock), backoff, connect_s=5.0)
        link = CoordinatorLink(ControlSession(credentials, Waits(clock), backoff))
        self.generation = Generation(WorkerLimits(), clock, self.reports, link)
        self.generation.engine = self.engine  # type: ignore[assignment]
        self.leases = self.generation.leases
        self.leases.on_coordinator(0.05)
        self.task = asyncio.create_task(self.reports.run(self.leases))
        self.reports.move_to(run.learner_credentials.peer_id, run.learner_address)

    def grant(self, name: str, count: int, is_continuation: bool = False) -> None:
        sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(STOP,))
        group = GroupSpec(GroupId(f"g{name}"), (1, 2), count, sampling, 0)
        lease_id = LeaseId(f"l{name}")
        ticket = Ticket(lease_id, group.group_id, self.peer_id, 1, time.time() + 60, RUN)
        self.reports.keep_ticket(sign_ticket(ticket, self.run.authority.identity))
        self.leases.grant(lease_id, group, SteadyClock().now() + 60, is_continuation=is_continuation)

    def sample(self, request_id: str, *tokens: int) -> None:
        reason = FinishReason.STOP if tokens[-1] == STOP else FinishReason.UNFINISHED
        numbers = (-0.5,) * len(tokens)
        self.leases.on_tokens([TokenChunk(request_id, tokens, numbers, numbers, Version(2), reason)])

    async def close(self) -> None:
        self.generation.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def play(scene: Callable[[SmallRun, Bench], Awaitable[None]]) -> None:
    async def body() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            await scene(run, bench)
            await bench.close()

    asyncio.run(body())


async def until(is_so: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)


def test_tokens_reach_the_learner_and_another_worker_goes_on_with_them_until_the_group_is_finished() -> None:
    async def scene(run: SmallRun, bench: Bench) -> None:
        bench.grant("1", 2)
        bench.sample("l1/0", 3, 4)
        await run.learner.until(lambda it: ("g1", 0) in it.held)
        bench.sample("l1/1", 5, STOP)
        await run.learner.until(lambda it: ("g1", 1) in it.finished)
        tickets = [report.HasField("ticket") for report in run.learner.reports]
        assert tickets == [True] + [False] * (len(tickets) - 1), "a ticket travels once a stream"
        second = Bench(run)
        second.grant("1", 2, is_continuation=True)
        await until(lambda: second.engine.submitted)
        assert second.engine.submitted == {"l1/0": (3, 4)}
        second.sample("l1/0", STOP)
        await run.learner.until(lambda it: len(it.finished) == 2)
        assert run.learner.finished[("g1", 0)].token_ids == (3, 4, STOP)
        assert run.learner.finished[("g1", 1)].version_spans[0].version == 2
        await until(lambda: not second.leases.lease_ids)
        await second.close()

    play(scene)


def test_nothing_is_lost_while_the_learner_is_away_or_forgets_and_nothing_doubled_when_it_is_back() -> None:
    async def scene(run: SmallRun, bench: Bench) -> None:
        bench.grant("1", 1)
        bench.sample("l1/0", 3)
        await run.learner.until(lambda it: ("g1", 0) in it.held)
        await run.stop("learner")
        bench.sample("l1/0", 4, 5)
        bench.grant("2", 1)
        bench.sample("l2/0", 6, STOP)
        await run.start_learner()
        await run.learner.until(lambda it: it.finished and len(it.held[("g1", 0)]) == 2)
        run.learner.held.clear()
        bench.sample("l1/0", STOP)
        await run.learner.until(lambda it: len(it.finished) == 2)
        assert run.learner.finished[("g1", 0)].token_ids == (3, 4, 5, STOP)
        assert run.learner.finished[("g2", 0)].token_ids == (6, STOP)

    play(scene)


def test_a_report_that_the_learner_refuses_costs_its_lease_and_no_other() -> None:
    async def scene(run: SmallRun, bench: Bench) -> None:
        run.learner.refuses = {"g1"}
        bench.grant("1", 1)
        bench.grant("2", 1)
        bench.sample("l1/0", 3)
        bench.sample("l2/0", 4, STOP)
        await run.learner.until(lambda it: ("g2", 0) in it.finished)
        await until(lambda: not bench.leases.lease_ids)
        assert ("g1", 0) not in run.learner.held

    play(scene)


def test_a_report_that_gets_no_verdict_is_sent_again_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "VERDICT_S", 0.2)

    async def scene(run: SmallRun, bench: Bench) -> None:
        run.learner.is_silent = True
        bench.grant("1", 1)
        bench.sample("l1/0", 3, STOP)
        await until(lambda: run.learner.streams == 2)
        run.learner.is_silent = False
        await run.learner.until(lambda it: it.finished)
        assert run.learner.finished[("g1", 0)].token_ids == (3, STOP)

    play(scene)
