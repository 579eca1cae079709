"""The page and the JSON API that it uses, on Starlette and uvicorn, on the coordinator's own event loop.

Guarantees: `/api/stream` sends a change within about `STREAM_S`, and only the sections and worker rows that changed; if nothing
changes, it sends the time every `KEEPALIVE_S`. What has changed is computed once for all open pages, and a worker's row only when
its data has changed, so that thousands of workers cost little however many pages are open; at most `ROWS_AT_ONCE` rows are made in
one go. A viewer who opens the page gets a
stream, however many another one holds. JSON is valid (no infinities or NaN); a CSV cell that a spreadsheet would take for a
formula gets an apostrophe in front. Actions go through `ACTIONS`, like everything that changes state. A busy port raises an error
that names it before anything else of the page starts. Leaves to others: access control (access), what is shown (state), carrying
out (operator, planner), signals (the process).
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from echo2.base.errors import EchoError, MalformedMessage, PortBusy, Unreachable
from echo2.base.hosts import is_loopback, joined
from echo2.base.ids import PeerId
from echo2.coordinator.operator import ACTIONS, Commands
from echo2.coordinator.planning.advice import WhatIf
from echo2.coordinator.planning.input import plan_config
from echo2.coordinator.planning.pool_plan import make_plan
from echo2.coordinator.planning.service import snapshot_of
from echo2.coordinator.web.access import BodyRefused, WebGuard, body_refused
from echo2.coordinator.web.metrics import exposition, families_of
from echo2.coordinator.web.state import StateView, finite, plan_value
from echo2.outside.ending import cancel_all
from echo2.outside.net import listened, listening_socket
from echo2.trust.http_port import HttpServer
from echo2.trust.ports import PAGE
from echo2.trust.tls import Credentials, read_secret, write_secret
from echo2.wire.bounds import ROLLOUT_TOKENS_MAX
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

STOP_GRACE_S = 1  # for answers under way; streams end at once
STATIC = Path(__file__).parent / "static"
STREAM_S = 0.4  # between two looks for changes: what a person takes for at once
FRESH_S = 0.2  # a computed state serves all streams that look within this time
KEEPALIVE_S = 2.0  # between messages that carry only the time: the page can tell a quiet coordinator from a dead one
ROWS_AT_ONCE = 200  # workers' rows made in 10 ms of CPU; leases are served before the next ones
STREAMS_MAX = 64  # looking for changes 64 times a `STREAM_S` takes a few percent of a core
# A browser opens at most six connections to one server. An address gets a third of what its connections may be (`PAGE`), so the
# rest of them is left for requests.
STREAMS_PER_CLIENT = 16
ROLLOUT_ID_CHARS_MAX = 128  # a group's id, a slash and an index
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # of a cell that a spreadsheet would compute
# Columns of workers.csv, by the names of a worker's row.
WORKER_COLUMNS = (
    "name", "peer_id", "state", "activation", "gpu", "engine", "provider", "region", "is_spot", "price", "usd_spent",
    "tokens_per_s", "rollouts_per_s", "usd_per_mtok", "version", "lag", "leases", "running", "slots", "memory_used",
    "memory_total", "uplink", "downlink", "rtt_s", "joined", "heard", "finished_rollouts", "given_up", "waits_for", "said",
)  # fmt: skip
Values = dict[str, Any]


class Web:
    """The routes. `csrf`: value that each action must send in a header. `stopping`: ends the streams."""

    def __init__(self, commands: Commands, csrf: str, stopping: asyncio.Event) -> None:
        self._commands, self._csrf, self._stopping = commands, csrf, stopping
        self._view = StateView(commands)
        self._changed = ChangedValues(self._view)
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
            Route("/", lambda request: HTMLResponse((STATIC / "index.html").read_text())),
            Route("/favicon.ico", lambda request: FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")),
            Route("/api/workers.csv", self._workers_csv), Route("/api/series.csv", self._series_csv),
            Route("/api/state", self._state), Route("/api/stream", self._stream), Route("/metrics", self._metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
            *(Route(path, self._answering(value)) for path, value in values.items()),
            *(Route(f"/api/{name}", self._acting(name), methods=["POST"]) for name in ACTIONS),
        ]  # fmt: skip
        return Starlette(routes=routes, exception_handlers={EchoError: _echo_error, BodyRefused: body_refused})

    def _worker(self, query: QueryParams) -> Values:
        """One worker's row, and the newest warnings and errors of its own log, newest first. The texts are untrusted."""
        member = self._commands.hub.membership.members.get(PeerId(query.get("peer_id", "")))
        if member is None:
            raise MalformedMessage("peer_id: expected a worker of this run")
        lines = reversed(member.heartbeat.log.lines)
        log = [{"at": finite(one.unix_s, 3), "is_error": one.is_error, "text": one.text} for one in lines]
        return {**self._view.worker(member), "peer_id": member.peer_id, "log": log}

    async def _rollouts(self, query: QueryParams) -> Values:
        """The newest rollouts that the learner keeps; `problem`: why they cannot be shown, else empty."""
        try:
            shown = await self._commands.hub.learner.rollouts.newest()
        except EchoError as error:
            return {"rollouts": [], "problem": str(error)}
        return {"rollouts": [self._summary(one) for one in shown.rollouts], "problem": ""}

    async def _rollout(self, query: QueryParams) -> Values:
        """One rollout: its prompt, its tokens from `offset` on, and the turns that begin among them. MalformedMessage for a bad
        offset or an unknown id."""
        rollout_id, offset = query.get("id", ""), query.get("offset", "0")
        if not offset.isdecimal() or int(offset) > ROLLOUT_TOKENS_MAX:
            raise MalformedMessage(f"offset: expected 0 to {ROLLOUT_TOKENS_MAX}, got {offset[:40]!r}")
        if not rollout_id or len(rollout_id) > ROLLOUT_ID_CHARS_MAX or not rollout_id.isprintable():
            raise MalformedMessage("id: expected a rollout as /api/rollouts names it, GROUP/INDEX")
        shown = await self._commands.hub.learner.rollouts.tokens(rollout_id, int(offset))
        if not shown.rollouts:
            raise MalformedMessage(f"id: expected a rollout that the learner still keeps, {rollout_id!r} is none")
        summary = self._summary(shown.rollouts[0])
        workers = dict(enumerate(summary["workers"]))
        tokens = [
            {"id": one.token_id, "text": one.text, "logprob": finite(one.logprob, 4), "version": one.version,
             "worker": workers.get(one.peer, "")} for one in shown.tokens
        ]  # fmt: skip
        said = [{"turn": one.turn, "position": one.position, "text": one.text} for one in shown.turns]
        return {**summary, "prompt": shown.prompt, "offset": int(offset), "tokens": tokens, "said": said}

    def _summary(self, one: pb.RolloutSummary) -> Values:
        names = [self._commands.hub.membership.name_of(peer) for peer in one.peer_ids]
        return {
            "id": one.rollout_id, "step": one.step, "reward": finite(one.reward, 4), "token_count": one.token_count,
            "oldest_version": one.oldest_version, "newest_version": one.newest_version,
            "finish_reason": one.finish_reason, "workers": names, "completion": one.completion, "turns": one.turn_count,
        }  # fmt: skip

    def _ready(self, query: QueryParams) -> Values:
        """Always ready: the state is open and both ports listen before the page is served. The learner may be away."""
        return {"status": "ready", "learner_is_connected": self._commands.hub.board.is_connected}

    async def _what_if(self, query: QueryParams) -> Values:
        """Runs the same planner on the present snapshot with some numbers changed."""
        hub, what_if = self._commands.hub, _what_if_of(query)
        async with self._planning:
            snapshot = await snapshot_of(hub)
            if snapshot is None:
                return plan_value(None, "what-if", "a first step and a first measured worker")
            changed, config = what_if.snapshot(snapshot), what_if.config(plan_config(hub.config, hub.board))
            plan = await hub.plan_process.run(len(snapshot.workers), make_plan, changed, config, None)
        return plan_value(plan, "what-if", "")

    async def _workers_csv(self, request: Request) -> Response:
        rows = [{"peer_id": peer_id, **row} for peer_id, row in self._view.workers().items()]
        return _csv(rows, WORKER_COLUMNS, "workers.csv")

    async def _series_csv(self, request: Request) -> Response:
        columns = self._view.samples()
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return _csv(rows, list(columns), "steps.csv")

    async def _metrics(self, request: Request) -> Response:
        families = families_of(self._commands.hub)
        text = await asyncio.to_thread(exposition, families)  # slow for a large fleet, and does not use the hub
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _state(self, request: Request) -> Response:
        return StreamingResponse(self._whole_state(), media_type="application/json")

    async def _whole_state(self) -> AsyncIterator[bytes]:
        yield to_json(self._view.sections())[:-1] + b',"workers":{'
        members = list(self._commands.hub.membership.members.values())
        for at in range(0, len(members), ROWS_AT_ONCE):
            rows = to_json({one.peer_id: self._view.worker(one) for one in members[at : at + ROWS_AT_ONCE]})
            yield (b"," if at else b"") + rows[1:-1]
            await asyncio.sleep(0)
        yield b"}}"

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        seen, samples, quiet_s = 0, (-1, -1), 0.0
        with self._streams.opened(request.client.host if request.client is not None else "") as has_to_end:
            while not (self._stopping.is_set() or has_to_end.is_set() or await request.is_disconnected()):
                message = await self._changed.changes_since(seen)
                seen = self._changed.serial
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
                    await asyncio.wait_for(has_to_end.wait(), STREAM_S)

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
        async def endpoint(request: Request) -> Response:
            return JSONResponse(await self._commands.act(name, await request.body()))

        return endpoint


