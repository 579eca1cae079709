"""What a newcomer is told, field by field, what is kept of it, and who calls too often."""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography.exceptions import InvalidSignature
from hypothesis import given, strategies as st

from echo2.base.clock import Pace
from echo2.base.errors import BadToken, ConfigError, LimitExceeded, MalformedMessage, NotAllowed, Unreachable
from echo2.base.ids import PeerId
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.enrolment import ENROLMENTS_BURST, REPLACED_MAX, EnrolmentService, RenewalService
from echo2.coordinator.fleet.members import Activation, Liveness, OperatorSetting
from echo2.coordinator.fleet.tokens import HELLO_WITHIN_S, SILENT_MAX, USES_DEFAULT, TokenBook
from echo2.coordinator.money.providers import fetch_wheel, machine_setup
from echo2.coordinator.money.providers.machine_setup import SetupService
from echo2.coordinator.operator import Commands
from echo2.outside import entered
from echo2.trust.enrolment import enrol, find_coordinator, keep_renewed, renew, renewal_due_unix_s
from echo2.trust.identity import Identity, JoinLink, NodeCertificate, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.tls import PROTOCOL_VERSION, Credentials
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc, enrolment_pb2 as pb
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import RUN, Node, options, running
from tests.unit.coordinator.test_provisioner import OFFER, Cloud
from tests.unit.outside.test_outside import outside_at


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


async def test_a_certificate_names_its_holders_link_when_renewed_too_and_an_operators_ends_with_it(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path)) as daemon:
        one, other = [await enrol(link_of(daemon), Identity.generate(), Role.WORKER) for _ in range(2)]
        assert one.certificate.token_id == other.certificate.token_id != ""
        learner = await enrol(link_of(daemon, Role.LEARNER), Identity.generate(), Role.LEARNER)
        assert learner.certificate.token_id not in ("", one.certificate.token_id)
        before, clock = one.certificate.token_id, daemon.hub.clock
        for ahead_s in (3600.0, 3600.0, 3600.0, -40 * 86400.0, -40 * 86400.0):  # of the clock with which it started
            daemon.hub.clock = SimpleNamespace(now=lambda ahead_s=ahead_s: clock.now() + ahead_s)
            await renew(one)
            one.check(time.time())
            (await enrol(link_of(daemon), Identity.generate(), Role.WORKER)).check(time.time())
        assert one.certificate.token_id == before
        assert NodeCertificate.parse(one.certificate.pem).whose.token_id == before
        told = [event.text for event in daemon.hub.state.events if f"{one.peer_id} renewed" in event.text]
        assert len(told) == 1, "no node can fill the event log"
        daemon.hub.clock = clock
        operator, worker = [await Node.join(daemon, role) for role in (Role.OPERATOR, Role.WORKER)]
        stub = coordinator_pb2_grpc.OperatorStub(operator.channel)
        await stub.GetStatus(coordinator_pb2.GetStatusRequest())
        for node in (operator, worker):
            daemon.hub.tokens.revoke(node.credentials.certificate.token_id)
        with pytest.raises(grpc.aio.AioRpcError, match="by which it came, was revoked"):  # it has no say any more
            await stub.GetStatus(coordinator_pb2.GetStatusRequest())
        with pytest.raises(NotAllowed, match="by which it came, was revoked"):
            await renew(operator.credentials)
        await renew(worker.credentials)  # who works stays


async def test_a_certificate_is_renewed_when_two_thirds_of_its_life_are_over_and_tried_again_where_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.trust.enrolment.LOOK_S_MAX", 0.05)
    machine, kept = outside_at(time.time()), asyncio.Queue[Credentials]()

    def renewing(now: float) -> asyncio.Task[None]:
        machine.clock.now = now  # type: ignore[attr-defined]
        with entered(machine):
            return asyncio.create_task(keep_renewed(worker, kept.put_nowait))

    async with running(options(tmp_path)) as daemon:
        worker = await enrol(link_of(daemon), Identity.generate(), Role.WORKER)
        before, due = worker.certificate.pem, renewal_due_unix_s(worker.certificate)
        keeping = renewing(due - 7200.0)
        await asyncio.sleep(0.2)
        assert kept.empty(), "not before it is due"
        machine.clock.now = due + 1.0  # type: ignore[attr-defined]  # it is set, or the machine slept
        assert (await asyncio.wait_for(kept.get(), WAIT_S)).certificate.pem != before
        keeping.cancel()
    failing = renewing(due + 3600.0)
    while "days and could not be renewed" not in caplog.text:
        await asyncio.sleep(0.05)
    assert failing.cancel(), "it goes on trying"


