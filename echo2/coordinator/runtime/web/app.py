"""The page and the JSON API that it uses, on Starlette.

Guarantees: `/api/stream` sends a change within about `STREAM_S`, and only the sections and worker rows that changed; if nothing
changes, it sends the time every `KEEPALIVE_S`. Actions go through `Commands`, like everything that changes state. Waits for
requests; a stream wakes every `STREAM_S`. Leaves to others: access control (guard), carrying out (commands, planner).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import PeerId
from echo2.coordinator.planner_input import plan_config
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.outlook import OutlookDesk
from echo2.coordinator.runtime.planning import snapshot_of
from echo2.coordinator.runtime.pool_plan import make_plan
from echo2.coordinator.runtime.web.feed import Feed
from echo2.coordinator.runtime.web.guard import BodyRefused, body_refused
from echo2.coordinator.runtime.web.looking import csv_of, log_value, rollout_value, rollouts_value
from echo2.coordinator.runtime.web.metrics import exposition, families_of
from echo2.coordinator.runtime.web.openapi import document
from echo2.coordinator.runtime.web.state import StateView, command_of, machine_value, plan_value
from echo2.coordinator.what_if import WhatIf, changed_config, changed_snapshot

STATIC = Path(__file__).parent / "static"
STREAM_S = 0.4
KEEPALIVE_S = 2.0
"""Interval of the messages that carry only the time, so that the page can tell a quiet coordinator from a dead one."""
STREAMS_MAX = 64
WHAT_IFS_AT_ONCE = 1
PEERS_AT_ONCE = 1000
MACHINES_QUOTED_MAX = 1000
WORKER_COLUMNS = (
    "name", "peer_id", "state", "activation", "gpu", "engine", "provider", "region", "is_spot", "price", "usd_spent",
    "tokens_per_s", "rollouts_per_s", "usd_per_mtok", "version", "lag", "leases", "running", "slots", "memory_used",
    "memory_total", "uplink", "downlink", "rtt_s", "joined", "heard", "finished_rollouts", "given_up", "waits_for", "said",
)  # fmt: skip
Body = dict[str, Any]


class Web:
    """The routes. `csrf`: value that each action must send in a header. `stopping`: ends the streams."""

    def __init__(self, commands: Commands, csrf: str, stopping: asyncio.Event) -> None:
        self._commands, self._csrf, self._stopping = commands, csrf, stopping
        self._view = StateView(commands)
        self._feed = Feed(self._view)
        self._streams = 0
        self._what_ifs = asyncio.Semaphore(WHAT_IFS_AT_ONCE)
        self._desk = OutlookDesk(commands)

    def application(self) -> Starlette:
        def act(path: str, action: Callable[[Body], Body | Awaitable[Body]]) -> Route:
            return Route(path, _acting(action), methods=["POST"])

        routes = [
            Route("/", self._index), Route("/api/session", self._session), Route("/api/state", self._state),
            Route("/api/series", self._series), Route("/api/worker", self._worker),
            Route("/api/workers.csv", self._workers_csv), Route("/api/series.csv", self._series_csv),
            Route("/api/rollouts", self._rollouts), Route("/api/rollout", self._rollout), Route("/api/stream", self._stream),
            Route("/api/what-if", self._what_if), Route("/api/outlook", self._outlook), Route("/api/openapi.json", self._openapi),
            act("/api/workers/state", self._set_worker), act("/api/workers/dismiss", self._dismiss),
            act("/api/workers/release", self._release_workers), act("/api/tokens", self._create_token),
            act("/api/tokens/revoke", self._revoke_token), act("/api/plan/apply", self._apply_plan),
            act("/api/machines", self._rent), act("/api/machines/release", self._release),
            act("/api/machines/command", self._machine_command), act("/api/machines/notice", self._notice),
            act("/api/machines/approve", self._approve),
            Route("/metrics", self._metrics), Route("/healthz", self._healthz), Route("/readyz", self._readyz),
            Route("/favicon.ico", self._icon), Mount("/static", StaticFiles(directory=STATIC)),
        ]  # fmt: skip
        return Starlette(routes=routes, exception_handlers={EchoError: _echo_error, BodyRefused: body_refused})

    # ---- looking

    async def _index(self, request: Request) -> Response:
        return HTMLResponse((STATIC / "index.html").read_text())

    async def _icon(self, request: Request) -> Response:
        return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")

    async def _session(self, request: Request) -> Response:
        return JSONResponse({"csrf": self._csrf})

    async def _state(self, request: Request) -> Response:
        return JSONResponse({**self._view.sections(), "workers": self._view.workers()})

    async def _series(self, request: Request) -> Response:
        return JSONResponse(self._view.samples())

    async def _worker(self, request: Request) -> Response:
        member = self._commands.hub.membership.members.get(PeerId(request.query_params.get("peer_id", "")))
        if member is None:
            raise MalformedMessage("peer_id: expected a worker of this run")
        return JSONResponse({**self._view.worker(member.peer_id), "peer_id": member.peer_id, "log": log_value(member)})

    async def _rollouts(self, request: Request) -> Response:
        return JSONResponse(await rollouts_value(self._commands))

    async def _rollout(self, request: Request) -> Response:
        query = request.query_params
        return JSONResponse(await rollout_value(self._commands, query.get("id", ""), query.get("offset", "0")))

    async def _workers_csv(self, request: Request) -> Response:
        rows = [{"peer_id": peer_id, **row} for peer_id, row in self._view.workers().items()]
        return csv_of(rows, WORKER_COLUMNS, "workers.csv")

    async def _series_csv(self, request: Request) -> Response:
        columns = self._view.samples()
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return csv_of(rows, list(columns), "steps.csv")

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    async def _metrics(self, request: Request) -> Response:
        families = families_of(self._commands.hub)
        text = await asyncio.to_thread(exposition, families)  # slow for a large fleet, and does not use the hub
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        """Always ready: the state is open and both ports listen before the page is served. The learner may be away."""
        return JSONResponse({"status": "ready", "learner_is_connected": self._commands.hub.board.is_connected})

    async def _stream(self, request: Request) -> Response:
        if self._streams >= STREAMS_MAX:
            return JSONResponse({"error": f"expected at most {STREAMS_MAX} open pages"}, 503)
        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        self._streams += 1
        seen, samples, quiet_s = 0, (-1, -1), 0.0
        try:
            while not self._stopping.is_set() and not await request.is_disconnected():
                message = self._feed.changes_since(seen)
                seen = self._feed.serial
                latest = len(self._commands.hub.keeper.samples), int(self._commands.hub.board.report.step)
                if latest != samples:
                    samples = latest
                    message["samples_changed"] = "true"
                quiet_s = 0.0 if message else quiet_s + STREAM_S
                if message or quiet_s >= KEEPALIVE_S:
                    quiet_s = 0.0
                    message["now"] = str(round(self._commands.hub.clock.now(), 2))
                    yield "data: {" + ",".join(f'"{name}":{text}' for name, text in message.items()) + "}\n\n"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), STREAM_S)
        finally:
            self._streams -= 1

    async def _what_if(self, request: Request) -> Response:
        """Runs the same planner on the present snapshot with some numbers changed."""
        hub = self._commands.hub
        snapshot = await snapshot_of(hub)
        if snapshot is None:
            return JSONResponse(plan_value(None, "what-if", "a first step and a first measured worker"))
        what_if, config = _what_if_of(request), plan_config(hub.options, hub.board)
        async with self._what_ifs:
            fleet, changed = len(snapshot.workers), changed_snapshot(snapshot, what_if)
            plan = await hub.aside.run(fleet, make_plan, changed, changed_config(config, what_if), None)
        return JSONResponse(plan_value(plan, "what-if", ""))

    async def _outlook(self, request: Request) -> Response:
        """The best next actions, and how earlier predictions compare with what happened."""
        return JSONResponse(await self._desk.for_page())

    # ---- acting

    def _set_worker(self, body: Body) -> Body:
        chosen = _peers(body)
        for peer_id in chosen:
            self._commands.set_worker(peer_id, _text(body, "activation"), _text(body, "reason", ""))
        return {"count": len(chosen)}

    async def _release_workers(self, body: Body) -> Body:
        reason = _line(_text(body, "reason", "") or "released by the operator", "reason")
        return {"count": await self._commands.release_workers(_peers(body), reason)}

    def _dismiss(self, body: Body) -> Body:
        return {"count": self._commands.dismiss_idle()}

    def _create_token(self, body: Body) -> Body:
        token, link = self._commands.create_token(
            _text(body, "role"),
            _text(body, "label", ""),
            _number(body, "lifetime_s"),
            int(_number(body, "use_limit", 0)),
        )
        command = self._commands.join_command(token.role, link)
        return {"token_id": token.token_id, "join_link": link, "command": command}

    def _revoke_token(self, body: Body) -> Body:
        self._commands.revoke_token(_text(body, "token_id"))
        return {}

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

    async def _release(self, body: Body) -> Body:
        reason = _text(body, "reason", "") or "the operator's word"
        await self._commands.provisioner.release(_text(body, "machine_id"), _line(reason, "reason"))
        return {}

    def _notice(self, body: Body) -> Body:
        notice = _text(body, "notice", "") or "a preemption notice"
        self._commands.provisioner.preempted(_text(body, "whom"), _line(notice, "notice"))
        return {}

    async def _approve(self, body: Body) -> Body:
        return {"count": await self._commands.provisioner.carry_out("approved by the operator")}

    def _apply_plan(self, body: Body) -> Body:
        hub = self._commands.hub
        if hub.plan is None:
            raise MalformedMessage("plan: expected one to apply, there is none yet")
        hub.note("plan", "applied by the operator")
        hub.adopt_plan(hub.plan, [*hub.plan.pool, *hub.plan.drain], is_acted_on=True)
        hub.flush_now()
        return {}


def _acting(action: Callable[[Body], Body | Awaitable[Body]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = json.loads(await request.body() or b"{}")
        except ValueError:
            raise MalformedMessage("request body: expected a JSON object, got something else") from None
        if not isinstance(body, dict):
            raise MalformedMessage("request body: expected a JSON object, got something else")
        answer = action(body)
        return JSONResponse(answer if isinstance(answer, dict) else await answer)

    return endpoint


async def _echo_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error), "code": type(error).__name__}, 400)


def _text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > 1000:
        raise MalformedMessage(f"{name}: expected a text of up to 1000 characters")
    return value


def _peers(body: Body) -> list[str]:
    """Peer ids from `peer_ids` if present, else the single `peer_id`."""
    if "peer_ids" not in body:
        return [_text(body, "peer_id")]
    chosen = body["peer_ids"]
    if not isinstance(chosen, list) or len(chosen) > PEERS_AT_ONCE or not all(isinstance(one, str) for one in chosen):
        raise MalformedMessage(f"peer_ids: expected a list of up to {PEERS_AT_ONCE} peer ids")
    return list(dict.fromkeys(chosen))


def _line(text: str, whose: str) -> str:
    if len(text) > 300 or not text.isprintable():
        raise MalformedMessage(f"{whose}: expected up to 300 printable characters")
    return text


def _number(body: Body, name: str, default: float | None = None) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise MalformedMessage(f"{name}: expected a number")
    return float(value)


def _what_if_of(request: Request) -> WhatIf:
    def number(name: str) -> float:
        text = request.query_params.get(name, "0")
        try:
            return float(text)
        except ValueError:
            raise MalformedMessage(f"{name}: expected a number, got {text[:40]!r}") from None

    return WhatIf(
        staleness_bound=int(number("staleness_bound")), uplink_factor=number("uplink_factor"),
        fleet_size=int(number("fleet_size")), target_utilisation=number("target_utilisation"),
        usd_per_hour_cap=number("usd_per_hour_cap"),
    )  # fmt: skip
