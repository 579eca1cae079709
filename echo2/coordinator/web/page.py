"""The page and the JSON API that it uses, on Starlette and uvicorn, on the coordinator's own event loop.

Guarantees: `/api/stream` sends a change within about `STREAM_S`, and only the sections and worker rows that changed; if nothing
changes, it sends the time every `KEEPALIVE_S`. What has changed is computed once for all open pages, and a worker's row only when
its data has changed, at most `ROWS_AT_ONCE` rows in one go, so that thousands of workers cost little however many pages are open.
A viewer who opens the page gets a stream, however many another one holds. JSON is valid (no infinities or NaN). Actions go through
`ACTIONS`, like everything that changes state. A busy port raises an error that names it before anything of the page starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from echo2.base.errors import EchoError, MalformedMessage, PortBusy, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import address_of, is_loopback
from echo2.coordinator.fleet.members import Liveness, Member
from echo2.coordinator.hub import Hub
from echo2.coordinator.operator import ACTIONS, Commands
from echo2.coordinator.planning.advice import WHAT_IF, what_if
from echo2.coordinator.planning.pool_plan import make_plan
from echo2.coordinator.planning.service import snapshot_of
from echo2.coordinator.planning.telemetry import plan_config
from echo2.coordinator.web.state import StateView, finite, plan_value, rollout_summary, rollout_value
from echo2.outside.guard import cancel_all
from echo2.outside.net import listened, listening_socket
from echo2.trust.http_port import HttpServer
from echo2.trust.ports import PAGE
from echo2.trust.tls import Credentials, read_secret, write_secret
from echo2.wire.bounds import ROLLOUT_TOKENS_MAX

# Controls access to the page: who may look and who may act.
#
# On a loopback address the page is open to the machine's users; elsewhere it is served over TLS with the run's certificate and
# requires the access token, which is in the run's folder (`links/dashboard.token`, mode 0600): first as `?token=` in the address,
# after that as a cookie that scripts cannot read; or as a bearer token. Guarantees: on loopback, a request is answered only if its
# one Host header is, byte for byte, one of our names with or without a port (DNS rebinding); an action needs a header whose value
# only our own page can know, and, if the browser sends an origin, it must be ours (CSRF); secrets are compared in constant time. No
# decision rests on a parsed address: a parser that gives up falls back to the name of this server.

CSRF_HEADER = "x-echo2-csrf"  # a header that no foreign page can set without asking
OPEN_PATHS = ("/healthz", "/readyz")  # for probes, which have no token
REQUEST_BYTES_MAX = 64 << 10  # a thousand peer ids and a reason
BODY_S = 10.0  # for 64 KiB over any link
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class WebGuard:
    """ASGI middleware around the whole application. `access_token` empty: none is required, but the host must be in `hosts`: no
    ports, no brackets around an IPv6 address."""

    def __init__(self, app: ASGIApp, access_token: str, hosts: frozenset[str], csrf: str) -> None:
        self._app, self._token, self._hosts, self._csrf = app, access_token, hosts, csrf
        # A browser sends a host's cookies to all its ports, where other runs have their pages.
        self._cookie = f"echo2_access_{hashlib.sha256(access_token.encode()).hexdigest()[:8]}"
        names = "|".join(re.escape(f"[{host}]" if ":" in host else host) for host in sorted(hosts))
        self._own_host = re.compile(f"(?:{names})(?::[0-9]{{1,5}})?", re.IGNORECASE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        answer = self._refusal(request)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1:
            return _problem(400, f"expected one Host header, got {len(hosts)}")
        if not self._token and not self._own_host.fullmatch(hosts[0]):
            return _problem(421, f"expected one of the hosts {', '.join(sorted(self._hosts))}, got {hosts[0][:80]!r}")
        if request.scope["path"] in OPEN_PATHS:
            return None
        offered = request.query_params.get("token", "")
        if self._token and offered and request.method == "GET" and self._is_token(offered):
            return self._welcome(request)
        if self._token and not self._is_known(request):
            return _problem(401, "expected the access token: open the address that the coordinator printed")
        if request.method not in ("GET", "HEAD"):
            return self._action_refusal(request)
        return None

    def _action_refusal(self, request: Request) -> Response | None:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers["host"]:
            return _problem(403, f"expected an action from this page, got one from {origin[:80]!r}")
        if not secrets.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), self._csrf.encode()):
            return _problem(403, f"expected the header {CSRF_HEADER} as /api/session gives it")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > REQUEST_BYTES_MAX:
            return _problem(413, f"expected a body of up to {REQUEST_BYTES_MAX} bytes")
        return None

    def _is_token(self, offered: str) -> bool:
        return secrets.compare_digest(offered.encode(), self._token.encode())

    def _is_known(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self._is_token(request.cookies.get(self._cookie, "")) or self._is_token(bearer)

    def _welcome(self, request: Request) -> Response:
        path = str(request.scope["path"]).lstrip("/\\")  # which a browser must not take for the name of another host
        response = RedirectResponse(f"/{path}", status_code=303)
        is_secure = request.scope["scheme"] == "https"
        response.set_cookie(
            self._cookie, self._token, httponly=True, samesite="strict", secure=is_secure, max_age=30 * 86_400
        )
        return response


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


def _with_headers(send: Send) -> Send:
    async def sending(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            assert isinstance(headers, list)
            known = {name for name, _ in headers}
            headers += [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in known]
        await send(message)

    return sending  # type: ignore[return-value]


# Prometheus metrics, read from the hub at each scrape. The list is stable and documented (docs/reference/metrics.md).
#
# Guarantees: every metric of `METRICS` is present at each scrape, 0 while unknown; the only label is `worker` (its name), so
# the fleet's limit bounds the number of series.

METRICS: dict[str, tuple[str, Callable[[Hub], float]]] = {
    "echo2_step": ("Completed optimiser steps.", lambda h: h.board.report.step),
    "echo2_version": ("Newest published version.", lambda h: h.board.newest_version if h.board.hello else 0),
    "echo2_reward_mean": ("Mean reward of the last batch.", lambda h: h.board.report.reward_mean),
    "echo2_learner_connected": ("1 while the learner's stream stands.", lambda h: float(h.board.is_connected)),
    "echo2_learner_utilisation": ("Measured share of time it trains.", lambda h: h.board.report.utilisation),
    "echo2_learner_utilisation_predicted": ("The plan's prediction of it.", lambda h: h.plan.predicted_utilisation),
    "echo2_train_seconds": ("Seconds that a step trains, smoothed.", lambda h: h.board.train_s),
    "echo2_broadcast_seconds": ("Publication to live on the whole pool, last complete version.",
        lambda h: (h.board.newest_complete.complete_s or 0.0) if h.board.newest_complete else 0.0),
    "echo2_broadcast_seconds_predicted": ("Its prediction.",
        lambda h: h.board.newest_complete.predicted_s if h.board.newest_complete else 0.0),
    "echo2_utilisation_prediction_error": ("Mean distance of measured from predicted utilisation.",
        lambda h: h.plan.mean_error("utilisation")),
    "echo2_broadcast_prediction_error_seconds": ("Mean distance of measured from predicted broadcast seconds.",
        lambda h: h.plan.mean_error("broadcast_s")),
    "echo2_usd_per_hour_prediction_error": ("Mean distance of what the pool cost from what the plan said.",
        lambda h: h.plan.mean_error("usd_per_hour")),
    "echo2_over_stale_tokens_trained": ("Tokens trained over the staleness bound; must be 0.",
        lambda h: h.board.report.over_stale_tokens_trained),
    "echo2_rollouts_trained": ("Rollouts trained on.", lambda h: h.board.report.trained_rollouts),
    "echo2_rollouts_dropped_stale": ("Rollouts dropped as stale.", lambda h: h.board.report.dropped_stale_rollouts),
    "echo2_artifact_bytes_published": ("Bytes of all published versions.", lambda h: h.board.totals.artifact_bytes),
    "echo2_snapshot_bytes_published": ("What whole snapshots would have been.", lambda h: h.board.totals.full_bytes),
    "echo2_workers_alive": ("Workers that are alive.", lambda h: _count(h, Liveness.ALIVE)),
    "echo2_workers_suspect": ("Workers that are suspect.", lambda h: _count(h, Liveness.SUSPECT)),
    "echo2_workers_active": ("Workers that may be given leases.", lambda h: sum(1 for _ in h.membership.pool())),
    "echo2_leases_open": ("Leases out.", lambda h: len(h.book.leases)),
    "echo2_groups_queued": ("Groups that wait for a worker.", lambda h: h.book.queued),
    "echo2_leases_granted": ("Leases granted since the start.", lambda h: h.book.counts.granted),
    "echo2_leases_continued": ("Of them, continuations.", lambda h: h.book.counts.continued),
    "echo2_leases_expired": ("Leases that expired without progress.", lambda h: h.book.counts.expired),
    "echo2_leases_moved": ("Stragglers moved to faster workers.", lambda h: h.book.counts.moved),
    "echo2_machines": ("Machines rented and not given back.", lambda h: len(h.money.open_machines)),
    "echo2_usd_spent": ("The bill: all machines, those on standby too.", lambda h: h.money.sums().usd_spent),
    "echo2_usd_useful": ("Of the bill, what workers cost while they worked.", lambda h: h.money.sums().usd_useful),
    "echo2_usd_per_hour": ("What all machines that are there cost now.", lambda h: h.money.sums().usd_per_hour),
}  # fmt: skip

WORKER_METRICS: dict[str, tuple[str, Callable[[Hub, Member], float]]] = {
    "echo2_worker_tokens_per_second": ("Tokens per busy second.", lambda h, m: m.heartbeat.tokens_per_s),
    "echo2_worker_lag_versions": ("Newest version minus the worker's.",
        lambda h, m: h.board.newest_version - (m.heartbeat.version or 0)),
    "echo2_worker_leases": ("Leases it holds.", lambda h, m: h.book.lease_count(m.peer_id)),
    "echo2_worker_usd_spent": ("What it has cost at work.", lambda h, m: m.usd_spent),
}  # fmt: skip


def _count(hub: Hub, state: Liveness) -> int:
    return sum(member.last_liveness is state for member in hub.membership.members.values())


def families_of(hub: Hub) -> list[Metric]:
    families: list[Metric] = [
        GaugeMetricFamily(name, text, value=float(read(hub))) for name, (text, read) in METRICS.items()
    ]
    for name, (text, read_worker) in WORKER_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for member in hub.membership.living():
            family.add_metric([f"{member.name}/{member.peer_id[-6:]}"], float(read_worker(hub, member)))
        families.append(family)
    return families


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


STOP_GRACE_S = 1  # for answers under way; streams end at once
STATIC = Path(__file__).parent / "static"
STREAM_S = 0.4  # between two looks for changes: what a person takes for at once
FRESH_S = 0.2  # a computed state serves all streams that look within this time
KEEPALIVE_S = 2.0  # between messages that carry only the time: the page can tell a quiet coordinator from a dead one
ROW_BEATS = 1.5  # a worker that beats has its row made anew by its beats alone
ROWS_AT_ONCE = 200  # workers' rows made in 10 ms of CPU; leases are served before the next ones
STREAMS_MAX = 64  # looking for changes 64 times a `STREAM_S` takes a few percent of a core
# A browser opens at most six connections to one server. An address gets a third of what its connections may be (`PAGE`), so the
# rest of them is left for requests.
STREAMS_PER_CLIENT = 16
ROLLOUT_ID_CHARS_MAX = 128  # a group's id, a slash and an index
Values = dict[str, Any]


class Web:
    """The routes. `csrf`: value that each action must send in a header. `stopping`: ends the streams."""

    def __init__(self, commands: Commands, csrf: str, stopping: asyncio.Event) -> None:
        self._commands, self._csrf, self._stopping = commands, csrf, stopping
        self._view = commands.view
        self._changed = ChangedValues(commands.hub, self._view)
        self._streams = OpenStreams()
        self._planning = asyncio.Lock()  # one what-if at a time: the planner's process has its own work

    def application(self) -> Starlette:
        view = self._view
        values: dict[str, Callable[[QueryParams], Values | Awaitable[Values]]] = {
            "/api/session": lambda query: {"csrf": self._csrf},
            "/api/series": lambda query: view.samples(),
            "/api/worker": self._worker, "/api/rollouts": self._rollouts, "/api/rollout": self._rollout,
            "/api/what-if": self._what_if, "/healthz": lambda query: {"status": "ok"}, "/readyz": self._ready,
        }  # fmt: skip
        routes = [
            Route("/", lambda request: HTMLResponse((STATIC / "index.html").read_text(encoding="utf-8"))),
            Route("/favicon.ico", lambda request: FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")),
            Route("/api/state", self._state), Route("/api/stream", self._stream), Route("/metrics", self._metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
            *(Route(path, self._answering(value)) for path, value in values.items()),
            *(Route(f"/api/{name}", self._acting(name), methods=["POST"]) for name in ACTIONS),
        ]  # fmt: skip
        return Starlette(routes=routes, exception_handlers={EchoError: _echo_error})

    def _worker(self, query: QueryParams) -> Values:
        """One worker's row, its newest heartbeat, and the newest warnings and errors of its own log, newest first. The texts are
        untrusted."""
        member = self._commands.hub.membership.members.get(PeerId(query.get("peer_id", "")))
        if member is None:
            raise MalformedMessage("peer_id: expected a worker of this run")
        lines = reversed(member.heartbeat.log.lines)
        log = [{"at": finite(line.unix_s, 3), "is_error": line.is_error, "text": line.text} for line in lines]
        beat = {field.name: value for field, value in member.heartbeat.ListFields() if field.message_type is None}
        return {**self._view.worker(member), "peer_id": member.peer_id, "heartbeat": beat, "log": log}

    async def _rollouts(self, query: QueryParams) -> Values:
        """The newest rollouts that the learner keeps; `problem`: why they cannot be shown, else empty."""
        try:
            answer = await self._commands.hub.learner.rollouts.newest()
        except EchoError as error:
            return {"rollouts": [], "problem": str(error)}
        name_of = self._commands.hub.membership.name_of
        return {"rollouts": [rollout_summary(rollout, name_of) for rollout in answer.rollouts], "problem": ""}

    async def _rollout(self, query: QueryParams) -> Values:
        """One rollout: its prompt, its tokens from `offset` on, and the turns that begin among them. MalformedMessage for a bad
        offset or an unknown id."""
        rollout_id, offset = query.get("id", ""), query.get("offset", "0")
        if not offset.isdecimal() or len(offset) > 9 or int(offset) > ROLLOUT_TOKENS_MAX:  # Python reads 4,300 digits
            raise MalformedMessage(f"offset: expected 0 to {ROLLOUT_TOKENS_MAX}, got {offset[:40]!r}")
        if not rollout_id or len(rollout_id) > ROLLOUT_ID_CHARS_MAX or not rollout_id.isprintable():
            raise MalformedMessage("id: expected a rollout as /api/rollouts names it, GROUP/INDEX")
        answer = await self._commands.hub.learner.rollouts.ask(rollout_id, int(offset))
        if not answer.rollouts:
            raise MalformedMessage(f"id: expected a rollout that the learner still keeps, {rollout_id!r} is none")
        return rollout_value(answer, int(offset), self._commands.hub.membership.name_of)

    def _ready(self, query: QueryParams) -> Values:
        """Always ready: the state is open and both ports listen before the page is served. The learner may be away."""
        return {"status": "ready", "learner_is_connected": self._commands.hub.board.is_connected}

    async def _what_if(self, query: QueryParams) -> Values:
        """Runs the same planner on the present snapshot with some numbers changed."""
        hub, changed = self._commands.hub, {name: _number(query, name) for name in WHAT_IF}
        async with self._planning:
            snapshot = await snapshot_of(hub)
            if snapshot is None:
                return plan_value(None, "what-if", "a first step and a first measured worker")
            asked = what_if(snapshot, plan_config(hub.config, hub.board), changed)
            plan = await hub.plan_process.run(len(snapshot.workers), make_plan, *asked, None)
        return plan_value(plan, "what-if", "")

    async def _metrics(self, request: Request) -> Response:
        collected = _Collected(families_of(self._commands.hub))
        text = await asyncio.to_thread(generate_latest, collected)  # slow for a large fleet, and does not use the hub
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _state(self, request: Request) -> Response:
        changes = await self._changed.changes_since(0, fresh_s=0.0)
        text = ",".join(f'"{name}":{value}' for name, value in {"workers": "{}", **changes}.items())
        return Response("{" + text + "}", media_type="application/json")

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        serial, samples, quiet_s = 0, (-1, -1), 0.0
        with self._streams.opened(request.client.host if request.client is not None else "") as has_to_end:
            while not (self._stopping.is_set() or has_to_end.is_set() or await request.is_disconnected()):
                message = await self._changed.changes_since(serial)
                serial = self._changed.serial
                latest = len(self._commands.hub.state.samples), int(self._commands.hub.board.report.step)
                if latest != samples:
                    samples = latest
                    message["samples_changed"] = "true"
                quiet_s = 0.0 if message else quiet_s + STREAM_S
                if message or quiet_s >= KEEPALIVE_S:
                    quiet_s = 0.0
                    message["now"] = str(round(self._commands.hub.clock.now(), 2))
                    yield "data: {" + ",".join(f'"{name}":{text}' for name, text in message.items()) + "}\n\n"
                with suppress(TimeoutError):
                    async with asyncio.timeout(STREAM_S):
                        await has_to_end.wait()

    def _answering(
        self, value: Callable[[QueryParams], Values | Awaitable[Values]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A plan or the learner's answer may take longer than a clean end waits."""

        async def endpoint(request: Request) -> Response:
            answer = value(request.query_params)
            if isinstance(answer, dict):
                return JSONResponse(answer)
            work, stopping = asyncio.ensure_future(answer), asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise Unreachable("the coordinator is stopping")
                return JSONResponse(work.result())
            finally:
                await cancel_all((work, stopping))

        return endpoint

    def _acting(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Answers 413 or 408 to a body that is too long or too slow, whatever its headers declare."""

        async def endpoint(request: Request) -> Response:
            body = b""
            try:
                async with asyncio.timeout(BODY_S):
                    async for part in request.stream():
                        body += part
                        if len(body) > REQUEST_BYTES_MAX:
                            return _problem(413, f"expected a body of up to {REQUEST_BYTES_MAX} bytes")
            except TimeoutError:
                return _problem(408, f"expected the whole body within {BODY_S:.0f} s")
            answer = to_json(await self._commands.act(name, body), inf_nan_mode="null")
            return Response(answer, media_type="application/json")

        return endpoint


async def _echo_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error), "code": type(error).__name__}, 400)


def _number(query: QueryParams, name: str) -> float:
    """A number of the query; 0 if it is not there."""
    text = query.get(name, "0")
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise MalformedMessage(f"{name}: expected a number, got {text[:40]!r}")


class OpenStreams:
    """The open streams, oldest first, each with the address of its client. One more than a client may have ends its oldest; one
    more than all may have ends the oldest of the client with the most."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Event, str] = {}

    @contextmanager
    def opened(self, client: str) -> Iterator[asyncio.Event]:
        """Holds one stream open; the event is set when it has to end."""
        counts = Counter(self._open.values())
        if counts[client] >= STREAMS_PER_CLIENT:
            self._end_oldest_of(client)
        elif len(self._open) >= STREAMS_MAX:
            self._end_oldest_of(counts.most_common(1)[0][0])
        has_to_end = asyncio.Event()
        self._open[has_to_end] = client
        try:
            yield has_to_end
        finally:
            self._open.pop(has_to_end, None)

    def _end_oldest_of(self, client: str) -> None:
        oldest = next(event for event, host in self._open.items() if host == client)
        del self._open[oldest]
        oldest.set()


class ChangedValues:
    """The newest JSON text of each section and row. `serial`: number of the newest refresh; each page remembers the one that it has
    seen. A worker's row is made anew when its heartbeat or what is decided about it has changed, and else, unless it is gone, every
    `ROW_BEATS` heartbeats: what it has cost goes on rising. A long run has thousands that are gone."""

    def __init__(self, hub: Hub, view: StateView) -> None:
        self._hub, self._view = hub, view
        self._at = float("-inf")
        self._sections: dict[str, tuple[int, str]] = {}
        self._rows: dict[PeerId, tuple[int, str, tuple[Any, ...], float]] = {}
        self._refreshing = asyncio.Lock()
        self.serial = 0

    async def changes_since(self, since: int, fresh_s: float = FRESH_S) -> dict[str, str]:
        """JSON texts of the sections that changed after refresh `since`, by name; changed workers' rows are under `workers`. A
        refresh that is younger than `fresh_s` will do."""
        async with self._refreshing:
            if self._hub.clock.now() - self._at >= fresh_s:
                await self._refresh()
        changes = {name: text for name, (serial, text) in self._sections.items() if serial > since}
        rows = [text for serial, text, _, _ in self._rows.values() if serial > since]
        if rows:
            changes["workers"] = "{" + ",".join(rows) + "}"
        return changes

    async def _refresh(self) -> None:
        """A refresh that is cancelled half-way is done again by the next one, under the same number."""
        hub, serial, rebuilt = self._hub, self.serial + 1, 0
        now = hub.clock.now()
        for name, value in self._view.sections().items():
            text = to_json(value).decode()
            if name not in self._sections or self._sections[name][1] != text:
                self._sections[name] = (serial, text)
        kept_s = ROW_BEATS * hub.config.coordinator.heartbeat_interval
        counts = hub.book.lease_count
        for peer_id, member in list(hub.membership.members.items()):
            is_gone = member.last_liveness is Liveness.GONE
            key = (
                member.heartbeat_at, member.hello, counts(peer_id), member.last_liveness, member.setting,
                member.setting_reason, member.is_wanted, member.wanted_reason, member.paused, member.price_limit,
                member.price_approved, member.record.barred_until,
            )  # fmt: skip
            known = self._rows.get(peer_id)
            if known is None or known[2] != key or (now - known[3] >= kept_s and not is_gone):
                row = f"{json.dumps(peer_id)}:{to_json(self._view.worker(member)).decode()}"
                self._rows[peer_id] = (serial, row, key, now)
                rebuilt += 1
                if rebuilt % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self._at, self.serial = now, serial


class Dashboard:
    """The page's server. Its port is bound at once, before anything of the page runs. Set by `set_up`: `address`, the page's
    address; `url`, the same with the access token (off loopback), so it must not be logged or shown; `token_file`, the file with
    that token; None: no token is required."""

    address = url = ""
    token_file: Path | None = None
    _server: HttpServer

    def __init__(self, host: str, port: int) -> None:
        """PortBusy names the address if it is taken."""
        self._host, self._listener, self._stopping = host, listening_socket(host), asyncio.Event()
        try:
            self._listener.bind((listened(host), port))
        except OSError as error:
            self.close()
            raise PortBusy(f"expected the dashboard to listen on {address_of(host, port)}: {error.strerror}") from None
        self.port = int(self._listener.getsockname()[1])

    def set_up(self, commands: Commands, folder: Path, keys: Credentials) -> None:
        """Makes the server; `folder`: the run's, for the access token."""
        host, is_open = self._host, is_loopback(self._host)
        token, tls = "", dict[str, str]()
        if not is_open:
            self.token_file = folder / "links" / "dashboard.token"
            if not self.token_file.exists():
                write_secret(self.token_file, secrets.token_urlsafe(32).encode())
            token = read_secret(self.token_file).decode().strip()
            key, certificate = folder / "coordinator" / "dashboard.key", folder / "coordinator" / "dashboard.pem"
            tls = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
        link_host = host if is_open else commands.hub.options.link_host
        scheme = "http" if is_open else "https"
        self.address = f"{scheme}://{address_of(link_host, self.port)}/"
        self.url = self.address + (f"?token={token}" if token else "")
        csrf = secrets.token_urlsafe(24)
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.strip("[]").lower()})
        app = WebGuard(Web(commands, csrf, self._stopping).application(), token, hosts, csrf)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=STOP_GRACE_S, server_header=False, ws="none", **tls,
        )  # fmt: skip
        self._server = HttpServer(config, PAGE)
        self.renew(keys)

    def renew(self, keys: Credentials) -> None:
        """New connections are shown this certificate, if the page is served over TLS."""
        config = self._server.config
        if config.ssl_keyfile and config.ssl_certfile:
            write_secret(Path(config.ssl_keyfile), keys.tls_key_pem)  # read from files alone
            write_secret(Path(config.ssl_certfile), keys.certificate.pem)
            if config.loaded and config.ssl is not None:
                config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)

    async def run(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._stopping.set()
        self._server.should_exit = True

    def close(self) -> None:
        self._listener.close()