async def _echo_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error), "code": type(error).__name__}, 400)


def _what_if_of(query: QueryParams) -> WhatIf:
    def number(name: str) -> float:
        text = query.get(name, "0")
        with suppress(ValueError):
            if math.isfinite(value := float(text)):
                return value
        raise MalformedMessage(f"{name}: expected a number, got {text[:40]!r}")

    return WhatIf(
        staleness_bound=int(number("staleness_bound")), uplink_factor=number("uplink_factor"),
        fleet_size=int(number("fleet_size")), target_utilisation=number("target_utilisation"),
        usd_per_hour_cap=number("usd_per_hour_cap"),
    )  # fmt: skip


def _csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], name: str) -> Response:
    """A response with a CSV file, to download."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(column) for column in columns)
        writer.writerow("'" + one if isinstance(one, str) and one.startswith(FORMULA_STARTS) else one for one in cells)
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


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
    seen."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._at = float("-inf")
        self._sections: dict[str, tuple[int, str]] = {}
        self._rows: dict[str, tuple[int, str, tuple[Any, ...]]] = {}
        self._refreshing = asyncio.Lock()
        self.serial = 0

    async def changes_since(self, seen: int) -> dict[str, str]:
        """JSON texts of the sections that changed after refresh `seen`, by name; changed workers' rows are under `workers`."""
        async with self._refreshing:
            if self._view.now() - self._at >= FRESH_S:
                await self._refresh()
        changes = {name: text for name, (serial, text) in self._sections.items() if serial > seen}
        rows = [f"{json.dumps(peer)}:{text}" for peer, (serial, text, _) in self._rows.items() if serial > seen]
        if rows:
            changes["workers"] = "{" + ",".join(rows) + "}"
        return changes

    async def _refresh(self) -> None:
        """A refresh that is cancelled half-way is done again by the next one, under the same number."""
        at, serial, rebuilt = self._view.now(), self.serial + 1, 0
        for name, value in self._view.sections().items():
            text = to_json(value).decode()
            if name not in self._sections or self._sections[name][1] != text:
                self._sections[name] = (serial, text)
        for member, key in self._view.worker_keys():
            known = self._rows.get(member.peer_id)
            if known is None or known[2] != key:
                self._rows[member.peer_id] = (serial, to_json(self._view.worker(member)).decode(), key)
                rebuilt += 1
                if rebuilt % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self._at, self.serial = at, serial


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
            raise PortBusy(
                f"expected the dashboard to listen on {joined(host, port)}: {error.strerror}; choose another with "
                "--coordinator.dashboard_port"
            ) from None
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
            write_secret(key, keys.tls_key_pem)  # uvicorn reads both from files
            write_secret(certificate, keys.certificate.pem)
            tls = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
        shown = host if is_open else commands.hub.options.link_host
        scheme = "http" if is_open else "https"
        self.address = f"{scheme}://{shown}:{self.port}/"
        self.url = self.address + (f"?token={token}" if token else "")
        csrf = secrets.token_urlsafe(24)
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.strip("[]").lower()})
        app = WebGuard(Web(commands, csrf, self._stopping).application(), token, hosts, csrf)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=STOP_GRACE_S, server_header=False, ws="none", **tls,
        )  # fmt: skip
        self._server = HttpServer(config, PAGE)

    async def run(self) -> None:
        """Serves until `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._stopping.set()
        self._server.should_exit = True

    def close(self) -> None:
        self._listener.close()
