"""OpenAI's API over HTTP, on Starlette: `chat/completions`, `completions`, `models`, and the sessions that agents' calls belong to.

Guarantees: a session's key gives access to that session only; a refusal says why, and when to retry if a retry can help. Waits for
each completion as long as its client does. Leaves to others: authentication and body limits (guard), decisions (sessions).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from echo2.base.errors import MalformedMessage
from echo2.gateway import events as e
from echo2.gateway.limits import LABEL_CHARS_MAX, REWARD_MAX, is_reward
from echo2.gateway.replies import TextOf, error_body, piece_of, pieces_of, reply_of
from echo2.gateway.requests import CallRequest, body_of, chat_call, text_call
from echo2.gateway.runtime.desk import GatewayDesk, Reply
from echo2.gateway.runtime.guard import MASTER, Bodies, GatewayGuard, Refused, error_response, key_of
from echo2.outside import unix_now

KEEP_ALIVE_S = 15.0
PARSED_AT_ONCE_BYTES_MAX = 256 << 10
T = TypeVar("T")
_SAMPLED_ANEW = e.Refuse(0, 502, "sampled_anew", "another worker began this completion anew, and it came out otherwise")


class GatewayApp:
    """`master_key`: outside harnesses ask for episodes with it; each session has a key of its own."""

    def __init__(self, desk: GatewayDesk, model: str, master_key: str, text_of: TextOf) -> None:
        self._desk, self._model, self._master_key, self._text_of = desk, model, master_key, text_of
        self._bodies = Bodies()

    def application(self) -> ASGIApp:
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
        handlers = {Refused: _refused, MalformedMessage: _malformed, ClientDisconnect: _gone, Exception: _unforeseen}
        return GatewayGuard(Starlette(routes=routes, exception_handlers=handlers), self._caller_of)

    # ---- calls

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, chat_call)

    async def _text(self, request: Request) -> Response:
        return await self._answered(request, text_call)

    async def _answered(self, request: Request, call_of: Callable[[Mapping[str, object]], CallRequest]) -> Response:
        session_id = self._session_of(request)
        if self._desk.sessions.is_spent(session_id):
            raise Refused(400, "too_many_calls", "this episode has made all the calls that it may")
        try:
            call = await self._told(request, session_id, call_of)
        except MalformedMessage:
            self._desk.tell(e.CallRefused(session_id))
            raise
        is_obeyed = call.temperature is not None and self._desk.sessions.evaluates(session_id)
        ignored = [name for name in call.ignored if not (is_obeyed and name == "temperature")]
        headers = {"x-echo2-ignored": ", ".join(ignored)} if ignored else {}
        call_id, waiting = self._desk.call(session_id, call)
        if call.is_streamed and not waiting.done():
            stream = self._desk.stream_of(call_id)  # registered before any await, so that no piece is missed
            return StreamingResponse(
                self._streamed(call_id, waiting, stream, call), media_type="text/event-stream", headers=headers
            )
        reply = await self._waited(request, call_id, waiting)
        if isinstance(reply, e.Refuse):
            return error_response(reply)
        assert isinstance(reply, e.CallAnswer), "calls are answered or refused"
        now_s = int(unix_now())
        if call.is_streamed:
            body = "".join(pieces_of(reply, call, self._model, now_s, self._text_of))
            return Response(body, media_type="text/event-stream", headers=headers)
        return JSONResponse(reply_of(reply, call, self._model, now_s, self._text_of), headers=headers)

    async def _waited(self, request: Request, call_id: int, waiting: asyncio.Future[Reply]) -> Reply:
        """Returns the reply. Raises ClientDisconnect if the client hangs up first; its call stays open for a retry."""
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
        body = await self._told(request, MASTER, dict)
        label = body.get("label", "")
        if not isinstance(label, str) or len(label) > LABEL_CHARS_MAX:
            raise MalformedMessage(f"label: expected a text of at most {LABEL_CHARS_MAX} characters")
        reply = await self._desk.seat(label)
        if isinstance(reply, e.Refuse):
            return error_response(reply)
        assert isinstance(reply, e.Seated), "a seat is given or refused"
        told = {
            "id": reply.session_id, "key": reply.key, "group": reply.root, "seat": reply.seat, "problem": dict(reply.told)
        }  # fmt: skip
        return JSONResponse(told, status_code=201)

    async def _reward(self, request: Request) -> Response:
        session_id = self._session_of(request)
        body = await self._told(request, session_id, dict)
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

    async def _told(self, request: Request, caller: str, parse: Callable[[Mapping[str, object]], T]) -> T:
        """Parses the body with `parse`; a large body in a thread."""
        async with self._bodies.read(request, caller) as data:
            if len(data) <= PARSED_AT_ONCE_BYTES_MAX:
                return parse(body_of(data))
            return await self._desk.long_work.run(caller, lambda: parse(body_of(data)))

    # ---- who asks

    def _caller_of(self, key: str) -> str | None:
        """Returns the open session with this key, MASTER for the gateway's key, or None."""
        if hmac.compare_digest(key.encode(), self._master_key.encode()):
            return MASTER
        session_id, _, _ = key.partition(".")
        return session_id if self._desk.sessions.key_fits(session_id, key) else None

    def _session_of(self, request: Request) -> str:
        """Returns the session that the path names, or else the key's. Raises Refused (401) unless the key is that session's or the
        master's."""
        caller, named = self._caller_of(key_of(request)), request.path_params.get("session")
        if caller == MASTER and named in self._desk.sessions.sessions:
            return str(named)
        if not caller or named not in (None, caller):
            raise Refused(401, "invalid_api_key", "expected the key of an episode that has not ended")
        return caller

    def _check_master(self, request: Request) -> None:
        if self._caller_of(key_of(request)) != MASTER:
            raise Refused(401, "invalid_api_key", "expected the gateway's key")


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "registered for it"
    return error_response(error.reply)


async def _malformed(request: Request, error: Exception) -> Response:
    return error_response(e.Refuse(0, 400, "invalid_request_error", str(error)))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(e.Refuse(0, 500, "internal_error", f"{type(error).__name__}; see the learner's log"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
