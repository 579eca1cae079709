"""What the operator can do and see: one implementation behind the page (`POST /api/NAME`), `echo2 ctl` and `echo2 status`.

An action of `ACTIONS` takes the JSON object of its request and returns the JSON object of its answer, None for an empty one.
Guarantees: an action is carried out whole or refused with an error that says what was expected; what it changes is saved and in
the event log before it returns. A gRPC caller with another role gets PERMISSION_DENIED; a wrong argument gets INVALID_ARGUMENT
with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import shlex
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import grpc
from pydantic_core import to_json

from echo2.base.errors import EchoError, MalformedMessage, RunFinished, TrustError
from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Liveness, Member, OperatorSetting
from echo2.coordinator.fleet.tokens import LABEL_CHARS_MAX, Token
from echo2.coordinator.hub import Hub
from echo2.coordinator.money.providers.machine_setup import join_command
from echo2.coordinator.money.provisioner import Provisioner
from echo2.coordinator.money.provisioning import MachineOffer, Provider
from echo2.coordinator.web.state import StateView, command_of, machine_value
from echo2.outside import here
from echo2.trust.identity import JoinLink, Role
from echo2.trust.tls import peer_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc

LINE_CHARS_MAX = 300  # a line or two in the log
TEXT_CHARS_MAX = 1000  # no reason, name or id is longer
PEERS_AT_ONCE = 1000  # what fits in the body of a request (web/page)
MACHINES_QUOTED_MAX = 1000  # as many as an offer may have
MACHINE_TOKEN_S = 30 * 86_400.0
"""Lifetime of a machine's token: long enough for the machine to be preempted and come back; it is revoked when the machine ends."""
Body = dict[str, Any]


