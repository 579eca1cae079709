"""Enrolment over real gRPC on loopback, and what a node keeps: what the error says. Who knows whom: test_net."""

import asyncio
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from echo2.base.errors import BadToken, PortBusy, StateError, TrustError, Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.outside import MACHINE, entered
from echo2.outside.files import MachineFiles
from echo2.trust import tls
from echo2.trust.enrolment import enrol
from echo2.trust.identity import Identity, JoinLink, NodeCertificate, Role, RunAuthority
from echo2.trust.ports import LEARNER
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc
from echo2.wire.gen.echo2.v1.probe_pb2 import ProbeBlock
from tests.unit.outside.test_outside import outside_at

RUN = RunId("a-run")


class _Enrolment(enrolment_pb2_grpc.EnrolmentServicer):
    """The smallest honest service: one token, and the role that was asked for unless `role` is set."""

    def __init__(self, authority: RunAuthority, role: Role | None = None) -> None:
        self.authority, self.role = authority, role

    async def Enrol(self, request: Any, context: Any) -> Any:
        if request.token != "good":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected a known token")
        role = self.role or Role(request.role)
        certificate = self.authority.issue(request.certificate_request_der, role, time.time())
        return enrolment_pb2.EnrolReply(
            certificate_pem=certificate.pem, authority_pem=self.authority.certificate_pem, run_id=RUN,
            coordinator_peer_id=self.authority.identity.peer_id, coordinator_address="127.0.0.1:1",
        )  # fmt: skip


