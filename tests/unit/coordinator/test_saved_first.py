"""Nothing is told before it is on disk: leases, bans, the learner's plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from echo2.base.errors import DiskFull
from echo2.coordinator.operator import Commands
from echo2.coordinator.store import SqlStore, StateChanges
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, group, options, running

WORKERS, GROUPS = 3, 6


class Disk(SqlStore):
    """The real store; `is_full`: it writes nothing any more."""

    is_full = False

    def write(self, changes: StateChanges) -> None:
        if self.is_full and (changes.rows or changes.log):
            raise DiskFull("expected room for the coordinator's state, got: a test")
        super().write(changes)


PATIENT = {"suspect_after": 30.0, "gone_after": 60.0}


async def test_every_lease_that_a_worker_hears_of_is_in_the_store_with_a_higher_attempt_than_before(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path, **PATIENT)) as daemon:
        store, attempts = daemon.hub.state.store, dict.fromkeys((f"g{number}" for number in range(GROUPS)), 0)
        learner = await Node.join(daemon, Role.LEARNER)
        await learner.hello(open_groups=[group(name) for name in attempts])
        workers = [await Node.join(daemon, Role.WORKER) for _ in range(WORKERS)]
        for worker in workers:
            await worker.hello()

        async def work(worker: Node) -> None:
            """Hands back each first attempt and finishes each second one, until cancelled."""
            while min(attempts.values()) < 2:
                await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
                ticket = (await worker.until("lease_grant")).ticket
                saved = {lease.lease_id: lease for lease in store.load().leases}[ticket.lease_id]
                assert (saved.worker_id, saved.attempt) == (worker.credentials.peer_id, ticket.attempt)
                assert ticket.attempt > attempts[ticket.group_id], "two workers would hold the same attempt"
                attempts[ticket.group_id] = ticket.attempt
                reason = pb.LeaseEnded.REASON_HANDED_BACK if ticket.attempt == 1 else pb.LeaseEnded.REASON_FINISHED
                await worker.say(lease_ended=pb.LeaseEnded(lease_id=ticket.lease_id, reason=reason))

        tasks = [asyncio.create_task(work(worker)) for worker in workers]
        (first, *_), others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first.result()
        for other in others:
            other.cancel()
        await asyncio.wait(tasks)


async def test_when_the_state_cannot_be_saved_nothing_is_told_nothing_later_is_saved_and_the_process_ends(
    tmp_path: Path,
) -> None:
    refused: list[str] = []
    is_granted = True
    with pytest.raises(DiskFull):  # of the process, whatever is raised inside: so all is looked at behind it
        async with running(options(tmp_path, **PATIENT), open_store=Disk) as daemon:
            learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
            await learner.hello()
            await worker.hello()
            await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            store, commands = daemon.hub.state.store, Commands(daemon.hub, "h", 1, [], {})
            while not daemon.hub.book.wanting:
                await asyncio.sleep(0.01)
            store.is_full = True
            await learner.say(offer=pb.OfferGroups(groups=[group("g1")]))
            while not daemon.hub.book.groups:
                await asyncio.sleep(0.01)
            for label in ("first", "second"):
                try:
                    commands.create_token(Role.WORKER.value, label, 60.0, 1)
                except DiskFull:
                    refused.append(label)
                store.is_full = False
            try:
                await worker.until("lease_grant")
            except (AssertionError, grpc.aio.AioRpcError):  # the stream has ended
                is_granted = False
            saved = store.load()
    assert refused == ["first", "second"] and not is_granted
    assert not saved.leases and not {"first", "second"} & {token.label for token in saved.tokens}
