"""What a node calls before it has a certificate, or to renew one: enrolment, renewal, and the probe of `echo2 doctor`.

    enrolment   takes a token and a certificate request, returns a certificate of the run
    renewal     the same for the holder of a certificate, without a token
    probe       tells a machine that may join its address as seen from here, whether it can be dialled, and its link's speed

Guarantees: no certificate is returned before the token's use is saved; a wrong token, role or protocol version, a banned
peer and a caller that tries too often are each refused with their own status and message, and change nothing. The probe serves
only holders of a token, and uses none up; only the address that a call comes from is dialled, once per call; one transfer runs
at a time, of bounded bytes and time. Waits: DIAL_BACK_S for the dial-back, TURN_S for a turn, in which WAITING_MAX calls wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from echo2.base.clock import Pace
from echo2.base.errors import (
    BadToken,
    EchoError,
    LimitExceeded,
    MalformedMessage,
    NotAllowed,
    TrustError,
    VersionMismatch,
)
from echo2.base.ids import PeerId
from echo2.broadcast.reachability import BLOCK_BYTES, DIAL_BACK_S, NONCE_BYTES, TRANSFER_S, TURN_S, Throughput
from echo2.coordinator.fleet.members import Liveness
from echo2.coordinator.fleet.tokens import ROLES, Token
from echo2.coordinator.hub import Hub
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import Refusals
from echo2.trust.identity import NodeCertificate, PeerIdentity, Role, RunAuthority
from echo2.trust.ports import remote_of
from echo2.trust.tls import PROTOCOL_VERSION, peer_of
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc, probe_pb2 as pb, probe_pb2_grpc

REQUEST_BYTES_MAX = 16 << 10  # a certificate request has 500 bytes
TOKEN_CHARS_MAX = 256  # ours have 43
ENROLMENTS_PER_S = 5.0  # of an address, which may be that of a whole data centre
ENROLMENTS_BURST = 30  # machines of one NAT that are started together
REPLACED_MAX = 8  # workers of one machine: whose disk is lost that often is given back as idle
_STATUS: dict[type[EchoError], grpc.StatusCode] = {
    BadToken: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_log = logging.getLogger("echo2.coordinator")


def caller_host(context: Any) -> str:
    return remote_of(context.peer())[0]


def check_protocol(version: int, sender: str) -> None:
    """VersionMismatch for another protocol than this process speaks."""
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{sender}: expected protocol version {PROTOCOL_VERSION}, got {version}: use one release of echo2 everywhere"
        )


class Callers:
    """Who calls a service that needs no certificate: so many calls of a host, and one form of refusal. `what`: the service."""

    def __init__(
        self, hub: Hub, what: str, calls_per_s: float = ENROLMENTS_PER_S, burst: int = ENROLMENTS_BURST
    ) -> None:
        self._hub, self._what = hub, what
        self._rates, self._refusals = Pace(calls_per_s, burst), Refusals(_log)

    def admit(self, context: Any) -> tuple[str, float]:
        """The caller's host, and the time. LimitExceeded if it calls too often."""
        host, now = caller_host(context), self._hub.clock.now()
        early_s = self._rates.wait_s(host, now)
        if early_s > 0:
            raise LimitExceeded(
                f"{self._what} from {host}: too many tries, expected the next in {early_s:.1f} s or later"
            )
        return host, now

    @asynccontextmanager
    async def answered(self, context: Any) -> AsyncIterator[None]:
        """If the block raises an error of echo2, logs the refusal and aborts the call with the error's status and message."""
        try:
            yield
        except EchoError as error:
            self._refusals.warn("%s for %s refused: %s: %s", self._what, context.peer(), type(error).__name__, error)
            await context.abort(_STATUS.get(type(error), grpc.StatusCode.INVALID_ARGUMENT), str(error)[:2000])
            raise


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """Serves enrolment. `services_address`: the address that a node with a certificate connects to next."""

    def __init__(self, hub: Hub, authority: RunAuthority, services_address: str) -> None:
        self._hub, self._authority, self._services_address = hub, authority, services_address
        self._callers = Callers(hub, "enrolment")

    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Any) -> enrolment_pb2.EnrolReply:
        async with self._callers.answered(context):
            certificate = self._enrol(request, *self._callers.admit(context))
        return enrolment_pb2.EnrolReply(
            certificate_pem=certificate.pem,
            authority_pem=self._authority.certificate_pem,
            run_id=self._hub.options.run_id,
            coordinator_peer_id=self._authority.identity.peer_id,
            coordinator_address=self._services_address,
            certificate_expires_unix_s=certificate.not_after_unix_s,
        )

    def _enrol(self, request: enrolment_pb2.EnrolRequest, host: str, now: float) -> NodeCertificate:
        check_protocol(request.protocol_version, "enrolment")
        if len(request.certificate_request_der) > REQUEST_BYTES_MAX or len(request.token) > TOKEN_CHARS_MAX:
            raise TrustError(f"enrolment: expected a request of up to {REQUEST_BYTES_MAX} bytes and a token of the run")
        if request.role not in ROLES:
            raise NotAllowed(f"enrolment: expected the role worker, learner or operator, got {request.role[:40]!r}")
        token = self._hub.tokens.look_up(request.token, host, now)  # checked before anything is signed
        role = Role(request.role)
        # By the time of day, as nodes check it: the hub's clock stays as wrong as it began.
        certificate = self._authority.issue(request.certificate_request_der, role, unix_now(), token_id=token.token_id)
        self._hub.membership.check_not_banned(certificate.peer_id)
        if role.value == token.role and certificate.peer_id not in token.peers:
            self._make_way(token, certificate.peer_id)
        token = self._hub.tokens.redeem(request.token, request.role, certificate.peer_id, now)
        peer_id = certificate.peer_id
        self._hub.note("join", f"{request.role} {peer_id} enrolled with token {token.token_id}", peer_id, "enrols")
        self._hub.flush_now()
        return certificate

    def _make_way(self, token: Token, newcomer: PeerId) -> None:
        """Frees the use of a rented machine's token: one that lost its disk has lost its identity. LimitExceeded, after which a
        worker tries again, until the one before is gone: so the token admits one at a time, whoever holds it. Of a barred worker,
        and after `REPLACED_MAX`, the use stays taken."""
        rented = self._hub.money.machines.values()
        machine = next((machine for machine in rented if machine.token_id == token.token_id), None)
        if machine is None:
            return
        for peer_id in sorted(token.peers):
            member = self._hub.membership.members.get(peer_id)  # None: it has said no hello
            if member is not None:
                if member.activation.is_barred or len(machine.replaced) >= REPLACED_MAX:
                    return
                if member.last_liveness is not Liveness.GONE:
                    raise LimitExceeded(
                        f"join token {token.token_id} of {newcomer}: expected its machine's worker {member.name} to be gone "
                        f"before another takes its place, it is {member.last_liveness.value}"
                    )
                self._hub.dismiss(peer_id, f"{newcomer} has joined from its machine in its place")
                machine.replaced += (peer_id,)
                self._hub.state.save("machines", machine.machine_id, machine)
            self._hub.tokens.forget(token, peer_id)


