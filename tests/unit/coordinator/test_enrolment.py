"""What a newcomer is told, field by field, what is kept of it, and who calls too often."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.base.errors import BadToken, NotAllowed, Unreachable
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.enrolment import ENROLMENTS_BURST, REPLACED_MAX, EnrolmentService, RenewalService
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.coordinator.money.providers.machine_setup import SetupService
from echo2.coordinator.operator import Commands
from echo2.trust.enrolment import enrol, renew
from echo2.trust.identity import Identity, JoinLink, NodeCertificate, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire.gen.echo2.v1 import enrolment_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, Node, options, running
from tests.unit.coordinator.test_provisioner import OFFER, Cloud


class Refused(Exception):
    """What `abort` raises in place of gRPC's own error."""


class Context:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, status: object, text: str) -> None:
        raise Refused(text)


async def test_a_reply_names_the_run_its_authority_and_the_certificates_end_and_tokens_are_kept_before_it_leaves(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path)) as daemon:
        authority, me = RunAuthority.create(Identity.generate(), RUN, time.time()), Identity.generate()
        reply = await EnrolmentService(daemon.hub, authority, "h:1").Enrol(
            pb.EnrolRequest(
                protocol_version=PROTOCOL_VERSION, token=JoinLink.parse(daemon.links["worker"]).token, role="worker",
                certificate_request_der=certificate_request(me, TlsKey.generate()),
            ),
            Context(),
        )  # fmt: skip
        certificate = NodeCertificate.parse(reply.certificate_pem, "the certificate")
        assert certificate.peer_id == me.peer_id
        assert reply.certificate_expires_unix_s == certificate.not_after_unix_s > time.time()
        assert reply.coordinator_peer_id == authority.identity.peer_id
        assert (reply.run_id, reply.coordinator_address) == (RUN, "h:1")
        kept = daemon.hub.state.store.load().tokens
        assert any(me.peer_id in token.peers for token in kept), "its use is on the disk as the certificate leaves"
        commands = Commands(daemon.hub, "h", 1, [], {})
        token, _ = commands.create_token("worker", "one", 60.0, 1)
        commands.revoke_token(token.token_id)  # stays revoked though the coordinator is killed at once
        assert [one.is_revoked for one in daemon.hub.state.store.load().tokens if one.label == "one"] == [True]


async def test_a_host_that_calls_too_often_is_refused_before_its_call_is_looked_at(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        hub = daemon.hub
        hub.clock = SimpleNamespace(now=lambda: 1e9)  # nothing is forgiven meanwhile
        authority = RunAuthority.create(Identity.generate(), RUN, time.time())
        enrolment, renewal = EnrolmentService(hub, authority, "h:1"), RenewalService(hub, authority)
        wheel = SetupService(hub)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "enrolment": lambda: enrolment.Enrol(pb.EnrolRequest(), Context()),
            "renewal": lambda: renewal.Renew(pb.RenewRequest(), Context()),
            "wheel": lambda: anext(wheel.FetchWheel(pb.WheelRequest(token="x"), Context())),
        }
        for what, call in calls.items():
            for _ in range(ENROLMENTS_BURST):
                with pytest.raises(Refused, match="^(?!.*too many tries)"):
                    await call()
            with pytest.raises(Refused, match=f"{what} from 127.0.0.1: too many tries"):
                await call()


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


async def test_a_rented_machine_that_lost_its_identity_joins_again_and_its_link_admits_one_worker_at_a_time(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path, usd_per_hour_cap=100.0)) as daemon:
        hub, cloud = daemon.hub, Cloud()
        rented = await Commands(hub, "h", 1, [OFFER], {OFFER.name: cloud}).provisioner.rent("gpu", "", "it is short")
        link = replace(link_of(daemon), token=JoinLink.parse(cloud.links[rented.machine_id]).token)

        async def join() -> Node:
            node = Node(await enrol(link, Identity.generate(), Role.WORKER))
            await node.hello(price_usd_per_hour=2.0)
            return node

        silent = Node(await enrol(link, Identity.generate(), Role.WORKER))
        with pytest.raises(NotAllowed, match="role worker"):
            await enrol(link, Identity.generate(), Role.LEARNER)
        first = await join()
        with pytest.raises(Unreachable, match="worker w to be gone before another takes its place, it is alive"):
            await join()
        hub.part_with(first.credentials.peer_id, "its disk is lost")
        spent = hub.money.sums().usd_spent
        second = await join()
        assert "in its place" in (await first.until("refusal")).message, "its stream does not go on beside the other's"
        for late in (silent, first):
            assert "use went to another" in (await late.hello()).refusal.message
        (kept,) = hub.state.store.load().machines
        assert kept.replaced == (first.credentials.peer_id,), "what it worked stays on the machine's bill"
        assert len(hub.money.workers_of(rented)) == 2 and hub.money.sums().usd_spent - spent < 0.01
        hub.set_worker(second.credentials.peer_id, OperatorSetting.QUARANTINED, "it cheats")
        hub.part_with(second.credentials.peer_id, "it comes back as another")
        with pytest.raises(BadToken, match="used 1 of 1 times"):
            await join()
        hub.set_worker(second.credentials.peer_id, OperatorSetting.AUTOMATIC, "")
        with pytest.raises(BadToken, match="used 1 of 1 times"):
            for _ in range(REPLACED_MAX + 1):
                hub.part_with((await join()).credentials.peer_id, "its disk is lost again")
        assert len(rented.replaced) == REPLACED_MAX


def link_of(daemon: CoordinatorDaemon, role: Role = Role.WORKER) -> JoinLink:
    return JoinLink.parse(daemon.links[role.value])
