"""Enrolment: takes a token and a certificate request, returns a certificate of the run. Renewal: the same without a token.

Guarantees: no certificate is returned before the token's use is saved; a wrong token, role or protocol version, a banned
peer and a caller that tries too often are each refused with their own status and message, and change nothing. Leaves to
others: what a request must contain (identity), which tokens exist (tokens).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from echo2.base.errors import BadToken, EchoError, LimitExceeded, NotAllowed, TrustError, VersionMismatch
from echo2.coordinator.fleet.tokens import RateLimiter
from echo2.coordinator.hub import Hub
from echo2.coordinator.sessions import check_protocol
from echo2.outside.guard import Refusals
from echo2.trust.identity import NodeCertificate, PeerIdentity, Role, RunAuthority
from echo2.trust.tls import peer_of
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc

REQUEST_BYTES_MAX = 16 << 10  # a certificate request has 500 bytes
TOKEN_CHARS_MAX = 256  # ours have 43
ENROLMENTS_PER_S = 5.0  # of an address, which may be that of a whole data centre
ENROLMENTS_BURST = 30  # machines of one NAT that are started together
_STATUS: dict[type[EchoError], grpc.StatusCode] = {
    BadToken: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_log = logging.getLogger("echo2.coordinator")


def caller_address(context: Any) -> tuple[str, int]:
    """The caller's host and port, from gRPC's `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT`; port 0 for other forms."""
    head, _, port = unquote(str(context.peer())).rpartition(":")
    host = head.partition(":")[2].strip("[]").removeprefix("::ffff:")
    return host, int(port) if port.isdigit() else 0


def caller_host(context: Any) -> str:
    """The caller's host, without the port."""
    return caller_address(context)[0]


class Callers:
    """Who calls a service that needs no certificate: so many calls of a host, and one form of refusal. `what`: the service."""

    def __init__(
        self, hub: Hub, what: str, calls_per_s: float = ENROLMENTS_PER_S, burst: int = ENROLMENTS_BURST
    ) -> None:
        self._hub, self._what = hub, what
        self._rates, self._refusals = RateLimiter(calls_per_s, burst), Refusals(_log)

    def admit(self, context: Any) -> tuple[str, float]:
        """The caller's host, and the time. LimitExceeded if it calls too often."""
        host, now = caller_host(context), self._hub.clock.now()
        early_s = self._rates.take(host, now)
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
        if request.role not in (Role.WORKER.value, Role.LEARNER.value, Role.OPERATOR.value):
            raise NotAllowed(f"enrolment: expected the role worker, learner or operator, got {request.role[:40]!r}")
        token_id = self._hub.tokens.look_up(request.token, host, now).token_id  # checked before anything is signed
        role = Role(request.role)
        certificate = self._authority.issue(request.certificate_request_der, role, now, token_id=token_id)
        self._hub.membership.check_not_banned(certificate.peer_id)
        token = self._hub.tokens.redeem(request.token, request.role, certificate.peer_id, now)
        self._hub.note("join", f"{request.role} {certificate.peer_id} enrolled with token {token.token_id}")
        self._hub.flush_now()
        return certificate


class RenewalService(enrolment_pb2_grpc.RenewalServicer):
    """Serves renewal, on the services' port: the caller has a valid certificate and gets a new one with the same name and role."""

    def __init__(self, hub: Hub, authority: RunAuthority) -> None:
        self._hub, self._authority, self._callers = hub, authority, Callers(hub, "renewal")

    async def Renew(self, request: enrolment_pb2.RenewRequest, context: Any) -> enrolment_pb2.RenewReply:
        async with self._callers.answered(context):
            _, now = self._callers.admit(context)
            certificate = self._renew(request, peer_of(context), now)
        return enrolment_pb2.RenewReply(certificate_pem=certificate.pem)

    def _renew(self, request: enrolment_pb2.RenewRequest, caller: PeerIdentity, now: float) -> NodeCertificate:
        if len(request.certificate_request_der) > REQUEST_BYTES_MAX:
            raise TrustError(f"renewal: expected a request of up to {REQUEST_BYTES_MAX} bytes")
        self._hub.membership.check_not_banned(caller.peer_id)
        certificate = self._authority.issue(request.certificate_request_der, caller.role, now, token_id=caller.token_id)
        certificate.check_peer(caller.peer_id)
        self._hub.note("join", f"{caller.role} {caller.peer_id} renewed its certificate")
        return certificate