async def test_a_coordinator_that_has_moved_is_looked_up_by_the_link_or_by_the_newer_one_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(options(tmp_path)) as daemon:
        link, file, kept = link_of(daemon), tmp_path / "newer.link", list[Credentials]()
        worker = await enrol(link, Identity.generate(), Role.WORKER)
        here, elsewhere = worker.coordinator_address, replace(link, port=1)
        for first, text, is_answered in (
            (link, None, True),
            (link, "rubbish", True),
            (elsewhere, str(link), True),
            (link, str(replace(elsewhere, peer_id=worker.peer_id)), True),  # of another coordinator
            (elsewhere, None, False),
            (replace(link, token="x" * 43), None, False),
        ):
            worker.coordinator_address = "127.0.0.1:2"
            kept.clear()
            file.write_text(text or "")
            await find_coordinator(first, file if text else None, worker, kept.append)
            assert (worker.coordinator_address, kept) == ((here, [worker]) if is_answered else ("127.0.0.1:2", []))
        worker.coordinator_address = here
        await find_coordinator(link, None, worker, kept.append)
        assert not kept, "nothing is written where nothing has changed"
        with entered(outside_at(0.0)):
            await find_coordinator(link, None, worker, kept.append)
        assert "set the clock" in caplog.text, "why no connection can be made"
        late, before = worker.certificate.not_after_unix_s + 1.0, worker.certificate.pem
        for token in daemon.hub.tokens.tokens.values():
            token.expires_at = late + 1.0
        with entered(outside_at(late)):
            daemon.hub.clock = SimpleNamespace(now=lambda: late)
            monkeypatch.setattr("echo2.coordinator.fleet.enrolment.unix_now", lambda: late)
            await find_coordinator(link, None, worker, kept.append)
            worker.check(late)
        assert kept == [worker] and worker.certificate.pem != before, "one that was away until it had expired"


async def test_a_rented_machine_that_lost_its_identity_joins_again_and_its_link_admits_one_worker_at_a_time(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path, usd_per_hour_cap=100.0)) as daemon:
        hub, cloud = daemon.hub, Cloud()
        rented = await Commands(hub, "h", 1, [OFFER], {OFFER.name: cloud}).provisioner.rent("gpu", "", "it is short")
        link = replace(link_of(daemon), token=JoinLink.parse(cloud.links[rented.machine_id]).token)

        async def join() -> Node:
            node = Node(await enrol(link, Identity.generate(), Role.WORKER))
            await node.hello(price_usd_per_hour=9.0)
            return node

        silent = Node(await enrol(link, Identity.generate(), Role.WORKER))
        with pytest.raises(NotAllowed, match="role worker"):
            await enrol(link, Identity.generate(), Role.LEARNER)
        assert silent.credentials.peer_id in hub.tokens.tokens[rented.token_id].peers
        first = await join()
        member = hub.membership.members[first.credentials.peer_id]
        assert member.hello.price_usd_per_hour == 2.0, "it costs what its machine does, whatever it was started with"
        assert member.activation is Activation.ACTIVE
        await enrol(link, first.credentials.identity, Role.WORKER)
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
        second.call.cancel()
        while hub.membership.members[second.credentials.peer_id].last_liveness is Liveness.ALIVE:
            await asyncio.sleep(0.01)
        with pytest.raises(Unreachable, match="it is suspect"):
            await join()
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


# ---- join tokens and the rate at which they may be tried

SECRET = "s" * 43


