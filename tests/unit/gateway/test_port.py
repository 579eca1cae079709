"""Strangers and hostile clients at the gateway's port: what they may hold, and that honest agents beside them are answered."""

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from echo2.base.errors import ConfigError
from echo2.gateway import app
from echo2.gateway.app import Bodies, GatewayPort
from echo2.gateway.episodes import CallRefused, LongWork
from echo2.gateway.requests import BODY_BYTES_MAX
from echo2.trust.ports import GATEWAY
from tests.patience import cpu_time_within
from tests.redteam.hostile import still_open
from tests.unit.gateway.fakes import Served, answer_of, served

QUICK = replace(GATEWAY, head_s=1.5, crowd_s=0.6, strangers_per_host=20)
HI = {"messages": [{"role": "user", "content": "hi"}]}
ELSEWHERE = "127.0.0.9"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    with served(port_limits=QUICK) as found:
        yield found


def ended_after_s(connection: socket.socket, limit_s: float = 6.0) -> float:
    began = time.monotonic()
    connection.settimeout(limit_s)
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass
    return time.monotonic() - began


def test_who_shows_no_key_is_answered_before_its_body_is_read_and_leaves(gateway: Served) -> None:
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(gateway.connect()) for _ in range(4)]
        for connection, key in zip(
            strangers, (None, "guessed", f"{gateway.session.session_id}.guessed", "é"), strict=True
        ):
            began = time.monotonic()
            connection.sendall(gateway.head(BODY_BYTES_MAX, key))  # and nothing of the body
            status, told = answer_of(connection)
            assert status == 401 and told["error"]["code"] == "invalid_api_key" and time.monotonic() - began < 1.0
        assert all(ended_after_s(connection) < 3.0 for connection in strangers)
    for path in ("/nowhere", "/v1/sessions", "/v1/models"):
        with gateway.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert answer_of(connection)[0] == 401


def test_a_client_in_the_middle_of_its_body_still_reads_why_it_is_refused(gateway: Served) -> None:
    body = b"x" * 900_000
    with gateway.connect() as connection:
        connection.sendall(gateway.head(len(body), "of.an.episode.that.ended") + body)
        assert answer_of(connection)[0] == 401