class RenewalService(enrolment_pb2_grpc.RenewalServicer):
    """Serves renewal, on the services' port: the caller has a valid certificate and gets a new one with the same name and role."""

    def __init__(self, hub: Hub, authority: RunAuthority) -> None:
        self._hub, self._authority, self._callers = hub, authority, Callers(hub, "renewal")

    async def Renew(self, request: enrolment_pb2.RenewRequest, context: Any) -> enrolment_pb2.RenewReply:
        async with self._callers.answered(context):
            self._callers.admit(context)
            certificate = self._renew(request, peer_of(context))
        return enrolment_pb2.RenewReply(certificate_pem=certificate.pem)

    def _renew(self, request: enrolment_pb2.RenewRequest, caller: PeerIdentity) -> NodeCertificate:
        if len(request.certificate_request_der) > REQUEST_BYTES_MAX:
            raise TrustError(f"renewal: expected a request of up to {REQUEST_BYTES_MAX} bytes")
        self._hub.membership.check_not_banned(caller.peer_id)
        self._hub.tokens.check_operator(caller)
        certificate = self._authority.issue(
            request.certificate_request_der, caller.role, unix_now(), token_id=caller.token_id
        )
        certificate.check_peer(caller.peer_id)
        self._hub.note("join", f"{caller.role} {caller.peer_id} renewed its certificate", caller.peer_id, "renews")
        return certificate


