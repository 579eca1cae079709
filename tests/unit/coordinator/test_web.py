"""The page's API: who may look, who may act, and that the documents match what is served."""

import asyncio
import json
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.routing import Route

from echo2.base.ids import PeerId
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.web import page as web_page
from echo2.coordinator.web.page import METRICS, ROWS_AT_ONCE, WORKER_METRICS, Dashboard, Web, WebGuard
from echo2.coordinator.web.state import StateView
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, options, running

DOCS = Path(__file__).resolve().parents[3] / "docs" / "coordinator.md"
METRICS_PAGE = DOCS.parent / "reference" / "metrics.md"


@asynccontextmanager
async def page(folder: Path, **chosen: Any) -> AsyncIterator[tuple[CoordinatorDaemon, httpx.AsyncClient]]:
    async with running(options(folder, **chosen)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
        yield daemon, web


async def acting(web: httpx.AsyncClient) -> dict[str, str]:
    return {"x-echo2-csrf": (await web.get("/api/session")).json()["csrf"]}


async def status_of(daemon: CoordinatorDaemon, head: str) -> int:
    """The status of the answer to a request head sent byte for byte, which no client library would send; 0: no answer."""
    where = urlsplit(daemon.dashboard_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.encode("latin-1") + b"\r\nconnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.readline(), WAIT_S)
    writer.close()
    return int(answer.split()[1]) if answer else 0


async def undeclared_body(length: int, beyond_s: float) -> AsyncIterator[bytes]:
    """A body whose length no header says, and which ends so long after its last byte."""
    yield b"x" * length
    await asyncio.sleep(beyond_s)


async def test_actions_need_our_header_origin_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "BODY_S", 0.2)
    async with page(tmp_path, model_path="org/base") as (daemon, web):
        good, wish = await acting(web), {"role": "worker", "lifetime_s": 60}
        for headers, status in (({}, 403), (good | {"origin": "http://evil.example"}, 403), (good, 200)):
            made = await web.post("/api/tokens", json=wish, headers=headers)
            assert made.status_code == status
        link = made.json()["join_link"]
        assert shlex.split(made.json()["command"]) == ["echo-worker", "join", link, "--model.path", "org/base"]
        state = (await web.get("/api/state")).json()
        assert made.json()["token_id"] in [token["id"] for token in state["tokens"]]
        assert link.partition("token=")[2] not in str(state)
        wrong: list[tuple[str, object]] = [
            ("tokens", body)
            for body in ({}, {"role": "king", "lifetime_s": 1}, {"role": "worker", "lifetime_s": "x"}, [1], "no")
        ]
        for body in ({"peer_ids": "x"}, {"peer_ids": ["nobody"]}, {"peer_ids": [1]}, {"peer_ids": ["x"] * 1001}):
            wrong.append(("workers/release", body))
        wrong.append(("workers/state", {"peer_id": "x", "activation": "fly"}))
        for action, body in wrong:
            answer = await web.post(f"/api/{action}", json=body, headers=good)
            assert (answer.status_code, "expected" in answer.json()["error"]) == (400, True)
        assert "automatic, active, standby, draining, quarantined, banned" in answer.json()["error"]
        deep = await web.post("/api/tokens", content=b"[" * 60_000, headers=good)
        assert (deep.status_code, "expected a JSON object" in deep.json()["error"]) == (400, True)
        for length, beyond_s, status in ((64 << 10, 0.0, 400), ((64 << 10) + 1, 0.0, 413), (1, 0.3, 408)):
            answer = await web.post("/api/tokens", content=undeclared_body(length, beyond_s), headers=good)
            assert (answer.status_code, "expected" in answer.json()["error"]) == (status, True)
        unknown = await web.get("/api/what-if")  # no error: browsers would tell of it on their console
        assert (unknown.status_code, unknown.json()["is_known"]) == (200, False)
        for number in ("nan", "inf", "x"):
            refused = await web.get("/api/what-if", params={"fleet_size": number})
            assert (refused.status_code, "fleet_size: expected" in refused.json()["error"]) == (400, True)
        assert "default-src 'self'" in (await web.get("/")).headers["content-security-policy"]
        port = urlsplit(daemon.dashboard_url).port
        for path in ("/api/state", "/healthz"):
            for host in ("localhost", f"127.0.0.1:{port}", "LocalHost:9", f"[::1]:{port}"):
                assert await status_of(daemon, f"GET {path} HTTP/1.1\r\nhost: {host}") == 200
            for host in (
                "evil.example", f"a{{b.evil.example:{port}", "evil.example:x", "", " ", "localhost:", "localhost.evil.example",
                "x@localhost", "localhost/healthz", "localhost:80:80", "[::1", "::1", "127.0.0.1\t.evil.example",
                "localhost:99999999",
            ):  # fmt: skip
                assert await status_of(daemon, f"GET {path} HTTP/1.1\r\nhost: {host}") in (400, 421), host
            for second in ("evil.example", "localhost"):
                head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nhost: {second}"
                assert await status_of(daemon, head) == 400
            assert await status_of(daemon, f"GET {path} HTTP/1.0") == 400


async def test_the_stream_sends_all_and_then_what_has_changed_though_others_hold_sixty(tmp_path: Path) -> None:
    async with page(tmp_path) as (daemon, web):
        where, worker = urlsplit(daemon.dashboard_url), await Node.join(daemon, Role.WORKER)
        await worker.hello(name="berlin")
        held = [await asyncio.open_connection(where.hostname, where.port) for _ in range(60)]
        for _, writer in held:
            writer.write(b"GET /api/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.gather(*(reader.readline() for reader, _ in held[-16:]))
        assert (await web.get("/")).status_code == 200
        async with web.stream("GET", "/api/stream") as stream:
            messages = (json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: "))
            first = await anext(messages)
            whole = (await web.get("/api/state")).json()
            assert any(event["text"].startswith("berlin joined") for event in whole["events"]), whole["events"]
            assert (await web.get("/api/series")).json().keys() >= {"step", "reward", "eval"}
            assert set(first) == set(whole) | {"now", "samples_changed"}
            assert first["workers"][worker.credentials.peer_id]["name"] == "berlin"
            body = {"peer_id": worker.credentials.peer_id, "activation": "standby", "reason": "later"}
            await web.post("/api/workers/state", json=body, headers=await acting(web))
            rows: dict[str, Any] = {}
            while rows.get(worker.credentials.peer_id, {}).get("activation") != "standby":
                message = await anext(messages)
                assert "tokens" not in message, "what has not changed is not sent"
                rows = message.get("workers", {})
        for _, writer in held:
            writer.close()


async def test_a_large_fleet_is_shown_whole_without_a_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, turns, rows_of_turn = StateView.worker, 0, Counter[int]()

    def counted(self: StateView, member: Member) -> dict[str, Any]:
        rows_of_turn[turns] += 1
        return row(self, member)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with page(tmp_path) as (daemon, web):
        for number in range(2 * ROWS_AT_ONCE + 1):
            hello = pb.WorkerHello(name=f"w{number}")
            daemon.hub.membership.on_hello(PeerId(hello.name), hello, daemon.hub.clock.now())
        monkeypatch.setattr(StateView, "worker", counted)
        turning = asyncio.create_task(turn())
        whole = (await web.get("/api/state")).json()["workers"]
        async with web.stream("GET", "/api/stream") as stream:
            first = await anext(line async for line in stream.aiter_lines() if line.startswith("data: "))
        turning.cancel()
        assert whole.keys() == json.loads(first[6:])["workers"].keys() == daemon.hub.membership.members.keys()
    assert max(rows_of_turn.values()) <= ROWS_AT_ONCE


async def test_off_loopback_the_page_takes_the_token() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"in"})  # type: ignore[operator]

    guarded = WebGuard(app, "secret-token", frozenset(), "csrf")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=guarded)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="https://10.0.0.1") as web:
        assert (await web.get("/")).status_code == 401
        assert (await web.get("/healthz")).status_code == 200
        assert (await web.get("/?token=wrong")).status_code == 401
        assert (await web.get("/", headers={"authorization": "Bearer secret-token"})).status_code == 200
        welcome = await web.get("/?token=secret-token")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
        cookie = welcome.headers["set-cookie"]
        assert cookie.partition("=")[0] != WebGuard(app, "of another run", frozenset(), "csrf")._cookie, (
            "at another port"
        )  # type: ignore[arg-type]
        assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Secure"))
        assert (await web.get("/")).status_code == 200