def book(lifetime_s: float = 60.0, use_limit: int = 0) -> TokenBook:
    made = TokenBook(tokens_max=2)
    made.create(SECRET, "worker", "mine", lifetime_s, use_limit, now=0.0)
    return made


def test_unknown_expired_used_up_revoked_and_foreign_role_are_told_apart_and_no_secret_is_kept() -> None:
    assert SECRET not in repr(book())
    with pytest.raises(BadToken, match="expected one of this run, got one that .* does not know; ask for a new link"):
        book().redeem("t" * 43, "worker", PeerId("a"), 1.0)
    told = "for the role worker, not 'learner'; the link of that role is in RUNS/NAME/links"
    with pytest.raises(NotAllowed, match=told):
        book().redeem(SECRET, "learner", PeerId("a"), 1.0)
    with pytest.raises(BadToken, match="expired 5 s ago"):
        book(10.0).redeem(SECRET, "worker", PeerId("a"), 15.0)
    used = book(use_limit=1)
    used.redeem(SECRET, "worker", PeerId("a"), 1.0)
    used.redeem(SECRET, "worker", PeerId("a"), 1.0)
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        used.redeem(SECRET, "worker", PeerId("b"), 1.0)
    used.revoke(next(iter(used.tokens)))
    with pytest.raises(BadToken, match="revoked"):
        used.redeem(SECRET, "worker", PeerId("a"), 1.0)


def test_who_says_no_hello_is_forgotten_and_one_that_says_it_late_takes_a_use_again() -> None:
    made = book(10 * HELLO_WITHIN_S, use_limit=1)
    token_id = made.redeem(SECRET, "worker", PeerId("a"), 1.0).token_id
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        made.redeem(SECRET, "worker", PeerId("b"), HELLO_WITHIN_S)
    made.redeem(SECRET, "worker", PeerId("b"), HELLO_WITHIN_S + 1.0)
    assert made.tokens[token_id].peers == {"b"}
    with pytest.raises(BadToken, match="no use left: ask for a new link"):
        made.greet(token_id, PeerId("a"))
    made.greet(token_id, PeerId("b"))
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        made.redeem(SECRET, "worker", PeerId("c"), 5 * HELLO_WITHIN_S)


def test_whoever_enrols_without_end_is_kept_in_bounds_and_written_once_each_and_honest_ones_still_join() -> None:
    made = book()
    token_id = made.redeem(SECRET, "worker", PeerId("honest"), 1.0).token_id
    made.greet(token_id, PeerId("honest"))
    for number in range(3 * SILENT_MAX):
        made.changed_peers.clear()
        made.redeem(SECRET, "worker", PeerId(f"p{number}"), 2.0)
        assert len(made.changed_peers) <= 2, "it, and one that is forgotten"
    assert len(made.tokens[token_id].peers) == SILENT_MAX + 1
    made.redeem(SECRET, "worker", PeerId("late"), 3.0)
    made.greet(token_id, PeerId("late"))
    assert {"honest", "late"} <= made.tokens[token_id].peers


def test_a_token_without_a_limit_admits_a_stated_number() -> None:
    made = book()
    (token,) = made.tokens.values()
    token.peers = {PeerId(f"p{number}") for number in range(USES_DEFAULT)}
    with pytest.raises(BadToken, match="used 10000 of 10000 times"):
        made.redeem(SECRET, "worker", PeerId("a"), 1.0)
    made.redeem(SECRET, "worker", PeerId("p7"), 1.0)


def test_a_wish_out_of_range_is_refused_and_so_is_one_token_too_many() -> None:
    made = book()
    for role, lifetime_s, limit in (("king", 1.0, 0), ("worker", 0.0, 0), ("worker", 1e12, 0), ("worker", 1.0, -1)):
        with pytest.raises(MalformedMessage):
            made.create("u" * 43, role, "", lifetime_s, limit, 0.0)
    made.create("u" * 43, "worker", "", 1.0, 0, 0.0)
    with pytest.raises(LimitExceeded):
        made.create("v" * 43, "worker", "", 1.0, 0, 0.0)


