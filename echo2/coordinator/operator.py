"""What the operator can do: one table of actions by name, for the page (`POST /api/NAME`) and for `echo2 ctl` (Operator/Act), and
the service that the `echo2` commands call with an operator's certificate.

An action takes the JSON object of its request and returns the JSON object of its answer, None for an empty one. Guarantees: an
action is carried out whole or refused with an error that says what was expected; what it changes is saved and in the event log
before it returns. A caller with another role gets PERMISSION_DENIED; a wrong argument gets INVALID_ARGUMENT with the reason. Leaves
to others: who may act on the page (web/access).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from echo2.base.errors import EchoError, MalformedMessage, NotAllowed, TrustError
from echo2.coordinator.commands import Commands
from echo2.coordinator.web.state import advice_value, command_of, machine_value
from echo2.trust.identity import Role
from echo2.trust.tls import peer_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc

Body = dict[str, Any]
Action = Callable[[Body], Body | Awaitable[Body | None] | None]
PEERS_AT_ONCE = 1000  # what fits in the body of a request (web/access)
MACHINES_QUOTED_MAX = 1000  # as many as an offer may have


class Actions:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.table: Mapping[str, Action] = {
            "workers/state": self._set_workers, "workers/dismiss": lambda body: {"count": commands.dismiss_idle()},
            "workers/release": self._release_workers, "tokens": self._create_token,
            "tokens/revoke": lambda body: commands.revoke_token(_text(body, "token_id")),
            "plan/apply": self._apply_plan, "machines": self._rent, "machines/release": self._release,
            "machines/command": self._machine_command, "machines/notice": self._notice, "machines/approve": self._approve,
            "run/settings": self._change_settings, "run/pause": lambda body: commands.pause(_reason(body)),
            "run/resume": lambda body: commands.resume(), "run/stop": lambda body: commands.stop_run(_reason(body)),
            "run/advice": lambda body: advice_value(commands.advice()),
        }  # fmt: skip

    async def act(self, name: str, body_json: bytes) -> Body:
        """Carries out an action. MalformedMessage for an unknown one or a body that is no JSON object."""
        action = self.table.get(name)
        if action is None:
            raise MalformedMessage(f"action: expected one of {', '.join(self.table)}, got {name[:60]!r}")
        try:
            body = json.loads(body_json or b"{}")
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise MalformedMessage(f"{name}: expected a JSON object, got something else")
        answer = action(body)
        return (await answer if inspect.isawaitable(answer) else answer) or {}

    # ---- the run

    def _change_settings(self, body: Body) -> Body:
        """Changes what is named: `usd_budget`, `usd_per_hour_cap` (null: none), `staleness_bound`, `prices` of offers by name."""
        unknown = sorted(set(body) - {"usd_budget", "usd_per_hour_cap", "staleness_bound", "prices"})
        if unknown or not body:
            raise MalformedMessage(
                f"run/settings: expected usd_budget, usd_per_hour_cap, staleness_bound or prices, got {unknown or 'nothing'}"
            )
        prices = body.get("prices", {})
        if not isinstance(prices, dict):
            raise MalformedMessage("prices: expected an object of USD/h by the offer's name")
        limits = ("usd_budget", "usd_per_hour_cap")
        numbers = {
            name: math.inf if value is None and name in limits else _number(body, name)
            for name, value in body.items() if name != "prices"
        }  # fmt: skip
        return self._commands.change_settings(numbers, {name: _number(prices, name) for name in prices})

    def _apply_plan(self, body: Body) -> None:
        hub = self._commands.hub
        if hub.plan is None:
            raise MalformedMessage("plan: expected one to apply, there is none yet")
        hub.note("plan", "applied by the operator")
        hub.adopt_plan(hub.plan, [*hub.plan.pool, *hub.plan.drain], is_acted_on=True)
        hub.flush_now()

    # ---- workers and tokens

    def _set_workers(self, body: Body) -> Body:
        chosen = self._peers(body)
        for peer_id in chosen:
            self._commands.set_worker(peer_id, _text(body, "activation"), _text(body, "reason", ""))
        return {"count": len(chosen)}

    async def _release_workers(self, body: Body) -> Body:
        reason = _reason(body, "released by the operator")
        return {"count": await self._commands.release_workers(self._peers(body), reason)}

    def _peers(self, body: Body) -> list[str]:
        """Peer ids from `peer_ids`, else the single `peer_id`; a worker's name stands for its id if no other has it."""
        chosen = body["peer_ids"] if "peer_ids" in body else [_text(body, "peer_id")]
        if (
            not isinstance(chosen, list)
            or len(chosen) > PEERS_AT_ONCE
            or not all(isinstance(one, str) for one in chosen)
        ):
            raise MalformedMessage(f"peer_ids: expected a list of up to {PEERS_AT_ONCE} peer ids")
        members = self._commands.hub.membership.members
        named: dict[str, list[str]] = {}
        for member in members.values():
            named.setdefault(member.name, []).append(member.peer_id)
        found = (named[one][0] if one not in members and len(named.get(one, ())) == 1 else one for one in chosen)
        return list(dict.fromkeys(found))

    def _create_token(self, body: Body) -> Body:
        lifetime_s, uses = _number(body, "lifetime_s"), int(_number(body, "use_limit", 0))
        token, link = self._commands.create_token(_text(body, "role"), _text(body, "label", ""), lifetime_s, uses)
        command = self._commands.join_command(token.role, link)
        return {"token_id": token.token_id, "join_link": link, "command": command}

    # ---- machines

    async def _rent(self, body: Body) -> Body:
        offer, label = _text(body, "offer"), _text(body, "label", "")
        reason = _text(body, "reason", "") or "the operator's word"
        if body.get("dry_run") is True:
            count = _number(body, "count", 1)
            if not 1 <= count <= MACHINES_QUOTED_MAX or count != int(count):
                raise MalformedMessage(f"count: expected 1 to {MACHINES_QUOTED_MAX} machines, got {count:g}")
            return {"quote": self._commands.provisioner.quote(offer, int(count))}
        machine = await self._commands.provisioner.rent(offer, _line(label, "label"), _line(reason, "reason"))
        return {**machine_value(machine, self._commands), "command": command_of(machine)}

    def _machine_command(self, body: Body) -> Body:
        machine = self._commands.provisioner.machines.get(_text(body, "machine_id"))
        if machine is None:
            raise MalformedMessage("machine_id: expected one of this run's machines")
        return {"command": command_of(machine)}

    async def _release(self, body: Body) -> None:
        await self._commands.provisioner.release(_text(body, "machine_id"), _reason(body, "the operator's word"))

    def _notice(self, body: Body) -> None:
        notice = _text(body, "notice", "") or "a preemption notice"
        self._commands.provisioner.preempted(_text(body, "whom"), _line(notice, "notice"))

    async def _approve(self, body: Body) -> Body:
        return {"count": await self._commands.provisioner.carry_out("approved by the operator")}


