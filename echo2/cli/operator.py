"""An operator's connection to the coordinator, for the demo's screen and the `echo2` commands.

Guarantees: enrols once per identity folder and coordinator, and keeps the certificate; every call has a timeout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from echo2.base.errors import EchoError, MalformedMessage
from echo2.cost_model.offers import MarketOffer
from echo2.trust.identity import JoinLink, Role
from echo2.trust.runtime.enrolling import enrol
from echo2.trust.runtime.tls import (
    error_of,
    load_credentials,
    load_or_create_identity,
    open_channel,
    save_credentials,
)
from echo2.wire.bounds import OFFERS_MAX, TEXT_CHARS_MAX, check
from echo2.wire.coordinator import offered_machine_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc

CALL_TIMEOUT_S = 10.0
OUTLOOK_TIMEOUT_S = 30.0


class OperatorClient:
    """Use as `async with OperatorClient(link, folder) as operator`."""

    def __init__(self, link: str, folder: Path) -> None:
        self._link = JoinLink.parse(link)
        self._folder = folder
        self._channel: grpc.aio.Channel | None = None
        self._called: coordinator_pb2_grpc.OperatorStub | None = None

    async def __aenter__(self) -> Self:
        identity = load_or_create_identity(self._folder)
        credentials = load_credentials(self._folder, identity)
        if credentials is None or credentials.coordinator_peer_id != self._link.peer_id:
            credentials = await enrol(self._link, identity, Role.OPERATOR)
            save_credentials(self._folder, credentials)
        self._channel = open_channel(credentials.coordinator_address, credentials.coordinator_peer_id, credentials)
        self._called = coordinator_pb2_grpc.OperatorStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    @property
    def _stub(self) -> coordinator_pb2_grpc.OperatorStub:
        assert self._called is not None, "used inside `async with`"
        return self._called

    async def status(self) -> coordinator_pb2.RunStatus:
        """Returns the whole state of the run. Raises `Unreachable` if the coordinator does not answer."""
        try:
            status: coordinator_pb2.RunStatus = await self._stub.GetStatus(
                coordinator_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None
        return status

    async def create_link(self, role: str, lifetime_s: float, use_limit: int, label: str) -> str:
        """Makes a new join link, which the coordinator returns only this once."""
        request = coordinator_pb2.CreateTokenRequest(role=role, lifetime_s=lifetime_s, use_limit=use_limit, label=label)
        try:
            reply = await self._stub.CreateToken(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None
        return str(reply.join_link)

    async def outlook(self, offers: Sequence[MarketOffer], prices: str, learner_usd_per_hour: float) -> dict[str, Any]:
        """Asks for advice on what to do next and for the history of predictions. Sends at most `OFFERS_MAX` offers."""
        request = coordinator_pb2.GetOutlookRequest(
            offers=[offered_machine_to_message(one) for one in offers[:OFFERS_MAX]], prices=prices[:TEXT_CHARS_MAX],
            learner_usd_per_hour=learner_usd_per_hour,
        )  # fmt: skip
        try:
            reply = await self._stub.GetOutlook(request, timeout=OUTLOOK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None
        check(reply, "the coordinator's outlook")
        try:
            value = json.loads(reply.outlook_json)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise MalformedMessage("the coordinator's outlook: expected a JSON object, got something else")
        return value

    def _explained(self, error: grpc.aio.AioRpcError) -> EchoError:
        return error_of(error, f"coordinator {self._link.peer_id} at {self._link.address}")