@given(pauses=st.lists(st.floats(0, 2), max_size=100))
def test_no_more_pass_than_the_burst_and_the_rate_allow_and_no_caller_starves_another(pauses: list[float]) -> None:
    limiter, now, passed = Pace(per_s=2.0, burst=5), 0.0, 0
    for pause_s in pauses:
        now += pause_s
        wait_s = limiter.wait_s("x", now)
        passed += wait_s == 0.0
        assert wait_s <= 0.5 + 1e-6
    assert passed <= 5 + 2.0 * now + 1e-6
    assert limiter.wait_s("another", now) == 0.0
    later = [limiter.wait_s("x", now + 1000.0) == 0.0 for _ in range(6)]
    assert later == [True] * 5 + [False], "after a long pause a burst passes and no more"


# ---- the wheel for rented machines: what is in it, who gets it, and what the script there refuses

PACKAGE = Path(machine_setup.__file__).parents[3]


def test_the_wheel_holds_this_code_and_its_metadata_and_is_the_same_each_time() -> None:
    made = machine_setup.running_wheel()
    archive = zipfile.ZipFile(io.BytesIO(made.data))
    files = {path.relative_to(PACKAGE.parent).as_posix(): path for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert {name for name in archive.namelist() if name.startswith("echo2/")} == expected
    assert all(archive.read(name) == files[name].read_bytes() for name in expected)
    metadata = made.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert b"\nProvides-Extra: worker\n" in archive.read(f"{metadata}/METADATA")
    assert b"echo-worker = echo2.cli.worker:main" in archive.read(f"{metadata}/entry_points.txt")
    assert f"{metadata}/licenses/LICENSE" in archive.namelist()
    assert archive.read(f"{metadata}/RECORD").count(b"\n") == len(archive.namelist())
    assert made.sha256 == hashlib.sha256(made.data).hexdigest()
    machine_setup.running_wheel.cache_clear()
    assert machine_setup.running_wheel() == made


def test_without_an_installation_there_is_none_and_it_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    machine_setup.running_wheel.cache_clear()
    monkeypatch.setattr(machine_setup, "distribution", missing)
    with pytest.raises(ConfigError, match=r'expected an installed echo2 .* or set install = "git\+URL"'):
        machine_setup.running_wheel()


async def test_a_holder_of_a_token_gets_the_wheel_and_does_not_use_the_token_up(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.links["worker"])
        token, _ = Commands(daemon.hub, "h", 1, [], {}).create_token("worker", "one", 60.0, 1)
        before = {one: set(kept.peers) for one, kept in daemon.hub.tokens.tokens.items()}
        assert await asyncio.to_thread(fetch_wheel.fetched, str(link)) == machine_setup.running_wheel().data
        assert {one: set(kept.peers) for one, kept in daemon.hub.tokens.tokens.items()} == before
        assert token.token_id in before
        stranger = JoinLink(link.host, link.port, link.peer_id, "x" * 43)
        with pytest.raises(grpc.RpcError) as refused:
            await asyncio.to_thread(fetch_wheel.fetched, str(stranger))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        other = JoinLink(link.host, link.port, Identity.generate().peer_id, link.token)
        with pytest.raises(InvalidSignature):  # before the token is shown
            await asyncio.to_thread(fetch_wheel.fetched, str(other))


def test_another_wheel_than_the_pinned_one_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "echo2.whl"
    monkeypatch.setenv("ECHO2_JOIN_LINK", "echo2://h:1/p?token=t")
    monkeypatch.setattr(fetch_wheel, "fetched", lambda link: b"another")
    monkeypatch.setattr("sys.argv", ["-", machine_setup.running_wheel().sha256, str(target)])
    with pytest.raises(SystemExit, match="expected a wheel with the SHA-256 .*: the coordinator was changed since"):
        fetch_wheel.main()
    assert not target.exists()
    monkeypatch.setattr("sys.argv", ["-", hashlib.sha256(b"another").hexdigest(), str(target)])
    fetch_wheel.main()
    assert target.read_bytes() == b"another"