@asynccontextmanager
async def _serving(servicer: _Enrolment, credentials: grpc.ServerCredentials) -> AsyncIterator[int]:
    server = tls.new_enrolment_server()
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(servicer, server)
    port = tls.bind_server(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def _authority() -> RunAuthority:
    return RunAuthority.create(Identity.generate(), RUN, time.time())


def _link(port: int, peer_id: PeerId, token: str = "good") -> JoinLink:
    return JoinLink("127.0.0.1", port, peer_id, token)


async def test_wrong_pin_token_role_and_address_each_say_so() -> None:
    authority = _authority()
    pinned = authority.identity.peer_id
    async with _serving(_Enrolment(authority), tls.enrolment_server_credentials(authority)) as port:
        other = Identity.generate().peer_id
        text = f"expected the peer {other}, which the join link names; the coordinator of run '{RUN}' answers there, {pinned}"
        with pytest.raises(TrustError, match=f"{text}.*join by a new link"):
            await enrol(_link(port, other), Identity.generate(), Role.WORKER)
        with pytest.raises(BadToken, match="known token"):
            await enrol(_link(port, pinned, "bad"), Identity.generate(), Role.WORKER)
    wrong_role = _Enrolment(authority, role=Role.OPERATOR)
    async with _serving(wrong_role, tls.enrolment_server_credentials(authority)) as port:
        with pytest.raises(TrustError, match="expected the role worker, got operator"):
            await enrol(_link(port, pinned), Identity.generate(), Role.WORKER)
    with pytest.raises(Unreachable, match="expected an answer within 2 s"):
        await enrol(_link(port, pinned), Identity.generate(), Role.WORKER, timeout_s=2)


async def test_authority_that_is_not_the_pinned_peers_is_refused() -> None:
    class Swapped(_Enrolment):
        async def Enrol(self, request: Any, context: Any) -> Any:
            reply = await super().Enrol(request, context)
            reply.authority_pem = _authority().certificate_pem
            return reply

    authority = _authority()
    async with _serving(Swapped(authority), tls.enrolment_server_credentials(authority)) as port:
        with pytest.raises(TrustError, match="expected the peer"):
            await enrol(_link(port, authority.identity.peer_id), Identity.generate(), Role.WORKER)
    with pytest.raises(PortBusy, match=r"192\.0\.2\.1"):
        credentials = tls.server_credentials(tls.coordinator_credentials(authority, "x:1"))
        tls.bind_server(tls.new_server(LEARNER), "192.0.2.1:7000", credentials)


def test_keys_and_credentials_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    identity = tls.load_or_create_identity(tmp_path)
    assert tls.load_or_create_identity(tmp_path).peer_id == identity.peer_id
    authority = tls.load_or_create_authority(tmp_path, identity, RUN)
    again = tls.load_or_create_authority(tmp_path, identity, RUN)
    assert again.certificate_pem == authority.certificate_pem
    with pytest.raises(StateError, match="'a-run'"):
        tls.load_or_create_authority(tmp_path, identity, RunId("another"))
    assert tls.load_credentials(tmp_path, identity) is None
    credentials = tls.coordinator_credentials(authority, "h:1")
    tls.save_credentials(tmp_path, credentials)
    assert tls.load_credentials(tmp_path, identity) == credentials
    with entered(outside_at(credentials.certificate.not_after_unix_s + 1.0)):
        assert tls.load_credentials(tmp_path, identity) is None, "whoever comes back after a month enrols anew"
    tls.save_credentials(tmp_path, replace(credentials, tls_key_pem=tls.new_tls_key().to_pem()))
    assert tls.load_credentials(tmp_path, identity) is None, "nor what is not of one piece"
    for path in tmp_path.glob("*"):
        assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(TrustError, match="0600"):
        tls.load_or_create_identity(tmp_path)


def test_two_commands_may_write_a_secret_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two of an operator do, each of another run, in the one folder of their user."""
    path, others = tmp_path / "secret", [b"of another process"]

    class InterruptedFiles(MachineFiles):
        def sync(self, handle: int) -> None:
            if others:
                with monkeypatch.context() as another:
                    another.setattr("os.getpid", lambda: 1)
                    tls.write_secret(path, others.pop())
            super().sync(handle)

    monkeypatch.setattr(MACHINE, "files", InterruptedFiles())
    tls.write_secret(path, b"ours")
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_no_flipped_bit_of_what_a_node_keeps_makes_it_another_node(tmp_path: Path) -> None:
    identity = tls.load_or_create_identity(tmp_path)
    authority = tls.load_or_create_authority(tmp_path, identity, RUN)
    tls.save_credentials(tmp_path, tls.coordinator_credentials(authority, "h:1"))

    def load() -> tuple[str, bytes, bytes, str]:
        found = tls.load_or_create_identity(tmp_path)
        kept = tls.load_credentials(tmp_path, found)
        assert kept is not None
        run = tls.load_or_create_authority(tmp_path, found, RUN)
        return found.peer_id, run.certificate_pem, run.key_pem(), kept.coordinator_address

    expected = load()
    for name in ("identity.key", "authority.key", "authority.pem", "credentials.json"):
        path = tmp_path / name
        whole, refused = path.read_bytes(), 0
        step = max(1, len(whole) // 40)
        for at in range(0, len(whole), step):
            data = bytearray(whole)
            data[at] ^= 1 << (at % 7)
            path.write_bytes(data)
            try:
                assert load() == expected, f"{name}: byte {at} changed something in silence"
            except StateError as error:
                assert name in str(error) or str(tmp_path) in str(error)
                refused += 1
        assert refused > 20, name  # white space and a PEM's own framing may change without a change of meaning
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(StateError, match=re.escape(str(tmp_path))):
            load()
        path.write_bytes(whole)
    assert load() == expected


def test_an_identity_is_not_made_anew_beside_what_it_signed(tmp_path: Path) -> None:
    identity = tls.load_or_create_identity(tmp_path)
    tls.load_or_create_authority(tmp_path, identity, RUN)
    for name in ("identity.key", "authority.key", "authority.pem"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(
            StateError, match=f"{re.escape(name)}: expected it beside authority.*, found none.*estore it"
        ):
            tls.load_or_create_authority(tmp_path, tls.load_or_create_identity(tmp_path), RUN)
        assert not (tmp_path / name).exists()
        tls.write_secret(tmp_path / name, whole)
    for name in ("identity.key", "authority.key", "authority.pem"):
        (tmp_path / name).unlink()
    tls.write_secret(tmp_path / "credentials.json", b"of a worker")
    with pytest.raises(StateError, match="expected it beside credentials.json, found none"):
        tls.load_or_create_identity(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_secret_of_another_user_is_named_with_its_owner(tmp_path: Path) -> None:
    tls.load_or_create_identity(tmp_path)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(
            StateError, match="as user 65534, got: Permission denied .* is of user 0: start as that user"
        ):
            tls.load_or_create_identity(tmp_path)
    finally:
        os.seteuid(0)


async def test_a_renewed_certificate_is_shown_at_the_next_handshake_and_connections_stay(tmp_path: Path) -> None:
    authority = _authority()
    server_side = tls.coordinator_credentials(authority, "")
    client = tls.coordinator_credentials(authority, "")

    async def shown(port: int) -> bytes:
        """The certificate that the server shows a newcomer."""

        def look() -> bytes:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw) as connection:
                return connection.getpeercert(binary_form=True) or b""

        return NodeCertificate.parse(await asyncio.to_thread(look)).pem

    server = tls.new_server(LEARNER)
    handler = grpc.unary_unary_rpc_method_handler(_echo, ProbeBlock.FromString, ProbeBlock.SerializeToString)
    server.add_registered_method_handlers("t.T", {"Echo": handler})
    port = tls.bind_server(server, "127.0.0.1:0", tls.server_credentials(server_side))
    await server.start()
    async with tls.open_channel(f"127.0.0.1:{port}", authority.identity.peer_id, client) as channel:
        call = channel.unary_unary("/t.T/Echo")
        first, second = (ProbeBlock(data=text).SerializeToString() for text in (b"before", b"after"))
        assert await call(first) == first
        before = server_side.certificate.pem
        assert await shown(port) == before
        fresh = tls.coordinator_credentials(authority, "")
        server_side.renew(fresh.tls_key_pem, fresh.certificate)
        assert await shown(port) == fresh.certificate.pem != before
        assert await call(second) == second
    stranger = tls.coordinator_credentials(RunAuthority.create(Identity.generate(), RunId("run-1"), time.time()), "")
    with pytest.raises(TrustError):
        server_side.renew(stranger.tls_key_pem, stranger.certificate)
    await server.stop(None)


async def _echo(request: ProbeBlock, _: object) -> ProbeBlock:
    return request
