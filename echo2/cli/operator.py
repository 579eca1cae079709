"""An operator's connection to the coordinator, for the demo's screen and the `echo2` commands.

Guarantees: enrols once per identity folder and coordinator, and keeps the certificate; every call has a timeout.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import json_format
from rich.console import Console

from echo2.base.errors import EchoError, MalformedMessage
from echo2.cli.options import link_text
from echo2.trust.enrolment import enrol, find_coordinator
from echo2.trust.identity import JoinLink, Role
from echo2.trust.tls import error_of, load_credentials, load_or_create_identity, open_channel, save_credentials
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc

CALL_TIMEOUT_S = 10.0  # the coordinator answers from memory
ACT_TIMEOUT_S = 30.0  # an action may ask a provider


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
        else:
            await find_coordinator(self._link, None, credentials, lambda new: save_credentials(self._folder, new))
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

    async def act(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carries out one of the operator's actions, as the page does, and returns its answer."""
        request = coordinator_pb2.ActRequest(name=name, body_json=json.dumps(body).encode())
        try:
            reply = await self._stub.Act(request, timeout=ACT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error) from None
        check(reply, "the coordinator's answer")
        try:
            value = json.loads(reply.answer_json)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise MalformedMessage("the coordinator's answer: expected a JSON object, got something else")
        return value

    def _explained(self, error: grpc.aio.AioRpcError) -> EchoError:
        return error_of(error, f"coordinator {self._link.peer_id} at {self._link.address}")


OPERATOR_FOLDER = Path("~/.config/echo2/operator")  # one identity for all runs of a user


def show_status(link: str, as_json: bool) -> int:
    """Prints the run's status; returns the exit code."""
    return asyncio.run(_show(link_text(link), as_json))


async def _show(link: str, as_json: bool) -> int:
    from echo2.cli.live import ScreenState, draw  # which asks by OperatorClient itself

    async with OperatorClient(link, OPERATOR_FOLDER.expanduser()) as operator:
        status = await operator.status()
    if as_json:
        print(json_format.MessageToJson(status, preserving_proto_field_name=True))
        return 0
    Console().print(draw(ScreenState(title=f"run {status.run_id}", status=status)))
    return 0


def make_link(link: str, role: str, lifetime_s: float, use_limit: int, label: str) -> int:
    """Prints a new join link, which cannot be shown again; returns the exit code."""

    async def ask() -> str:
        async with OperatorClient(link_text(link), OPERATOR_FOLDER.expanduser()) as operator:
            return await operator.create_link(role, lifetime_s, use_limit, label)

    print(asyncio.run(ask()))
    return 0
