"""The page's API: who may look, who may act, and that the documents match what is served."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import httpx
from starlette.routing import Route

from echo2.coordinator.runtime.web.app import Web
from echo2.coordinator.runtime.web.guard import WebGuard
from echo2.coordinator.runtime.web.metrics import METRICS, WORKER_METRICS
from echo2.coordinator.runtime.web.openapi import document
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, options, play, running

DOCS = Path(__file__).resolve().parents[3] / "docs" / "coordinator.md"


def test_actions_need_our_header_our_origin_and_our_host(tmp_path: Path) -> None:
    async def scene() -> None:
        async with (
            running(options(tmp_path, model_path="org/base")) as daemon,
            httpx.AsyncClient(base_url=daemon.dashboard_url) as web,
        ):
            csrf = (await web.get("/api/session")).json()["csrf"]
            wish = {"role": "worker", "lifetime_s": 60}
            assert (await web.post("/api/tokens", json=wish)).status_code == 403
            foreign = {"x-echo2-csrf": csrf, "origin": "http://evil.example"}
            assert (await web.post("/api/tokens", json=wish, headers=foreign)).status_code == 403
            assert (await web.get("/api/state", headers={"host": "evil.example"})).status_code == 421
            good = {"x-echo2-csrf": csrf}
            made = await web.post("/api/tokens", json=wish, headers=good)
            assert made.json()["join_link"].startswith("echo2://")
            words = shlex.split(made.json()["command"])
            assert words == ["echo-worker", "join", made.json()["join_link"], "--model.path", "org/base"]
            for body in ({}, {"role": "king", "lifetime_s": 1}, {"role": "worker", "lifetime_s": "x"}, [1], "no"):
                answer = await web.post("/api/tokens", json=body, headers=good)
                assert (answer.status_code, "expected" in answer.json()["error"]) == (400, True)
            answer = await web.post("/api/workers/state", json={"peer_id": "x", "activation": "fly"}, headers=good)
            assert "automatic, active, standby, draining, quarantined, banned" in answer.json()["error"]
            unknown = await web.get("/api/what-if")  # no error: browsers would tell of it on their console
            assert (unknown.status_code, unknown.json()["is_known"]) == (200, False)
            state = (await web.get("/api/state")).json()
            assert made.json()["token_id"] in [token["id"] for token in state["tokens"]]
            assert made.json()["join_link"].partition("token=")[2] not in str(state)
            assert "default-src 'self'" in (await web.get("/")).headers["content-security-policy"]

    play(scene)


def test_off_loopback_the_page_takes_the_token() -> None:
    async def scene() -> None:
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
            assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Secure"))
            assert (await web.get("/")).status_code == 200

    asyncio.run(scene())


def test_every_route_is_in_the_openapi_document_and_every_metric_in_the_docs(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            said = (await web.get("/metrics")).text
            assert (await web.get("/readyz")).json()["status"] == "ready"
            documented = (await web.get("/api/openapi.json")).json()["paths"]
        shown = set(re.findall(r"^# HELP (\S+)", said, re.MULTILINE))
        assert shown == set(METRICS) | set(WORKER_METRICS)
        assert not [name for name in shown if f"`{name}`" not in DOCS.read_text()]
        assert documented == document()["paths"]

    play(scene)
    web = Web(None, "", None)  # type: ignore[arg-type]  # routes alone are asked for
    routes = {route.path for route in web.application().routes if isinstance(route, Route)}
    assert routes - {"/", "/favicon.ico"} == set(document()["paths"])


def test_the_stream_sends_all_at_first_and_then_what_has_changed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            worker = await Node.join(daemon, Role.WORKER)
            await worker.hello(name="berlin")
            async with web.stream("GET", "/api/stream") as stream:
                messages = (json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: "))
                first = await anext(messages)
                whole = (await web.get("/api/state")).json()
                assert set(first) == set(whole) | {"now", "samples_changed"}
                assert first["workers"][worker.credentials.peer_id]["name"] == "berlin"
                csrf = (await web.get("/api/session")).json()["csrf"]
                body = {"peer_id": worker.credentials.peer_id, "activation": "standby", "reason": "later"}
                await web.post("/api/workers/state", json=body, headers={"x-echo2-csrf": csrf})
                while "workers" not in (message := await anext(messages)):
                    assert "tokens" not in message, "what has not changed is not sent"
                assert message["workers"][worker.credentials.peer_id]["activation"] == "standby"
                assert "tokens" not in message
            await worker.close()

    play(scene)


HOSTILE = "=HYPERLINK(<script>)"


async def acting(web: httpx.AsyncClient) -> dict[str, str]:
    return {"x-echo2-csrf": (await web.get("/api/session")).json()["csrf"]}


def test_a_workers_own_warnings_place_and_losses_are_shown_and_kept_over_its_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            worker = await Node.join(daemon, Role.WORKER)
            await worker.hello(name="berlin", provider="runpod", region="EU-NL-1")
            lines = [pb.LogLine(unix_s=5, text=HOSTILE), pb.LogLine(unix_s=6, is_error=True, text="the engine failed")]
            lines.append(pb.LogLine(unix_s=7, text="trying again"))
            await worker.say(heartbeat=pb.Heartbeat(log=pb.LogTail(lines=lines)))
            await worker.say(heartbeat=pb.Heartbeat(tokens_per_s=3.0))  # says nothing of its log: as before
            peer_id = worker.credentials.peer_id
            while (row := (await web.get("/api/state")).json()["workers"][peer_id])["tokens_per_s"] != 3.0:
                await asyncio.sleep(0.05)
            assert (row["said"], row["said_error"], row["said_at"]) == ("the engine failed", True, 6)
            assert (row["provider"], row["region"]) == ("runpod", "EU-NL-1")
            await worker.hello(name="berlin")
            near = (await web.get("/api/worker", params={"peer_id": peer_id})).json()
            assert [line["text"] for line in near["log"]] == ["trying again", "the engine failed", HOSTILE]
            assert (await web.get("/api/worker", params={"peer_id": "nobody"})).status_code == 400
            flood = pb.LogTail(lines=[pb.LogLine(text="x")] * 21)
            await worker.say(heartbeat=pb.Heartbeat(log=flood))
            assert "number of lines" in (await worker.until("refusal")).message
            await worker.close()

    play(scene)


def test_tables_are_exported_and_no_cell_is_a_formula(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            worker = await Node.join(daemon, Role.WORKER)
            await worker.hello(name=HOSTILE, price_usd_per_hour=0.4)
            table = await web.get("/api/workers.csv")
            assert "attachment" in table.headers["content-disposition"]
            head, row = table.text.splitlines()
            assert head.startswith("name,peer_id,state,activation,gpu,engine,provider,region")
            assert row.startswith(f"'{HOSTILE},{worker.credentials.peer_id},alive,")
            assert (await web.get("/api/series.csv")).text.startswith("at,step,reward")
            await worker.close()

    play(scene)


def test_several_workers_are_drained_and_released_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            workers = [await Node.join(daemon, Role.WORKER) for _ in range(3)]
            for worker in workers:
                await worker.hello()
            good, ids = await acting(web), [worker.credentials.peer_id for worker in workers]
            body: dict[str, object] = {"peer_ids": ids[:2], "activation": "draining"}
            answer = await web.post("/api/workers/state", json=body, headers=good)
            assert answer.json() == {"count": 2}
            rows = (await web.get("/api/state")).json()["workers"]
            assert [rows[peer]["activation"] == "draining" for peer in ids] == [True, True, False]
            for wrong in ({"peer_ids": "x"}, {"peer_ids": ["nobody"]}, {"peer_ids": [1]}, {"peer_ids": ["x"] * 1001}):
                answer = await web.post("/api/workers/release", json=wrong, headers=good)
                assert (answer.status_code, "expected" in answer.json()["error"]) == (400, True)
            answer = await web.post("/api/workers/release", json={"peer_ids": ids[1:]}, headers=good)
            assert answer.json() == {"count": 2}
            for worker in workers[1:]:
                refusal = await worker.until("refusal")
                assert (refusal.code, refusal.message) == ("Dismissed", "released by the operator")
            assert (await web.post("/api/workers/release", json={"peer_ids": ids[1:]}, headers=good)).json()[
                "count"
            ] == 0
            for worker in workers:
                await worker.close()

    play(scene)


def test_rollouts_are_asked_of_the_learner_and_shown_token_by_token(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon, httpx.AsyncClient(base_url=daemon.dashboard_url) as web:
            assert "not connected" in (await web.get("/api/rollouts")).json()["problem"]
            learner = await Node.join(daemon, Role.LEARNER)
            await learner.hello()
            one = pb.RolloutSummary(
                rollout_id="g1/0", step=4, reward=0.5, token_count=2, completion="<b>", peer_ids=["x" * 20]
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
                "finish_reason": "", "workers": [], "completion": "<b>",
            }  # fmt: skip
            assert (await web.get("/api/rollouts")).json() == found.json(), "the list of a moment ago"
            tokens = [pb.TokenShown(token_id=5, text="x", logprob=-0.25, version=3)]
            found, wanted = await asked("/api/rollout?id=g1/0&offset=1", rollouts=[one], tokens=tokens, prompt="p")
            assert (wanted.rollout_id, wanted.offset) == ("g1/0", 1)  # type: ignore[attr-defined]
            assert found.json()["tokens"] == [{"id": 5, "text": "x", "logprob": -0.25, "version": 3}]
            found, _ = await asked("/api/rollout?id=g9/0")
            assert "still keeps" in found.json()["error"]
            for query in ("id=g1/0&offset=-1", "id=g1/0&offset=x", "id=", "id=" + "x" * 200):
                assert (await web.get(f"/api/rollout?{query}")).status_code == 400
            await learner.close()

    play(scene)
