"""Measures this machine's own link with the help of the coordinator that its join link pins. Nothing is joined.

Guarantees: the coordinator proves to be the peer of the link before the token is shown; the token is not used up; no
listener is left open. Waits: `timeout_s` for an answer, DIAL_BACK_S for the dial-back, TURN_S and twice
TRANSFER_S for each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

import grpc.aio

from echo2.base.errors import PortBusy
from echo2.broadcast.reachability import BLOCK_BYTES, DIAL_BACK_S, NONCE_BYTES, TRANSFER_S, TURN_S, Seen, Throughput
from echo2.broadcast.uplink import local_end
from echo2.outside import monotonic, unix_now
from echo2.trust.enrolment import fetch_certificate
from echo2.trust.identity import JoinLink, NodeCertificate
from echo2.trust.tls import PROTOCOL_VERSION, error_of, open_enrolment_channel
from echo2.wire.gen.echo2.v1 import probe_pb2 as pb
from echo2.wire.gen.echo2.v1 import probe_pb2_grpc

TRANSFER_TIMEOUT_S = TURN_S + 2 * TRANSFER_S


@dataclass(frozen=True, slots=True)
class OwnLink:
    """The result of a probe. `tried_port`: the port that the coordinator dialled back. `skew_s`: how far its clock is ahead of
    ours. A rate of 0.0 was not measured; `rate_problem` says why."""

    seen: Seen
    tried_port: int
    failure: str
    skew_s: float
    role: str
    token_problem: str
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rate_problem: str = ""


async def look_at_own_link(link: JoinLink, ports: Mapping[str, int], timeout_s: float) -> OwnLink:
    """Runs the probe; listens for the dial-back on the port of the link's role (0 or missing: any port).

    Raises Unreachable, TrustError, BadToken, VersionMismatch or PortBusy.
    """
    shown = NodeCertificate.parse(
        await asyncio.to_thread(fetch_certificate, link, timeout_s), f"coordinator at {link.address}"
    )
    shown.check_peer(link.peer_id)
    async with open_enrolment_channel(link, shown.pem) as channel:
        stub = probe_pb2_grpc.ProbeStub(channel)
        try:
            question = pb.ReachRequest(protocol_version=PROTOCOL_VERSION, token=link.token)
            reach: pb.ReachReply = await stub.Reach(question, timeout=timeout_s)
            own_link = await _reach(stub, link, ports.get(reach.role, 0), timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"coordinator at {link.address}") from None
        try:
            down, up = await _download(stub, link.token), await _upload(stub, link.token)
        except grpc.aio.AioRpcError as error:
            return replace(own_link, rate_problem=str(error_of(error, f"coordinator at {link.address}")))
    return replace(own_link, uplink_bytes_per_s=up, downlink_bytes_per_s=down)


async def _reach(stub: probe_pb2_grpc.ProbeStub, link: JoinLink, port: int, timeout_s: float) -> OwnLink:
    nonce = secrets.token_bytes(NONCE_BYTES)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    try:
        listener = await asyncio.start_server(greet, sock=_listening(port))
    except OSError as error:
        raise PortBusy(
            f"expected to listen on port {port}: {os.strerror(error.errno) if error.errno else error}"
        ) from None
    async with listener:
        tried = port or listener.sockets[0].getsockname()[1]
        began = unix_now()
        request = pb.ReachRequest(protocol_version=PROTOCOL_VERSION, token=link.token, port=tried, nonce=nonce)
        reply: pb.ReachReply = await stub.Reach(request, timeout=timeout_s + DIAL_BACK_S)
        ended = unix_now()
        skew_s = min(0.0, reply.unix_s - began) + max(
            0.0, reply.unix_s - ended
        )  # 0 if the coordinator's time lies between ours
    dialled = tried if reply.is_dialled else 0
    seen = Seen(local_end(link.port), (reply.host, reply.port), dialled, reply.has_relay)
    return OwnLink(seen, tried, reply.failure, skew_s, reply.role, reply.token_problem)


def _listening(port: int) -> socket.socket:
    """A listening socket at every address of this machine, including IPv6 if available."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off; a busy port fails again below
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


async def _download(stub: probe_pb2_grpc.ProbeStub, token: str) -> float:
    rate = Throughput()
    call = stub.Download(pb.DownloadRequest(token=token), timeout=TRANSFER_TIMEOUT_S)
    async for block in call:
        rate.add(len(block.data), monotonic())
        if rate.is_enough(monotonic()):
            break
    call.cancel()
    return rate.bytes_per_s


async def _upload(stub: probe_pb2_grpc.ProbeStub, token: str) -> float:
    """Uploads until the coordinator has seen enough and ends the stream; returns the rate that it measured."""
    data = os.urandom(BLOCK_BYTES)

    async def blocks() -> AsyncIterator[pb.UploadBlock]:
        yield pb.UploadBlock(token=token)
        while True:
            yield pb.UploadBlock(data=data)

    reply: pb.UploadReply = await stub.Upload(blocks(), timeout=TRANSFER_TIMEOUT_S)
    return reply.bytes_per_s