class Commands:
    """The actions as methods; `_act_*` read a request. `enrol_host`, `enrol_port`: the address in join links."""

    def __init__(
        self,
        hub: Hub,
        enrol_host: str,
        enrol_port: int,
        offers: Sequence[MachineOffer],
        providers: Mapping[str, Provider],
    ) -> None:
        self.hub, self._enrol_host, self._enrol_port = hub, enrol_host, enrol_port
        self.provisioner = Provisioner(
            hub, offers, providers,
            lambda label: self.create_token(Role.WORKER.value, label[:LABEL_CHARS_MAX], MACHINE_TOKEN_S, 1),
        )  # fmt: skip
        self.view = StateView(hub, self.provisioner)

    def join_link(self, secret: str) -> str:
        return str(JoinLink(self._enrol_host, self._enrol_port, self.hub.identity.peer_id, secret))

    def join_command(self, role: str, join_link: str) -> str:
        """The shell command with which a node joins, or an operator connects remotely."""
        match Role(role):
            case Role.WORKER:
                return join_command(join_link, self.hub.config.model.path)
            case Role.LEARNER:
                return shlex.join(["echo-learner", "join", join_link])
            case _:
                return shlex.join(["echo2", "status", join_link])

    def create_token(self, role: str, label: str, lifetime_s: float, use_limit: int) -> tuple[Token, str]:
        """Makes a token. Returns it with its join link, which cannot be shown again."""
        secret = urlsafe_b64encode(here().rng.randbytes(32)).rstrip(b"=").decode()
        token = self.hub.tokens.create(secret, role, label, lifetime_s, use_limit, self.hub.clock.now())
        self._keep_token(token, f"made for the role {role}")
        return token, self.join_link(secret)

    def revoke_token(self, token_id: str) -> None:
        self._keep_token(self.hub.tokens.revoke(token_id), "revoked")

    def _keep_token(self, token: Token, what: str) -> None:
        self.hub.state.save("tokens", token.token_id, token)
        self.hub.state.require_sync()
        self.hub.note("token", f"{token.token_id} ({token.label or token.role}) {what}")
        self.hub.flush_now()

    async def approve(self, seen: Body) -> Body:
        """Carries out what the planner advises; returns how many machines were rented or released. MalformedMessage if the operator
        has `seen` something else, as on a page whose stream hangs."""
        advice = self.provisioner.advice()
        now = {
            "rent": {wish.offer: wish.count for wish in advice.rent},
            "release": [wish.machine_id for wish in advice.release],
        }
        if seen and seen != now:
            raise MalformedMessage("machines/approve: expected what is advised now, which has changed: look again")
        return {"count": await self.provisioner.carry_out("approved by the operator")}

    def dismiss_idle(self) -> int:
        """Dismisses the idle workers: their processes exit with code 0. Returns how many."""
        idle = self.hub.money.idle_workers()
        for member in idle:
            self.hub.dismiss(member.peer_id, "the operator sends it home: the run does not need it")
        self.hub.flush_now()
        return len(idle)

    # ---- the run

    def change_settings(self, numbers: Mapping[str, float], prices: Mapping[str, float]) -> dict[str, Any]:
        """Changes budget, cap, staleness bound and the prices of offers, without a restart. Returns the settings that hold now."""
        hub = self.hub
        if unknown := sorted(set(prices) - (offers := {offer.name for offer in hub.money.offers})):
            raise MalformedMessage(f"prices: expected offers of {sorted(offers)}, got {unknown[0][:60]!r}")
        hub.change_settings({**hub.settings, **numbers, "prices": {**hub.settings.get("prices", {}), **prices}})
        changes = ", ".join(f"{name} = {value:g}" for name, value in {**numbers, **prices}.items())
        hub.note("operator", f"changes {changes}")
        hub.state.require_sync()
        hub.flush_now()
        plain = {name: None if value == math.inf else value for name, value in hub.settings.items()}
        return {**plain, "staleness_bound": hub.config.staleness.bound}

    def pause(self, reason: str) -> None:
        """Puts all workers on standby until `resume`: they end what they hold and get no more."""
        self.hub.pause(f"paused by the operator{f': {reason}' if reason else ''}")

    def resume(self) -> None:
        self.hub.pause("")
        self.hub.ending.resume()
        self.hub.flush_now()

    def stop_run(self, reason: str) -> None:
        """Ends the run: workers are dismissed, machines are released, and the learner is told that it is over."""
        cause = f"stopped by the operator{f': {reason}' if reason else ''}"
        self.hub.ending.finish_run(cause, is_stopped=True)
        if self.hub.learner.session is not None:
            self.hub.learner.session.refuse(RunFinished(self.hub.ending.text))
        self.hub.flush_now()

    # ---- requests as JSON

    async def act(self, name: str, body_json: bytes) -> Body:
        """Carries out an action. MalformedMessage for an unknown one or a body that is no JSON object."""
        action = ACTIONS.get(name)
        if action is None:
            raise MalformedMessage(f"action: expected one of {', '.join(ACTIONS)}, got {name[:60]!r}")
        try:
            body = json.loads(body_json or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise MalformedMessage(f"{name}: expected a JSON object, got something else")
        answer = action(self, body)
        if inspect.isawaitable(answer):  # carried out whole, though whoever asks may go
            answer = await asyncio.shield(asyncio.ensure_future(answer))
        return answer or {}

    def _act_change_settings(self, body: Body) -> Body:
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
        return self.change_settings(numbers, {name: _number(prices, name) for name in prices})

    def _act_apply_plan(self, body: Body) -> None:
        hub, known = self.hub, self.hub.plan
        if known.now is None:
            raise MalformedMessage("plan: expected one to apply, there is none yet")
        hub.note("plan", "applied by the operator")
        hub.adopt_plan(known.now, [*known.now.pool, *known.now.drain], True, known.rate_ratio, known.is_settled)
        hub.flush_now()

    def _act_set_workers(self, body: Body) -> Body:
        try:
            setting = OperatorSetting(name := _text(body, "activation"))
        except ValueError:
            known = ", ".join(state.value for state in OperatorSetting)
            raise MalformedMessage(f"worker state: expected one of {known}, got {name[:40]!r}") from None
        reason, chosen = _reason(body), self._chosen(body)
        self.hub.set_workers([member.peer_id for member in chosen], setting, reason)
        return {"count": len(chosen)}

    async def _act_release_workers(self, body: Body) -> Body:
        """Releases the rented machines of the chosen workers and dismisses the workers on other machines."""
        reason, money = _reason(body, "released by the operator"), self.hub.money
        rented = {
            worker.peer_id: machine.machine_id
            for machine in money.open_machines
            for worker in money.workers_of(machine)
        }
        living = [member for member in self._chosen(body) if member.last_liveness is not Liveness.GONE]
        for member in living:
            if member.peer_id not in rented:
                self.hub.dismiss(member.peer_id, reason)
        self.hub.flush_now()
        chosen = (rented[member.peer_id] for member in living if member.peer_id in rented)
        await self.provisioner.release_each(dict.fromkeys(chosen, reason))
        return {"count": len(living)}

    def _chosen(self, body: Body) -> list[Member]:
        """The workers of `peer_ids`, else of the single `peer_id`; a worker's name stands for its id if no other has it, or all
        others have gone."""
        chosen = body["peer_ids"] if "peer_ids" in body else [_text(body, "peer_id")]
        is_list = isinstance(chosen, list) and len(chosen) <= PEERS_AT_ONCE
        if not is_list or not all(isinstance(name, str) for name in chosen):
            raise MalformedMessage(f"peer_ids: expected a list of up to {PEERS_AT_ONCE} peer ids")
        return list({(member := self._called(name)).peer_id: member for name in chosen}.values())

    def _called(self, name: str) -> Member:
        members = self.hub.membership.members
        if (member := members.get(PeerId(name))) is not None:
            return member
        called = [member for member in members.values() if member.name == name]
        living = [member for member in called if member.last_liveness is not Liveness.GONE]
        if len(found := living or called) != 1:  # one that was rented again has its name and another id
            which = (
                f", as {len(found)} are called: {', '.join(member.peer_id for member in found[:4])}" if found else ""
            )
            raise MalformedMessage(f"worker: expected one of this run, got {name[:80]!r}{which}")
        return found[0]

    def _act_create_token(self, body: Body) -> Body:
        lifetime_s, uses = _number(body, "lifetime_s"), int(_number(body, "use_limit", 0))
        token, link = self.create_token(_text(body, "role"), _text(body, "label", ""), lifetime_s, uses)
        command = self.join_command(token.role, link)
        return {"token_id": token.token_id, "join_link": link, "command": command}

    async def _act_rent(self, body: Body) -> Body:
        offer, label = _text(body, "offer"), _text(body, "label", "")
        reason = _text(body, "reason", "") or "the operator's word"
        if body.get("dry_run") is True:
            count = _number(body, "count", 1)
            if not 1 <= count <= MACHINES_QUOTED_MAX or count != int(count):
                raise MalformedMessage(f"count: expected 1 to {MACHINES_QUOTED_MAX} machines, got {count:g}")
            return {"quote": self.provisioner.quote(offer, int(count))}
        if "count" in body:
            raise MalformedMessage("count: expected it with dry_run alone: a request rents one machine")
        machine = await self.provisioner.rent(offer, _line(label, "label"), _line(reason, "reason"))
        return {**machine_value(machine, self.hub.money), "command": command_of(machine)}

    def _act_machine_command(self, body: Body) -> Body:
        machine = self.provisioner.machines.get(_text(body, "machine_id"))
        if machine is None:
            raise MalformedMessage("machine_id: expected one of this run's machines")
        return {"command": command_of(machine)}

    async def _act_release(self, body: Body) -> None:
        await self.provisioner.release(_text(body, "machine_id"), _reason(body, "the operator's word"))

    def _act_notice(self, body: Body) -> None:
        notice = _text(body, "notice", "") or "a preemption notice"
        self.provisioner.preempted(_text(body, "whom"), _line(notice, "notice"))


ACTIONS: Mapping[str, Callable[[Commands, Body], Body | Awaitable[Body | None] | None]] = {
    "workers/state": Commands._act_set_workers,
    "workers/dismiss": lambda commands, body: {"count": commands.dismiss_idle()},
    "workers/release": Commands._act_release_workers,
    "tokens": Commands._act_create_token,
    "tokens/revoke": lambda commands, body: commands.revoke_token(_text(body, "token_id")),
    "plan/apply": Commands._act_apply_plan,
    "machines": Commands._act_rent,
    "machines/release": Commands._act_release,
    "machines/command": Commands._act_machine_command,
    "machines/notice": Commands._act_notice,
    "machines/approve": lambda commands, body: commands.approve(body),
    "run/settings": Commands._act_change_settings,
    "run/pause": lambda commands, body: commands.pause(_reason(body)),
    "run/resume": lambda commands, body: commands.resume(),
    "run/stop": lambda commands, body: commands.stop_run(_reason(body)),
    "run/advice": lambda commands, body: asdict(commands.view.advice()),
}
"""What the page and `echo2 ctl` can ask for, by name."""


def _text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise MalformedMessage(f"{name}: expected a text of up to {TEXT_CHARS_MAX} characters, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)[:80]


def _line(text: str, field: str) -> str:
    if len(text) > LINE_CHARS_MAX or not text.isprintable():
        raise MalformedMessage(f"{field}: expected up to {LINE_CHARS_MAX} printable characters")
    return text


def _reason(body: Body, default: str = "") -> str:
    return _line(_text(body, "reason", "") or default, "reason")


def _number(body: Body, name: str, default: float | None = None) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise MalformedMessage(f"{name}: expected a number, got {_shown(value)}")
    return float(value)


class OperatorService(coordinator_pb2_grpc.OperatorServicer):
    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.RunStatus:
        async with self._for_operators(context):
            return self._commands.view.status()

    async def Act(self, request: pb.ActRequest, context: Any) -> pb.ActReply:
        async with self._for_operators(context):
            answer = await self._commands.act(request.name, request.body_json)
        return pb.ActReply(answer_json=to_json(answer, inf_nan_mode="null"))

    @asynccontextmanager
    async def _for_operators(self, context: Any) -> AsyncIterator[None]:
        """Aborts the call if its caller is no operator (any more), or if the block raises an error of echo2."""
        try:
            self._commands.hub.tokens.check_operator(peer_of(context, Role.OPERATOR))
            yield
        except EchoError as error:
            is_trust = isinstance(error, TrustError)
            status = grpc.StatusCode.PERMISSION_DENIED if is_trust else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(status, f"{type(error).__name__}: {error}"[:2000])
            raise
