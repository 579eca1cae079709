"""The report stream against a real gRPC learner on loopback, over mutual TLS; and what orders do to a worker."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.base.clock import Backoff, Waits
from echo2.base.errors import EngineError, VersionMismatch
from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, FinishReason, GroupSpec, SamplingParams
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.control.session import ControlSession
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, JoinLink, Role, RunAuthority
from echo2.trust.tls import load_or_create_identity, save_credentials
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import Ticket, sign_ticket
from echo2.worker import links as links_module
from echo2.worker.engines.engine import GenerateRequest, TokenChunk
from echo2.worker.generation import Generation
from echo2.worker.links import CoordinatorCommands, CoordinatorLink, Reports, join
from echo2.worker.worker import Worker
from tests.certificates import issued
from tests.patience import WAIT_S
from tests.unit.worker.peers import RUN, SmallRun, until

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
    """Leases without an engine that samples, whose learner is real and whose coordinator is the test: it says what `orders` takes.
    `ended`: what the coordinator is told of leases."""

    def __init__(self, run: SmallRun, folder: Path) -> None:
        self.run, self.engine, clock = run, NullEngine(), SteadyClock()
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        self.peer_id = credentials.peer_id
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.reports = Reports(credentials, Waits(clock), backoff, connect_s=5.0)
        link = CoordinatorLink(ControlSession(credentials, Waits(clock), backoff))
        self.ended: list[tuple[LeaseId, EndReason]] = []
        link.end_lease = lambda lease_id, reason, message: self.ended.append((lease_id, reason))  # type: ignore[method-assign]
        self.generation = Generation(clock, self.reports, link)
        self.generation.engine = self.engine  # type: ignore[assignment]
        self.leases = self.generation.leases
        node = BroadcastNode(credentials, NodeOptions(folder))
        self.orders = CoordinatorCommands(link, self.leases, self.reports, node, clock, lambda finding: None)
        self.leases.on_coordinator(0.05)
        self.task = asyncio.create_task(self.reports.run(self.leases))
        self.reports.move_to(run.learner_credentials.peer_id, run.learner_address)

    def grant(
        self, name: str, count: int, *, is_continuation: bool = False, is_renewal: bool = False, worker: str = "",
        ticket_of: str = "",
    ) -> None:  # fmt: skip
        sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(STOP,))
        group = GroupSpec(GroupId(f"g{name}"), (1, 2), count, sampling, 0)
        ticket = Ticket(
            LeaseId(f"l{name}"), GroupId(ticket_of or group.group_id), PeerId(worker or self.peer_id), 1,
            time.time() + 60, RUN,
        )  # fmt: skip
        grant = pb.LeaseGrant(
            ticket=sign_ticket(ticket, self.run.authority.identity), group=wire.group_to_message(group),
            is_continuation=is_continuation, is_renewal=is_renewal,
        )  # fmt: skip
        self.orders.on_order(pb.WorkerOrder(lease_grant=grant))

    def holds(self, lease_id: LeaseId) -> bool:
        assert (self.reports.ticket_of(lease_id) is not None) == (lease_id in self.leases.lease_ids)
        return lease_id in self.leases.lease_ids

    def sample(self, request_id: str, *tokens: int) -> None:
        reason = FinishReason.STOP if tokens[-1] == STOP else FinishReason.UNFINISHED
        numbers = (-0.5,) * len(tokens)
        self.leases.on_tokens([TokenChunk(request_id, tokens, numbers, numbers, Version(2), reason)])

    async def close(self) -> None:
        self.generation.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def working(folder: Path) -> AsyncIterator[tuple[SmallRun, Bench]]:
    async with SmallRun() as run:
        bench = Bench(run, folder)
        yield run, bench
        await bench.close()


async def test_reports_that_are_ended_just_as_a_connection_stands_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is refused by its coordinator while its learner answers would else stay for ever."""
    is_ready = asyncio.Event()

    @asynccontextmanager
    async def channel(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(channel_ready=is_ready.wait)

    monkeypatch.setattr(links_module, "open_channel", channel)
    for turns in range(6):
        is_ready.clear()
        reports = Reports(None, Waits(SteadyClock()), Backoff(random.Random(1)), connect_s=5.0)  # type: ignore[arg-type]
        reports.move_to(PeerId("learner"), "127.0.0.1:1")
        task = asyncio.create_task(reports.run(None))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        is_ready.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_too_late = not task.cancel()
        with pytest.raises((asyncio.CancelledError, AttributeError)):
            await asyncio.wait_for(task, WAIT_S)
        assert task.cancelled() or is_too_late, turns


async def test_tokens_reach_the_learner_and_another_worker_goes_on_with_them(tmp_path: Path) -> None:
    async with working(tmp_path) as (run, bench):
        bench.grant("1", 2)
        bench.sample("l1/0", 3, 4)
        await run.learner.until(lambda it: ("g1", 0) in it.held)
        bench.sample("l1/1", 5, STOP)
        await run.learner.until(lambda it: ("g1", 1) in it.finished)
        tickets = [report.HasField("ticket") for report in run.learner.reports]
        assert tickets == [True] + [False] * (len(tickets) - 1), "a ticket travels once a stream"
        second = Bench(run, tmp_path / "second")
        second.grant("1", 2, is_continuation=True)
        await until(lambda: second.engine.submitted)
        assert second.engine.submitted == {"l1/0": (3, 4)}
        second.sample("l1/0", STOP)
        await run.learner.until(lambda it: len(it.finished) == 2)
        assert run.learner.finished[("g1", 0)].token_ids == (3, 4, STOP)
        assert run.learner.finished[("g1", 1)].version_spans[0].version == 2
        await until(lambda: not second.leases.lease_ids)
        await second.close()


async def test_nothing_is_lost_while_the_learner_is_away_nor_doubled_when_it_is_back(tmp_path: Path) -> None:
    async with working(tmp_path) as (run, bench):
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


async def test_a_report_that_the_learner_refuses_costs_its_lease_alone_and_one_without_a_verdict_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "VERDICT_S", 0.2)
    async with working(tmp_path) as (run, bench):
        run.learner.refuses = {"g1"}
        bench.grant("1", 1)
        bench.grant("2", 1)
        bench.sample("l1/0", 3)
        bench.sample("l2/0", 4, STOP)
        await run.learner.until(lambda it: ("g2", 0) in it.finished)
        await until(lambda: not bench.leases.lease_ids)
        assert ("g1", 0) not in run.learner.held
        streams, run.learner.is_silent = run.learner.streams, True
        bench.grant("3", 1)
        bench.sample("l3/0", 3, STOP)
        await until(lambda: run.learner.streams > streams)
        run.learner.is_silent = False
        await run.learner.until(lambda it: ("g3", 0) in it.finished)
        assert run.learner.finished[("g3", 0)].token_ids == (3, STOP)