def test_a_crowd_of_strangers_keeps_its_share_and_hurts_nobody_of_its_own_address(gateway: Served) -> None:
    with contextlib.ExitStack() as held:
        known = []
        for _ in range(40):  # each shows its key before the next comes: none is one of the crowd on a slow machine
            known.append(one := held.enter_context(gateway.connect(ELSEWHERE)))
            one.sendall(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n\r\n".encode())
            assert answer_of(one)[0] == 200
        crowd = [held.enter_context(gateway.connect(ELSEWHERE)) for _ in range(100)]
        until = time.monotonic() + 1.2
        while still_open(crowd) > QUICK.strangers_per_host and time.monotonic() < until:
            time.sleep(0.05)  # real sockets have no virtual clock
        assert still_open(crowd) <= QUICK.strangers_per_host
        time.sleep(max(0.0, until - time.monotonic()) + QUICK.head_s)
        assert still_open(crowd) == 0 and still_open(known) == 40


def test_a_full_port_ends_idle_strangers_first_and_answers_hundreds_that_ask() -> None:
    ask = "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n"
    with served(port_limits=replace(QUICK, connections_cap=16, head_s=5.0, crowd_s=4.0)) as small:
        with contextlib.ExitStack() as held:
            known = [held.enter_context(small.connect()) for _ in range(8)]
            for one in known:
                one.sendall(ask.format(small.key).encode())
                assert answer_of(one)[0] == 200
            strangers = [held.enter_context(small.connect(ELSEWHERE)) for _ in range(30)]
            assert small.post(HI)[0] == 200
            assert still_open(known) == 8 and still_open(strangers) <= 8
    with served() as gateway, contextlib.ExitStack() as held:
        opened = [held.enter_context(gateway.connect()) for _ in range(400)]
        for one in opened:
            one.sendall(ask.format(gateway.key).encode())
        assert [answer_of(one)[0] for one in opened] == [200] * 400


def test_a_body_that_is_not_whole_in_time_is_given_up(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.3)
    with gateway.connect() as connection:
        connection.sendall(gateway.head(1000, gateway.key) + b'{"a')
        assert answer_of(connection)[0] == 408


def test_bodies_are_json_and_say_so(gateway: Served) -> None:
    body = json.dumps(HI).encode()
    for kind, expected in (
        ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("application/json; charset=utf-8", 200)
    ):  # fmt: skip
        with gateway.connect() as connection:
            connection.sendall(gateway.head(len(body), gateway.key, kind) + body)
            assert answer_of(connection)[0] == expected
    with gateway.connect() as connection:
        packed = gateway.head(len(body), gateway.key).replace(b"host: x", b"host: x\r\ncontent-encoding: gzip")
        connection.sendall(packed + body)
        status, told = answer_of(connection)
        assert status == 415 and told["error"]["message"] == "content-encoding: expected none, got 'gzip'"
        assert told["error"]["type"] == "invalid_request_error"
    assert gateway.post(b'{"messages": ' + b"[],".join([b""] * 300_000) + b"0}")[0] == 400
    for wrong in (b"[]", b"\xff", b'{"a": ' + b"[" * 100_000, b"{"):
        assert gateway.post(wrong)[0] == 400
    with gateway.connect() as connection:
        connection.sendall(gateway.head(BODY_BYTES_MAX + 1, gateway.key))
        assert answer_of(connection)[0] == 413
    with gateway.connect() as connection:  # its length is not told before
        head, part = gateway.head(0, gateway.key).replace(b"content-length: 0", b"transfer-encoding: chunked"), 1 << 20
        connection.sendall(head + b"".join(b"%x\r\n%b\r\n" % (part, b" " * part) for _ in range(9)))
        assert answer_of(connection)[0] == 413


HI_TOOLS = b'{"messages": [{"role": "user", "content": "hi"}], "tools": '
HALF = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (HALF, "half of a surrogate pair"),
        (HALF.replace(b"\\ud800", b"\\uDFFF x"), "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "expected UTF-8"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "stop": "\\ud800"}', "half of a surrogate pair"),
        (HI_TOOLS + b'[{"\\udead": 1}]}', "half of a surrogate pair"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
            b'"{\\"a\\": \\"\\\\ud800\\"}"}}]}]}', "arguments: expected text in Unicode",
        ),
        (HI_TOOLS + b'[{"a": ' + b"[" * 900 + b"]" * 900 + b"}]}", "levels"),
        (HI_TOOLS + b'[{"type": "function", "function": "x"}]}', "tools: expected an object as each function"),
    ],
    ids=["content", "low half", "raw bytes", "stop", "key", "arguments", "deep", "function"],
)  # fmt: skip
def test_what_no_tokenizer_takes_fails(
    gateway: Served, body: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        status, told = gateway.post(body)
        assert status == 400 and text in told["error"]["message"]
    assert not gateway.session.calls and not [one for one in caplog.records if one.exc_info]
    whole = {"messages": [{"role": "user", "content": "\U0001f600"}]}
    assert gateway.post(json.dumps(whole).encode())[0] == 200, "both halves are a character"


def test_a_reward_of_four_hundred_digits_is_refused_and_the_episode_goes_on(gateway: Served) -> None:
    session_id = gateway.key.partition(".")[0]
    for number in (b"1" + b"0" * 400, b"1e999", b"NaN", b"-Infinity", b'"1"'):
        status, told = gateway.post(b'{"reward": ' + number + b"}", f"/v1/sessions/{session_id}/reward")
        assert status == 400 and "expected a number within 1,000,000 of 0" in told["error"]["message"]
        assert "such numbers, got {'reward': " in told["error"]["message"]
    assert gateway.post(HI)[0] == 200


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/embeddings"])
def test_what_is_not_served_is_answered_with_what_is(gateway: Served, path: str) -> None:
    status, told = gateway.post(HI, path)
    expected = (
        f"POST {path}: Not Found, expected one of /v1/chat/completions, /v1/completions, /v1/models, /v1/sessions"
    )
    assert status == 404 and told["error"]["message"] == expected


def test_a_reward_that_is_told_again_is_the_same_or_a_conflict_and_a_lost_episode_says_why() -> None:
    with served() as gateway:
        path, rewarded = f"/v1/sessions/{gateway.session.session_id}/reward", {"reward": 0.5, "parts": {"exact": 1}}
        assert gateway.post(HI)[0] == 200
        first, again = (gateway.post(rewarded, path) for _ in range(2))
        assert first == again and first[0] == 200 and len(gateway.fleet.ends) == 1
        for body, at, status in (({"reward": 1.0}, path, 409), (HI, "", 410)):
            assert_ended(gateway.post(body, at), status, "the episode has its reward, 0.5")
        status, told = gateway.post(HI, key="master")
        assert status == 401 and "from POST /v1/sessions" in told["error"]["message"]
        assert gateway.post(rewarded, "/v1/sessions/a9-0-9/reward", "master")[0] == 404
        gateway.episodes.open_problem("a2", 1, {})
        other = gateway.episodes.take_seat("")
        at = f"/v1/sessions/{other.session_id}/reward"
        assert_ended(gateway.post(rewarded, at, other.key), 410, "the episode is lost: it made no call")
        assert_ended(gateway.post(HI, key=other.key), 410, "the episode is lost: it made no call")


def assert_ended(answer: tuple[int, Any], status: int, text: str) -> None:
    error = answer[1]["error"]
    assert (answer[0], error["code"], error["message"]) == (status, "session_ended", text)


def test_a_stock_client_finds_the_one_model_by_its_name() -> None:
    with served() as gateway, OpenAI(api_key=gateway.key, base_url=f"http://127.0.0.1:{gateway.port}/v1") as client:
        assert client.models.retrieve("policy").id == client.models.list().data[0].id == "policy"
        with pytest.raises(NotFoundError, match="model: expected 'policy', got 'a/b'"):
            client.models.retrieve("a/b")


def test_a_certificate_that_is_none_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("nowhere.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=f"agent.tls: expected a PEM file .* at .*{name}, got: "):
            GatewayPort("127.0.0.1:0", str(tmp_path / name))


def test_an_episodes_key_opens_no_other_episode() -> None:
    with served() as gateway:
        gateway.episodes.open_problem("a2", 2, {"day": date(2026, 1, 1), "odds": math.nan})
        status, seat = gateway.post({}, "/v1/sessions", "master")
        assert status == 201 and seat["problem"]["day"] == "2026-01-01", "what JSON has no word for is told as text"
        other = gateway.episodes.take_seat("")
        path = f"/v1/sessions/{other.session_id}/reward"
        for key in (gateway.key, f"{other.session_id}.{gateway.key.partition('.')[2]}"):
            assert gateway.post({"reward": 1.0}, path, key)[0] == 401
        assert gateway.post({"reward": 1.0}, path, other.key)[0] == 410, "an episode without a call"


def test_an_error_that_nobody_foresaw_is_one_answer_alone(gateway: Served, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        gateway.fleet.broken = ValueError("the journal took no such number")
        status, told = gateway.post({"messages": [{"role": "user", "content": f"hi {number}"}]})
        assert status == 500 and told["error"]["code"] == "internal_error" and "ValueError" in told["error"]["message"]
        gateway.fleet.broken = None
    assert not gateway.session.calls
    assert len([one for one in caplog.records if one.exc_info]) <= 1
    assert gateway.post({"messages": [{"role": "user", "content": "hi again"}]})[0] == 200


class Parts:
    """A request's body in so many parts."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def stream(self) -> Any:
        for part in self._parts:
            yield part


async def test_bodies_take_time_by_length_and_of_all_and_one_hold_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(bodies: Bodies, caller: str, *parts: bytes) -> int:
        async with bodies.read(Parts(*parts), caller) as data:  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            return len(data)

    with cpu_time_within(0.5):
        assert await read(Bodies(), "a1", *[b"x" * 1000] * 8000) == 8_000_000
    monkeypatch.setattr(app, "BODIES_BYTES_MAX", 500)
    monkeypatch.setattr(app, "BODIES_OF_ONE_BYTES_MAX", 200)
    bodies = Bodies()
    for callers, refused in (("aaa", 1), ("abcdef", 1), ("abcde", 0)):
        ends = await asyncio.gather(*(read(bodies, one, b"x" * 100) for one in callers), return_exceptions=True)
        assert sum(isinstance(end, CallRefused) for end in ends) == refused, callers


def test_a_large_body_is_parsed_beside_the_loop(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = app.body_of

    def noting(data: bytes) -> dict[str, object]:
        threads.append(threading.current_thread().name)
        return parse(data)

    monkeypatch.setattr(app, "body_of", noting)
    assert gateway.post(HI)[0] == 200
    assert gateway.post({**HI, "user": "x" * 300_000})[0] == 200
    assert not threads[0].startswith("gateway") and threads[1].startswith("gateway")


def test_calls_that_are_none_use_up_an_episodes_calls() -> None:
    with served(calls_max=3) as gateway:
        for _ in range(3):
            assert gateway.post({"messages": "none"})[0] == 400
        with gateway.connect() as connection:
            connection.sendall(gateway.head(1000, gateway.key))  # nothing of the body is waited for
            status, told = answer_of(connection)
            assert status == 400 and told["error"]["code"] == "too_many_calls"


async def test_long_work_of_one_caller_leaves_a_thread_to_others() -> None:
    work, order = LongWork(), list[str]()

    async def asked(caller: str) -> None:
        await work.run(caller, lambda: time.sleep(0.03))
        order.append(caller)

    await asyncio.gather(*(asked(caller) for caller in ("greedy",) * 6 + ("honest",)))
    work.close()
    assert order.index("honest") <= 2


@pytest.mark.parametrize("listen", ["127.0.0.1:65536", "127.0.0.1:\u00b2", "nowhere", ":80"])
def test_an_address_that_cannot_be_is_refused_by_name(listen: str) -> None:
    with pytest.raises(ConfigError, match="agent.listen: expected HOST:PORT, got"):
        GatewayPort(listen)
