"""Serves `echo2 doctor` on a machine that may join: its address as seen from here, whether it can be dialled, its link's speed.

Guarantees: only holders of a token of the run are served, and no token is used up; only the address that a call comes from
is dialled, once per call; one transfer runs at a time, of bounded bytes and time, and at most WAITING_MAX calls wait for their
turn; a host that calls too often is refused. Waits: DIAL_BACK_S for the dial-back, TURN_S for a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from echo2.base.errors import LimitExceeded, MalformedMessage
from echo2.broadcast.reachability import BLOCK_BYTES, DIAL_BACK_S, NONCE_BYTES, TRANSFER_S, TURN_S, Throughput
from echo2.coordinator.fleet.enrolment import TOKEN_CHARS_MAX, Callers, caller_address
from echo2.coordinator.fleet.tokens import Token
from echo2.coordinator.hub import Hub
from echo2.coordinator.sessions import check_protocol
from echo2.outside import monotonic
from echo2.wire.gen.echo2.v1 import probe_pb2 as pb
from echo2.wire.gen.echo2.v1 import probe_pb2_grpc

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
        host, port = caller_address(context)
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
                said = await reader.read(NONCE_BYTES)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer at {host}, port {port}, within {DIAL_BACK_S:.0f} s"
    except OSError as error:
        return f"{host}, port {port}: {os.strerror(error.errno) if error.errno else error}"
    return "" if said == nonce else f"something else answers at {host}, port {port}"
