"""Leases that a worker says it holds: without the coordinator's ticket there are none."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2.base.ids import GroupId, LeaseId, PeerId, RunId
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.leases.lease import GroupPhase, lease_id_of
from echo2.trust.identity import Identity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket
from tests.unit.coordinator.test_daemon import RUN, Node, group, options, running

TICKS_S = 1.2


def ticket_of(worker: Node, **changes: Any) -> Ticket:
    g1, worker_id = GroupId("g1"), worker.credentials.peer_id
    return replace(Ticket(lease_id_of(g1, 7), g1, worker_id, 7, time.time() + 60, RunId(RUN)), **changes)


def raw(ticket: Ticket, signature: bytes = b"s" * 64) -> rollout_pb2.LeaseTicket:
    return rollout_pb2.LeaseTicket(
        lease_id=ticket.lease_id, group_id=ticket.group_id, worker_peer_id=ticket.worker_peer_id,
        attempt=ticket.attempt, deadline_unix_s=ticket.deadline_unix_s, run_id=ticket.run_id, signature=signature,
    )  # fmt: skip


Forgery = Callable[[Node, Identity], list[rollout_pb2.LeaseTicket]]

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "the largest attempt": (lambda w, c: [raw(ticket_of(w, attempt=(1 << 32) - 1))], "MalformedMessage"),
    "no signature": (lambda w, c: [raw(ticket_of(w), b"")], "BadSignature"),
    "another signer": (lambda w, c: [sign_ticket(ticket_of(w), Identity.generate())], "BadSignature"),
    "another worker's": (lambda w, c: [sign_ticket(ticket_of(w, worker_peer_id=PeerId("another")), c)], "NotAllowed"),
    "another run's": (lambda w, c: [sign_ticket(ticket_of(w, run_id=RunId("another")), c)], "NotAllowed"),
    "one twice": (lambda w, c: [sign_ticket(ticket_of(w), c)] * 2, "MalformedMessage"),
    "too many": (lambda w, c: [raw(ticket_of(w, lease_id=LeaseId(f"l{n}"))) for n in range(1025)], "MalformedMessage"),
    "deadline that is no number": (lambda w, c: [raw(ticket_of(w, deadline_unix_s=float("nan")))], "MalformedMessage"),
}


def group_state(daemon: CoordinatorDaemon) -> tuple[GroupPhase, int]:
    opened = daemon.hub.book.groups[GroupId("g1")]
    return opened.phase, opened.attempts


async def test_a_hello_with_a_ticket_that_is_not_its_own_takes_no_lease_and_ends_nobody(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        learner = await Node.join(daemon, Role.LEARNER)
        await learner.hello(open_groups=[group("g1")])
        for name, (forge, expected) in FORGERIES.items():
            worker = await Node.join(daemon, Role.WORKER)
            answer = await worker.hello(held_tickets=forge(worker, daemon.hub.identity))
            assert answer.refusal.code == expected, (name, answer)
            await worker.close()
        await asyncio.sleep(TICKS_S)  # the daemon's own clock has looked at what is there since
        assert group_state(daemon) == (GroupPhase.QUEUED, 0)
        assert (await learner.hello(open_groups=[group("g1")])).WhichOneof("kind") == "welcome"
        await learner.close()
    async with running(options(tmp_path)) as daemon:  # what they said ends no later start either
        await asyncio.sleep(TICKS_S)
        assert group_state(daemon) == (GroupPhase.QUEUED, 0)


async def test_its_own_ticket_keeps_a_lease_and_numbers_beyond_any_groups_end_the_session(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        await learner.hello(open_groups=[group("g1")])
        for name, number in (("tokens", (1 << 64) - 1), ("tokens", 1 << 63), ("finished_rollouts", (1 << 32) - 1)):
            await worker.hello(held_tickets=[sign_ticket(ticket_of(worker), daemon.hub.identity)])
            ticket = (await worker.until("lease_grant")).ticket
            assert ticket.attempt == 7 and group_state(daemon) == (GroupPhase.LEASED, 7)
            await worker.say(lease_progress=pb.LeaseProgress(lease_id=ticket.lease_id, **{name: number}))
            refusal = await worker.until("refusal")
            assert (refusal.code, name in refusal.message) == ("MalformedMessage", True)
            daemon.hub.flush_now()  # every row of it can be written


async def test_a_peer_that_says_hello_again_and_again_is_slowed_down_and_fills_no_log(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        worker = await Node.join(daemon, Role.WORKER)
        answers = [(await worker.hello()).WhichOneof("kind") for _ in range(60)]
        assert answers[0] == "welcome"
        assert answers[-1] == "refusal"
        assert sum("is back" in event.text for event in daemon.hub.state.events) <= 40
