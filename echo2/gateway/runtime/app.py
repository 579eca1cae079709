"""OpenAI's API over HTTP, on Starlette: `chat/completions`, `completions`, `models`, and the sessions that agents' calls belong to.

Guarantees: a call is answered for its own session alone, by that session's key; bodies have a limit; a refusal says why, and when
to come again where that helps. Waits for each call's completion as long as its client does. Leaves to others: everything else.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from echo2.base.errors import MalformedMessage
from echo2.gateway import events as e
from echo2.gateway.limits import BODY_BYTES_MAX, LABEL_CHARS_MAX, REWARD_MAX, is_reward
from echo2.gateway.replies import TextOf, error_body, piece_of, pieces_of, reply_of
from echo2.gateway.requests import CallRequest, chat_call, text_call
from echo2.gateway.runtime.desk import GatewayDesk, Reply
from echo2.outside import unix_now

KEEP_ALIVE_S = 15.0
_SAMPLED_ANEW = e.Refuse(0, 502, "sampled_anew", "another worker began this completion anew, and it came out otherwise")


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.reply = e.Refuse(0, status, code, message)


class GatewayApp:
    """`master_key`: of outside harnesses, which ask for episodes; sessions have keys of their own."""

    def __init__(self, desk: GatewayDesk, model: str, master_key: str, text_of: TextOf) -> None:
        self._desk, self._model, self._master_key, self._text_of = desk, model, master_key, text_of

    def application(self) -> Starlette:
        routes = []
        for prefix in ("/v1", "/s/{session}/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/completions", self._text, methods=["POST"]),
                Route(f"{prefix}/models", self._models),
            ]
        routes += [
            Route("/v1/sessions", self._seat, methods=["POST"]),
            Route("/v1/sessions", self._counts),
            Route("/v1/sessions/{session}/reward", self._reward, methods=["POST"]),
            Route("/v1/sessions/{session}", self._give_up, methods=["DELETE"]),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={_Refused: _refused, MalformedMessage: _malformed, ClientDisconnect: _gone},
        )

    # ---- calls

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, chat_call(await _body(request)))

    async def _text(self, request: Request) -> Response:
        return await self._answered(request, text_call(await _body(request)))

    async def _answered(self, request: Request, call: CallRequest) -> Response:
        session_id = self._session_of(request)
        is_obeyed = call.temperature is not None and self._desk.sessions.evaluates(session_id)
        ignored = [name for name in call.ignored if not (is_obeyed and name == "temperature")]
        headers = {"x-echo2-ignored": ", ".join(ignored)} if ignored else {}
        call_id, waiting = self._desk.call(session_id, call)
        if call.is_streamed and not waiting.done():
            stream = self._desk.stream_of(call_id)  # at once, so that it misses nothing
            return StreamingResponse(
                self._streamed(call_id, waiting, stream, call), media_type="text/event-stream", headers=headers
            )
        reply = await self._waited(request, call_id, waiting)
        if isinstance(reply, e.Refuse):
            return _error(reply)
        assert isinstance(reply, e.CallAnswer), "calls are answered or refused"
        now_s = int(unix_now())
        if call.is_streamed:
            body = "".join(pieces_of(reply, call, self._model, now_s, self._text_of))
            return Response(body, media_type="text/event-stream", headers=headers)
        return JSONResponse(reply_of(reply, call, self._model, now_s, self._text_of), headers=headers)

    async def _waited(self, request: Request, call_id: int, waiting: asyncio.Future[Reply]) -> Reply:
        """The reply; whoever hangs up before leaves a call to which it may come back."""
        if waiting.done():
            return waiting.result()
        hung_up = asyncio.ensure_future(_hung_up(request))
        try:
            both: list[asyncio.Future[Any]] = [waiting, hung_up]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ClientDisconnect
        finally:
            hung_up.cancel()
            self._desk.left(call_id)

    async def _streamed(
        self, call_id: int, waiting: asyncio.Future[Reply], stream: asyncio.Queue[str], call: CallRequest
    ) -> AsyncIterator[str]:
        now_s, told = int(unix_now()), ""
        try:
            while not waiting.done():
                coming = asyncio.ensure_future(stream.get())
                both: set[asyncio.Future[Any]] = {waiting, coming}
                await asyncio.wait(both, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    yield piece_of(call_id, coming.result(), call, self._model, now_s, is_first=not told)
                    told += coming.result()
                else:
                    coming.cancel()
                    if not waiting.done():
                        yield ": still sampling\n\n"
            reply = waiting.result()
            if isinstance(reply, e.CallAnswer) and not reply.choices[0].text.startswith(told):
                yield f"data: {json.dumps(error_body(_SAMPLED_ANEW))}\n\n"
            elif isinstance(reply, e.CallAnswer):
                for piece in pieces_of(reply, call, self._model, now_s, self._text_of, told):
                    yield piece
            elif isinstance(reply, e.Refuse):
                yield f"data: {json.dumps(error_body(reply))}\n\n"
        finally:
            self._desk.left(call_id)

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse({
            "object": "list", "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "echo2"}],
        })  # fmt: skip

    # ---- sessions

    async def _seat(self, request: Request) -> Response:
        self._check_master(request)
        body = await _body(request)
        label = body.get("label", "")
        if not isinstance(label, str) or len(label) > LABEL_CHARS_MAX:
            raise MalformedMessage(f"label: expected a text of at most {LABEL_CHARS_MAX} characters")
        reply = await self._desk.seat(label)
        if isinstance(reply, e.Refuse):
            return _error(reply)
        assert isinstance(reply, e.Seated), "a seat is given or refused"
        told = {
            "id": reply.session_id, "key": reply.key, "group": reply.root, "seat": reply.seat, "problem": dict(reply.told)
        }  # fmt: skip
        return JSONResponse(told, status_code=201)

    async def _reward(self, request: Request) -> Response:
        session_id = self._session_of(request)
        body = await _body(request)
        value, parts = body.get("reward"), body.get("parts") or {}
        numbers = [value, *parts.values()] if isinstance(parts, dict) and len(parts) <= 64 else [None]
        for number in numbers:
            if not is_reward(number):
                raise MalformedMessage(
                    f"reward: expected a number within {REWARD_MAX:,.0f} of 0, and parts as an object of such numbers"
                )
        assert isinstance(value, int | float) and isinstance(parts, dict), "checked above"
        self._desk.tell(e.EpisodeRewarded(session_id, float(value), {str(k)[:64]: float(v) for k, v in parts.items()}))
        return JSONResponse({"id": session_id, "is_ended": True})

    async def _give_up(self, request: Request) -> Response:
        session_id = self._session_of(request)
        self._desk.tell(e.EpisodeFailed(session_id, "its harness gave it up"))
        return JSONResponse({"id": session_id, "is_ended": True})

    async def _counts(self, request: Request) -> Response:
        self._check_master(request)
        sessions = self._desk.sessions
        return JSONResponse({"open": len(sessions.sessions), **asdict(sessions.counts)})

    # ---- who asks

    def _session_of(self, request: Request) -> str:
        """The session of the path, or the one whose key the request bears; by its own key or the master's."""
        key = _key_of(request)
        is_master = hmac.compare_digest(key.encode(), self._master_key.encode())
        named = request.path_params.get("session")
        if named is None:
            named, _, _ = key.partition(".")
        if not (is_master and named in self._desk.sessions.sessions) and not self._desk.sessions.key_fits(named, key):
            raise _Refused(401, "invalid_api_key", "expected the key of an episode that has not ended")
        return str(named)

    def _check_master(self, request: Request) -> None:
        if not hmac.compare_digest(_key_of(request).encode(), self._master_key.encode()):
            raise _Refused(401, "invalid_api_key", "expected the gateway's key")


def _key_of(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            raise _Refused(413, "too_large", f"expected a body of at most {BODY_BYTES_MAX} bytes")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"body: expected JSON, got {error}") from None
    if not isinstance(body, dict):
        raise MalformedMessage("body: expected a JSON object")
    return body


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(refused: e.Refuse) -> Response:
    headers = {"retry-after": f"{refused.retry_after_s:g}"} if refused.retry_after_s else {"x-should-retry": "false"}
    return JSONResponse(error_body(refused), status_code=refused.status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused), "registered for it"
    return _error(error.reply)


async def _malformed(request: Request, error: Exception) -> Response:
    return _error(e.Refuse(0, 400, "invalid_request_error", str(error)))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