def test_a_page_on_an_ipv6_address_is_told_with_brackets(tmp_path: Path) -> None:
    dashboard = Dashboard("::1", 0)
    dashboard.set_up(Mock(), tmp_path, Mock())
    assert dashboard.address == f"http://[::1]:{dashboard.port}/"
    dashboard.close()


async def test_every_route_and_every_metric_is_in_the_docs(tmp_path: Path) -> None:
    async with page(tmp_path) as (_, web):
        said = (await web.get("/metrics")).text
        assert (await web.get("/readyz")).json()["status"] == "ready"
    shown = set(re.findall(r"^# HELP (\S+)", said, re.MULTILINE))
    assert shown == set(METRICS) | set(WORKER_METRICS)
    assert not [name for name in shown if f"`{name}" not in METRICS_PAGE.read_text()]
    web = Web(Mock(), "", None)  # type: ignore[arg-type]  # routes alone are asked for
    routes = {route.path for route in web.application().routes if isinstance(route, Route)}
    assert not [path for path in routes - {"/", "/favicon.ico"} if f"`{path}`" not in DOCS.read_text()]
    documented = set(re.findall(r"`(/api/[a-z./-]+)`", DOCS.read_text()))
    assert documented <= routes, "the page names a route that is not there"


async def until(web: httpx.AsyncClient, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state once it is so; fails with the last headline if that takes too long."""
    for _ in range(200):
        state: dict[str, Any] = (await web.get("/api/state")).json()
        if is_it(state):
            return state
        await asyncio.sleep(0.1)
    raise AssertionError(state["advice"])


async def test_the_page_says_why_no_worker_works_what_the_learner_waits_for_and_what_ended_it(tmp_path: Path) -> None:
    due = "rollouts: 0 of 4 groups complete, 0 begun by workers, 0 not begun, 193 rewards due"

    def says(text: str, kind: str) -> Callable[[dict[str, Any]], bool]:
        return lambda state: (
            (text in state["advice"]["steps"][0]["text"], state["advice"]["steps"][0]["kind"]) == (True, kind)
        )

    patient = {"usd_budget": 0.5, "suspect_after": 60.0, "gone_after": 90.0, "heartbeat_interval": 20.0}
    async with page(tmp_path, **patient) as (daemon, web):
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        await learner.hello(step_limit=100)
        await learner.say(leaving=pb.LearnerLeaving(reason="disk full: checkpoints"))
        await learner.call.done_writing()
        await until(web, lambda state: state["advice"]["steps"][0]["text"].endswith("disk full: checkpoints"))
        await learner.hello(step_limit=100)
        await worker.hello(price_usd_per_hour=2.0)
        await until(web, says("1 on standby: it asks 2 USD/h, what spends the budget in an hour is 0.5", "bad"))
        body = {"peer_id": worker.credentials.peer_id, "activation": "active", "reason": "it is worth it"}
        await web.post("/api/workers/state", json=body, headers=await acting(web))
        await until(web, says("Nothing to do: the first step is on its way", "info"))
        report = pb.LearnerReport(
            step=3, train_s=1.0, utilisation=0.4, waits_for=due, waits_since_s=40.0, eval_reward=-1, rewards_due=193
        )
        await learner.say(report=report)
        await until(web, says("193 rewards are due, and the learner has waited 4", "bad"))
        lengths = [300, 1024, 1024, 1024]  # the limit, which no config here sets, and means of fewer tokens
        await learner.say(report=pb.LearnerReport(step=6, train_s=1.0, equal_reward_steps=3, lengths=lengths))
        await until(web, says("75% of the completions were cut at 1024 tokens: raise sampling.max_new_tokens", "bad"))
        await learner.say(report=report)
        await until(web, says("193 rewards are due", "bad"))
        daemon.hub.board.heard_at -= 61.0
        waits = (await web.get("/api/state")).json()["waits"]
        assert any("nothing is heard of the learner, whose stream stands" in wait["what"] for wait in waits)
        await learner.say(leaving=pb.LearnerLeaving(reason="finished: data set exhausted: task sort"))
        await until(web, says("Run a-run ended at step 3: data set exhausted: task sort", "bad"))


HOSTILE = "=HYPERLINK(<script>)"


async def test_a_workers_warnings_and_place_are_shown_kept_and_exported_as_no_formula(tmp_path: Path) -> None:
    async with page(tmp_path) as (daemon, web):
        worker = await Node.joined(daemon, Role.WORKER, name=HOSTILE, provider="runpod", region="EU-NL-1")
        lines = [pb.LogLine(unix_s=5, text=HOSTILE), pb.LogLine(unix_s=6, is_error=True, text="the engine failed")]
        lines.append(pb.LogLine(unix_s=7, text="trying again"))
        await worker.say(heartbeat=pb.Heartbeat(log=pb.LogTail(lines=lines)))
        await worker.say(heartbeat=pb.Heartbeat(tokens_per_s=3.0))  # says nothing of its log: as before
        peer_id = worker.credentials.peer_id
        row = (await until(web, lambda state: state["workers"][peer_id]["tokens_per_s"] == 3.0))["workers"][peer_id]
        assert (row["said"], row["said_error"], row["said_at"]) == ("the engine failed", True, 6)
        assert (row["provider"], row["region"]) == ("runpod", "EU-NL-1")
        await worker.hello(name=HOSTILE)
        near = (await web.get("/api/worker", params={"peer_id": peer_id})).json()
        assert [line["text"] for line in near["log"]] == ["trying again", "the engine failed", HOSTILE]
        assert near["heartbeat"] == {"tokens_per_s": 3.0}, "a field is shown without a line of its own"
        assert (await web.get("/api/worker", params={"peer_id": "nobody"})).status_code == 400
        flood = pb.LogTail(lines=[pb.LogLine(text="x")] * 21)
        await worker.say(heartbeat=pb.Heartbeat(log=flood))
        assert "number of lines" in (await worker.until("refusal")).message


async def test_rollouts_are_asked_of_the_learner_within_bounds_and_shown_token_by_token(tmp_path: Path) -> None:
    async with page(tmp_path) as (daemon, web):
        assert "not connected" in (await web.get("/api/rollouts")).json()["problem"]
        learner = await Node.joined(daemon, Role.LEARNER, step_limit=9)
        one = pb.RolloutSummary(
            rollout_id="g1/0", step=4, reward=0.5, token_count=2, completion="<b>", peer_ids=["x" * 20], turn_count=2
        )

        async def asked(path: str, **answer: object) -> tuple[httpx.Response, object]:
            asking = asyncio.create_task(web.get(path))
            wanted = await learner.until("wanted")
            await learner.say(shown=pb.RolloutsShown(request=wanted.request + 1))  # to no question: dropped
            await learner.say(shown=pb.RolloutsShown(request=wanted.request, **answer))  # type: ignore[arg-type]
            return await asking, wanted

        found, _ = await asked("/api/rollouts", rollouts=[one])
        assert found.json()["rollouts"][0] | {"workers": []} == {
            "id": "g1/0", "step": 4, "reward": 0.5, "token_count": 2, "oldest_version": 0, "newest_version": 0,
            "finish_reason": "", "workers": [], "completion": "<b>", "turns": 2,
        }  # fmt: skip
        assert (await web.get("/api/rollouts")).json() == found.json(), "the list of a moment ago"
        tokens = [pb.TokenShown(token_id=5, text="x", logprob=-0.25, version=3, peer=peer) for peer in (0, 1)]
        said = [pb.TurnShown(turn=2, position=1, text="<i>")]
        found, wanted = await asked(
            "/api/rollout?id=g1/0&offset=1", rollouts=[one], tokens=tokens, prompt="p", turns=said
        )
        assert (wanted.rollout_id, wanted.offset) == ("g1/0", 1)  # type: ignore[attr-defined]
        first, other = found.json()["tokens"]
        assert first == {"id": 5, "text": "x", "logprob": -0.25, "version": 3, "worker": "x" * 8}
        assert other["worker"] == "", "of a worker that the summary does not name"
        assert found.json()["said"] == [{"turn": 2, "position": 1, "text": "<i>"}]
        found, _ = await asked("/api/rollout?id=g9/0")
        assert "still keeps" in found.json()["error"]
        for query in ("id=g1/0&offset=-1", "id=g1/0&offset=x", "id=", "id=" + "x" * 200, "offset=" + "1" * 5000):
            assert (await web.get(f"/api/rollout?{query}")).status_code == 400
        asking = [asyncio.create_task(web.get(f"/api/rollout?id=g1/{number}")) for number in range(8)]
        questions = [await learner.until("wanted") for _ in asking]
        assert "at most 8 questions" in (await web.get("/api/rollout?id=g1/8")).json()["error"]
        await learner.say(shown=pb.RolloutsShown(request=questions[0].request))
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        asking.append(asyncio.create_task(web.get("/api/rollout?id=g1/9")))
        await learner.until("wanted")  # an answer makes room
        daemon.stop()
        errors = [(await one).json()["error"] for one in asking]
        assert sum("the coordinator is stopping" in error for error in errors) == 8
        await learner.close()