async def test_the_learner_is_shown_a_renewed_certificate(tmp_path: Path) -> None:
    """It looks at the stream's one at each call, and would refuse all leases that continue once the old one has expired."""
    async with working(tmp_path) as (run, bench):
        await until(lambda: run.learner.streams == 1)
        worker = SimpleNamespace(reports=bench.reports, _options=SimpleNamespace(folder=tmp_path))
        Worker._save(worker, bench.reports.credentials)  # type: ignore[arg-type]
        await until(lambda: run.learner.streams == 2, 5.0)


async def test_a_lease_under_anothers_ticket_is_refused_and_a_late_renewal_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator renewed it before it had heard of the end."""

    async with working(tmp_path) as (_, bench):
        # A machine whose clock is set under way has its leases for as long as before.
        monkeypatch.setattr(links_module, "unix_now", lambda: time.time() + 3600.0)
        bench.grant("0", 1, worker="another")
        bench.grant("0", 1, ticket_of="g2")
        assert not bench.holds(LeaseId("l0")) and bench.ended == [(LeaseId("l0"), EndReason.REFUSED)] * 2
        bench.grant("1", 1)
        bench.grant("1", 1, is_renewal=True)
        await asyncio.sleep(0)
        assert bench.holds(LeaseId("l1")) and bench.engine.submitted, "it is not given up"
        bench.leases.refuse(LeaseId("l1"), "the group is closed")
        bench.grant("1", 1, is_renewal=True)
        assert not bench.holds(LeaseId("l1"))
        bench.leases.finish_up()
        bench.grant("3", 1)
        assert not bench.holds(LeaseId("l3")) and bench.ended[-1] == (LeaseId("l3"), EndReason.HANDED_BACK)
        deadlines: list[float] = []
        monkeypatch.setattr(type(bench.leases), "grant", lambda *given, is_continuation: deadlines.append(given[3]))
        bench.orders.on_welcome(pb.WorkerWelcome(report_interval_s=1.0, unix_s=time.time() + 3600.0))
        bench.grant("2", 1)
        left_s = deadlines[0] - SteadyClock().now()
        assert left_s == pytest.approx(60.0 - 3600.0, abs=10.0), "on the coordinator's clock"


async def test_a_worker_ends_when_the_learner_comes_back_with_another_model_or_longer_sequences(tmp_path: Path) -> None:
    """One with a new folder has other prompts under the same names: what is under way was for the one before."""
    async with working(tmp_path) as (run, bench):

        def tell(digest: str, tokens: int, peer_id: PeerId = bench.peer_id) -> None:
            learner = pb.LearnerWhereabouts(
                peer_id=peer_id, address="h:1", chunk_address="h:2", model_digest=digest,
                longest_sequence_tokens=tokens,
            )  # fmt: skip
            bench.orders.on_order(pb.WorkerOrder(learner=learner))

        tell("a" * 64, 40)
        bench.grant("1", 1)
        tell("a" * 64, 0)  # it does not say
        assert bench.holds(LeaseId("l1"))
        tell("a" * 64, 40, run.learner_credentials.peer_id)
        assert not bench.leases.lease_ids and bench.ended == [(LeaseId("l1"), EndReason.HANDED_BACK)]
        bench.grant("2", 1)
        tell("a" * 64, 40, run.learner_credentials.peer_id)
        assert bench.holds(LeaseId("l2")), "it is known by now"
        tell("a" * 64, 30)
        tell("a" * 64, 40)  # for which memory is laid out, whatever came between
        with pytest.raises(EngineError, match="expected 40 tokens, .* it is now 41; start this worker anew"):
            tell("a" * 64, 41)
        with pytest.raises(VersionMismatch, match="the learner's model: expected .* it now trains .*ffff"):
            tell("f" * 64, 40)


async def test_a_certificate_that_is_about_to_expire_needs_no_token_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed without one: the link's may have been used up or revoked since."""
    authority = RunAuthority.create(Identity.generate(), RUN, time.time())
    kept = issued(authority, identity=load_or_create_identity(tmp_path))
    save_credentials(tmp_path, kept)
    monkeypatch.setattr(links_module, "unix_now", lambda: kept.certificate.not_after_unix_s - 3600)
    monkeypatch.setattr(links_module, "enrolled", None)  # it is not asked for
    link = JoinLink("127.0.0.1", 1, authority.identity.peer_id, "used up")
    again = await join(link, tmp_path, Waits(SteadyClock()), Backoff(random.Random(0)))
    assert again.certificate == kept.certificate
