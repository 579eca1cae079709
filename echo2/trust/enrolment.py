"""Enrolment and renewal: sends a certificate request, gets a certificate of the run.

Guarantees: a joiner verifies that it talks to the coordinator that its link names before it shows anything; a certificate is
renewed before it expires, over mutual TLS and without a token. Waits: `timeout_s` for the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc.aio

from echo2.base.errors import EchoError, TrustError
from echo2.base.ids import RunId
from echo2.outside import here, monotonic, unix_now
from echo2.trust.identity import Identity, JoinLink, NodeCertificate, Role, certificate_request, dns_name_of
from echo2.trust.tls import PROTOCOL_VERSION, Credentials, error_of, new_tls_key, open_channel, open_enrolment_channel
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc

ENROL_TIMEOUT_S = 20.0  # a handshake and one transaction of the coordinator's database: seconds on a loaded machine
RENEW_AFTER_SHARE = 2 / 3  # of a certificate's life: an absent coordinator has ten of thirty days to come back
LOOK_S_MAX = 3600.0  # a renewal that failed is tried again within an hour (docs/networking.md)
FAILURES_BEFORE_SEARCH = 3  # failed connections in a row before the coordinator's new address is looked up
_log = logging.getLogger("echo2.broadcast")
Reply = TypeVar("Reply")


def checked_certificate(link: JoinLink, timeout_s: float) -> NodeCertificate:
    """The certificate of the coordinator that `link` pins. Raises Unreachable; TrustError for another peer or an expired one."""
    data = here().net.certificate_at(link.host, link.port, dns_name_of(link.peer_id), timeout_s)
    certificate = NodeCertificate.parse(data, f"coordinator at {link.address}")
    if certificate.peer_id != link.peer_id:
        raise TrustError(
            f"coordinator at {link.address}: expected the peer {link.peer_id}, which the join link names; the coordinator of "
            f"run {certificate.run_id!r:.80} answers there, {certificate.peer_id}. The link is of another run, or its coordinator "
            "has another port by now: join by a new link (on the coordinator's machine: echo2 link @operator.link)"
        )
    certificate.check_time(unix_now())
    return certificate


def check_coordinator(link: JoinLink, timeout_s: float = ENROL_TIMEOUT_S) -> float:
    """Checks that the coordinator that `link` pins answers there; returns how long that took, in seconds. Joins nothing and
    uses no token. Raises Unreachable; TrustError for another peer or an expired certificate."""
    began = monotonic()
    checked_certificate(link, timeout_s)
    return monotonic() - began


async def enrol(link: JoinLink, identity: Identity, role: Role, timeout_s: float = ENROL_TIMEOUT_S) -> Credentials:
    """Joins the run that `link` names. Raises TrustError for a wrong peer or role, BadToken or Unreachable."""
    coordinator = await asyncio.to_thread(checked_certificate, link, timeout_s)
    key = new_tls_key()
    request = enrolment_pb2.EnrolRequest(
        protocol_version=PROTOCOL_VERSION,
        token=link.token,
        role=role.value,
        certificate_request_der=certificate_request(identity, key),
    )
    async with open_enrolment_channel(link, coordinator.pem) as channel:  # it trusts exactly what was checked
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        reply = await _answered(stub.Enrol(request, timeout=timeout_s), f"coordinator at {link.address}")
    certificate = NodeCertificate.parse(reply.certificate_pem, "certificate issued to us")
    certificate.check_role(role)
    credentials = Credentials(
        identity=identity,
        tls_key_pem=key.to_pem(),
        certificate=certificate,
        authority_pem=reply.authority_pem,
        run_id=RunId(reply.run_id),
        coordinator_peer_id=link.peer_id,
        coordinator_address=reply.coordinator_address,
    )
    credentials.check(unix_now())
    return credentials


async def find_coordinator(
    link: JoinLink, link_file: Path | None, credentials: Credentials, save: Callable[[Credentials], None]
) -> None:
    """Looks up the coordinator's present address at the link's host, or at the host that the link's file names by now. Accepts
    only the peer that the first link pinned. Updates the address in `credentials`, and the certificate if it is due for renewal,
    which an expired one would not get, or came by another token, which may be revoked; `save` keeps them. They stay as they are
    if no coordinator answers, or the token is used up."""
    if link_file is not None:
        with contextlib.suppress(OSError, EchoError):
            newer = JoinLink.parse(await asyncio.to_thread(lambda: link_file.read_text().strip()))
            link = newer if newer.peer_id == link.peer_id else link
    try:
        found = await enrol(link, credentials.identity, credentials.role)
        has_moved = found.coordinator_address != credentials.coordinator_address
        if has_moved:
            _log.warning(
                "the coordinator has moved from %s to %s", credentials.coordinator_address, found.coordinator_address
            )
            credentials.coordinator_address = found.coordinator_address
        old, new = credentials.certificate, found.certificate
        is_better = old.token_id != new.token_id or renewal_due_unix_s(old) <= unix_now()
        if is_better:
            credentials.renew(found.tls_key_pem, new)
        if has_moved or is_better:
            save(credentials)
    except (EchoError, OSError) as error:
        # Another peer there, or this machine's clock is wrong: the channel says only that no connection could be made.
        level = logging.WARNING if type(error) is TrustError else logging.DEBUG
        _log.log(level, "the coordinator could not be looked up, or its address kept: %s", error)


async def _answered(call: Awaitable[Reply], peer: str) -> Reply:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer) from None


def renewal_due_unix_s(certificate: NodeCertificate) -> float:
    life_s = certificate.not_after_unix_s - certificate.not_before_unix_s
    return certificate.not_before_unix_s + RENEW_AFTER_SHARE * life_s


async def renew(credentials: Credentials, timeout_s: float = ENROL_TIMEOUT_S) -> None:
    """Gets a new certificate for this node, with a fresh TLS key. Raises Unreachable, NotAllowed or TrustError."""
    key = new_tls_key()
    wanted = certificate_request(credentials.identity, key)
    request = enrolment_pb2.RenewRequest(protocol_version=PROTOCOL_VERSION, certificate_request_der=wanted)
    c = credentials
    async with open_channel(c.coordinator_address, c.coordinator_peer_id, c) as channel:
        stub = enrolment_pb2_grpc.RenewalStub(channel)
        reply = await _answered(stub.Renew(request, timeout=timeout_s), f"coordinator at {c.coordinator_address}")
    certificate = NodeCertificate.parse(reply.certificate_pem, "certificate renewed for us")
    certificate.check_role(c.role)
    certificate.check_time(unix_now())
    if certificate.spki_der != key.spki_der():
        raise TrustError("certificate renewed for us: expected one for the key that we sent, got one for another key")
    credentials.renew(key.to_pem(), certificate)


async def keep_renewed(credentials: Credentials, save: Callable[[Credentials], None]) -> None:
    """Renews the certificate before it expires, for as long as the node lives; `save` keeps it. Ends only by cancellation.
    Waits for two thirds of the certificate's life (checking hourly, because clocks are set), then for the coordinator, retrying
    every thirtieth of a life, at least hourly. A refusal is logged and retried: it may be lifted."""
    while True:
        certificate = credentials.certificate
        life_s = certificate.not_after_unix_s - certificate.not_before_unix_s
        left_s = renewal_due_unix_s(certificate) - unix_now()
        if left_s > 0:
            await asyncio.sleep(min(left_s, LOOK_S_MAX))
            continue
        try:
            await renew(credentials)
            save(credentials)
            _log.info("certificate renewed until %s", time.ctime(credentials.certificate.not_after_unix_s))
        except (EchoError, OSError) as error:
            days = (certificate.not_after_unix_s - unix_now()) / 86400
            _log.warning("the certificate expires in %.1f days and could not be renewed: %s", days, error)
            await asyncio.sleep(min(LOOK_S_MAX, life_s / 30) * here().rng.uniform(0.5, 1.0))
