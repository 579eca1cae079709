"""The Operator service, which the `echo2` commands call with an operator's certificate.

Guarantees: a caller with another role gets PERMISSION_DENIED; a wrong argument gets INVALID_ARGUMENT with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from echo2.base.errors import EchoError, NotAllowed, TrustError
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.outlook import OutlookDesk
from echo2.trust.identity import Role
from echo2.trust.runtime.tls import peer_of
from echo2.wire.bounds import check
from echo2.wire.coordinator import offered_machine
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc

Reply = TypeVar("Reply")


class OperatorService(coordinator_pb2_grpc.OperatorServicer):
    def __init__(self, commands: Commands, outlook: OutlookDesk) -> None:
        self._commands, self._outlook = commands, outlook

    async def _answer(self, request: Message, context: Any, act: Callable[[], Reply]) -> Reply:
        """Checks the caller and the request, then returns what `act` returns."""

        async def later() -> Reply:
            return act()

        return await self._awaited(request, context, later)

    async def _awaited(self, request: Message, context: Any, act: Callable[[], Awaitable[Reply]]) -> Reply:
        try:
            caller = peer_of(context)
            if caller.role is not Role.OPERATOR:
                raise NotAllowed(
                    f"{caller.peer_id}: expected the role operator, its certificate says {caller.role.value}"
                )
            check(request, str(caller.peer_id))
            return await act()
        except EchoError as error:
            is_trust = isinstance(error, TrustError)
            status = grpc.StatusCode.PERMISSION_DENIED if is_trust else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(status, f"{type(error).__name__}: {error}"[:2000])
            raise

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.RunStatus:
        return await self._answer(request, context, self._commands.status)

    async def CreateToken(self, request: pb.CreateTokenRequest, context: Any) -> pb.CreateTokenReply:
        def act() -> pb.CreateTokenReply:
            token, link = self._commands.create_token(
                request.role, request.label, request.lifetime_s, request.use_limit
            )
            return pb.CreateTokenReply(token_id=token.token_id, join_link=link)

        return await self._answer(request, context, act)

    async def GetOutlook(self, request: pb.GetOutlookRequest, context: Any) -> pb.GetOutlookReply:
        async def act() -> pb.GetOutlookReply:
            market = [offered_machine(one) for one in request.offers]
            value = await self._outlook.value(market, request.prices, request.learner_usd_per_hour)
            return pb.GetOutlookReply(outlook_json=json.dumps(value).encode())

        return await self._awaited(request, context, act)