CALLS_PER_S = 0.2  # of a host
CALLS_BURST = 12  # four runs of `echo2 doctor`, three calls each
WAITING_MAX = 8  # at 4 s each the last one waits for half a minute, its TURN_S


class ProbeService(probe_pb2_grpc.ProbeServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._callers = Callers(hub, "probe", CALLS_PER_S, CALLS_BURST)
        self._transfer = asyncio.Lock()
        self._waiting = 0

    async def Reach(self, request: pb.ReachRequest, context: Any) -> pb.ReachReply:
        async with self._callers.answered(context):
            check_protocol(request.protocol_version, "probe")
            token = self._token(request.token, context)
            if request.port > 65_535 or (request.port and len(request.nonce) != NONCE_BYTES):
                raise MalformedMessage(f"probe: expected a port and a nonce of {NONCE_BYTES} bytes")
        host, port = remote_of(context.peer())
        failure = await _dial_back(host, request.port, request.nonce) if request.port else "it does not listen"
        return pb.ReachReply(
            host=host,
            port=port,
            is_dialled=not failure,
            failure=failure,
            has_relay=bool(self._hub.relay_address),
            unix_s=self._hub.clock.now(),
            role=token.role,
            token_problem=token.problem(self._hub.clock.now()),
        )

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.ProbeBlock]:
        async with self._callers.answered(context):
            self._token(request.token, context)
            async with self._turn():
                sent, block = Throughput(), pb.ProbeBlock(data=os.urandom(BLOCK_BYTES))
                while not sent.is_enough(monotonic()):
                    yield block
                    sent.add(BLOCK_BYTES, monotonic())

    async def Upload(self, request_iterator: AsyncIterator[pb.UploadBlock], context: Any) -> pb.UploadReply:
        received = Throughput()
        async with self._callers.answered(context):
            first = await anext(aiter(request_iterator), pb.UploadBlock())
            self._token(first.token, context)
            async with self._turn():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * TRANSFER_S):
                        async for block in request_iterator:
                            received.add(len(block.data), monotonic())
                            if received.is_enough(monotonic()):
                                break
        return pb.UploadReply(received_bytes=received.total_bytes, bytes_per_s=received.bytes_per_s)

    def _token(self, secret: str, context: Any) -> Token:
        """The caller's token. BadToken if it is invalid, LimitExceeded if the host calls too often; calls with a wrong token count
        too."""
        host, now = self._callers.admit(context)
        return self._hub.tokens.look_up(secret[:TOKEN_CHARS_MAX], host, now)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= WAITING_MAX:
            raise LimitExceeded(f"probe: expected at most {WAITING_MAX} machines to be measured, try again in a minute")
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._transfer.acquire()
        except TimeoutError:
            raise LimitExceeded(f"probe: other machines were measured for {TURN_S:.0f} s, try again") from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._transfer.release()


async def _dial_back(host: str, port: int, nonce: bytes) -> str:
    """Connects to the address and reads the nonce. Returns an empty text on success, else the reason for the failure."""
    try:
        async with asyncio.timeout(DIAL_BACK_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                answer = await reader.read(NONCE_BYTES)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer at {host}, port {port}, within {DIAL_BACK_S:.0f} s"
    except OSError as error:
        return f"{host}, port {port}: {os.strerror(error.errno) if error.errno else error}"
    return "" if answer == nonce else f"something else answers at {host}, port {port}"
