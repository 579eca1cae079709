"""Real identities, each with a connection of its own, want the places of a learner's broadcast."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.connections import LINKS_MAX, PER_TOKEN_MAX
from echo2.broadcast.node import NodeOptions
from echo2.broadcast.transport import Transport
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.trust import tls
from echo2.trust.enrolment import enrol, renew
from echo2.trust.identity import Identity, JoinLink, NodeCertificate, Role
from echo2.wire import broadcast as wire
from tests.contract.fleet import Fleet, Member, until
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import options, running


@contextlib.asynccontextmanager
async def learner_alone(folder: Path, *, has_plan: bool) -> AsyncIterator[tuple[Fleet, Member]]:
    made = Fleet(folder)
    try:
        for number in range(2):
            await made.add(NodeOptions(folder / f"node{number}", chunk_bytes=16 << 10))
        if has_plan:
            made.plan()
        await until(lambda: len(made.members[0].node.stats().links) == 1, "a worker of the run is connected")
        yield made, made.members[0]
    finally:
        for member in made.members:
            await made.stop(member)


async def come(credentials: tls.Credentials, learner: Member, stack: contextlib.AsyncExitStack) -> PeerId:
    connection = await Transport(credentials).dial(learner.address, learner.node.peer_id)
    stack.push_async_callback(connection.close)
    await connection.send(wire.hello(tls.PROTOCOL_VERSION, credentials.run_id))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(connection.receive(), WAIT_S)
    return credentials.peer_id


def are_let_in(learner: Member, peers: list[PeerId]) -> int:
    return len({link.peer_id for link in learner.node.stats().links} & set(peers))


@pytest.mark.parametrize("has_plan", [True, False])
async def test_48_identities_of_one_link_leave_a_place_to_a_newcomer_of_another(has_plan: bool, tmp_path: Path) -> None:
    async with learner_alone(tmp_path, has_plan=has_plan) as (f, learner), contextlib.AsyncExitStack() as stack:
        theirs = [await come(f.credentials(Role.WORKER, "theirs"), learner, stack) for _ in range(LINKS_MAX)]
        ours = await come(f.credentials(Role.WORKER, "ours"), learner, stack)
        await until(lambda: are_let_in(learner, [ours]) == 1, "the newcomer has a place")
        theirs += [await come(f.credentials(Role.WORKER, "theirs"), learner, stack) for _ in range(20)]
        assert are_let_in(learner, [ours]) == 1, "and keeps it"
        assert are_let_in(learner, theirs) <= (PER_TOKEN_MAX if has_plan else LINKS_MAX - 2)
        worker = f.members[1].node
        assert {link.peer_id for link in worker.stats().links} == {learner.node.peer_id}


async def test_a_certificate_names_the_link_that_let_its_holder_in_and_keeps_it_when_it_is_renewed(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path)) as daemon:
        one, other = [await enrol(link_of(daemon), Identity.generate(), Role.WORKER) for _ in range(2)]
        assert one.certificate.token_id == other.certificate.token_id != ""
        learner = await enrol(link_of(daemon, Role.LEARNER), Identity.generate(), Role.LEARNER)
        assert learner.certificate.token_id not in ("", one.certificate.token_id)
        before = one.certificate.token_id
        await renew(one)
        assert one.certificate.token_id == before
        assert NodeCertificate.parse(one.certificate.pem).whose.token_id == before


def link_of(daemon: CoordinatorDaemon, role: Role = Role.WORKER) -> JoinLink:
    return JoinLink.parse(daemon.links[role.value])