def _text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > 1000:
        raise MalformedMessage(f"{name}: expected a text of up to 1000 characters")
    return value


def _line(text: str, whose: str) -> str:
    if len(text) > 300 or not text.isprintable():
        raise MalformedMessage(f"{whose}: expected up to 300 printable characters")
    return text


def _reason(body: Body, default: str = "") -> str:
    return _line(_text(body, "reason", "") or default, "reason")


def _number(body: Body, name: str, default: float | None = None) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise MalformedMessage(f"{name}: expected a number")
    return float(value)


class OperatorService(coordinator_pb2_grpc.OperatorServicer):
    def __init__(self, commands: Commands) -> None:
        self._commands, self._actions = commands, Actions(commands)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.RunStatus:
        async with _for_operators(context):
            status, headline = self._commands.status(), self._commands.advice().headline
            status.headline, status.headline_kind = headline.text, headline.kind
        return status

    async def Act(self, request: pb.ActRequest, context: Any) -> pb.ActReply:
        async with _for_operators(context):
            answer = await self._actions.act(request.name, request.body_json)
        return pb.ActReply(answer_json=json.dumps(answer).encode())


@asynccontextmanager
async def _for_operators(context: Any) -> AsyncIterator[None]:
    """Aborts the call if its caller is no operator, or if the block raises an error of echo2."""
    try:
        caller = peer_of(context)
        if caller.role is not Role.OPERATOR:
            raise NotAllowed(f"{caller.peer_id}: expected the role operator, its certificate says {caller.role.value}")
        yield
    except EchoError as error:
        is_trust = isinstance(error, TrustError)
        status = grpc.StatusCode.PERMISSION_DENIED if is_trust else grpc.StatusCode.INVALID_ARGUMENT
        await context.abort(status, f"{type(error).__name__}: {error}"[:2000])
        raise
