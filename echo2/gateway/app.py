"""OpenAI's API over HTTP, on Starlette: `chat/completions`, `completions`, `models`, and the sessions that agents' calls belong to.

Guarantees: a session's key gives access to that session only; a refusal says why, and when to retry if a retry can help. Waits
for each completion as long as its client does.
"""

from __future__ import annotations

import asyncio
import codecs
import hmac
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from echo2.base.errors import ConfigError, MalformedMessage, PortBusy
from echo2.base.units import address_of
from echo2.gateway.episodes import (
    LABEL_CHARS_MAX,
    REWARD_MAX,
    Call,
    CallRefused,
    Choice,
    Episodes,
    LongWork,
    Session,
    is_reward,
)
from echo2.gateway.requests import BODY_BYTES_MAX, CallRequest, body_of, chat_call, text_call
from echo2.outside import unix_now
from echo2.outside.guard import MISHAPS
from echo2.outside.net import listened, listening_socket
from echo2.trust.http_port import KEY_SHOWN, HttpServer
from echo2.trust.ports import GATEWAY, HttpLimits

# ---- keys and limits of bodies, before any byte of a body is read. A body must declare JSON as its content type, which makes
# browsers send a CORS preflight, and that is never granted.

BODY_S = 60.0  # 8 MiB in 60 s is 1.1 Mbit/s, which any client reaches; drips end here
BODIES_BYTES_MAX = 256 << 20  # 32 full bodies at once: a share of the memory of a small learner
BODIES_OF_ONE_BYTES_MAX = 4 * BODY_BYTES_MAX  # an agent with a few parallel calls sends that many at a time
_KINDS = ("application/json", "application/x-protobuf")  # neither can a page of another site send unasked
LINGER_S, LINGER_BYTES_MAX = 1.0, 1 << 20
"""Limits for draining a refused request, in seconds and bytes: a client that is still sending would not read its answer."""
PARSED_AT_ONCE_BYTES_MAX = 256 << 10  # parses in about a millisecond, so the loop may do it; larger ones go to a thread
T = TypeVar("T")
MASTER = ""  # caller of a request that bears the gateway's own key, in place of a session ID


class AccessCheck:
    """ASGI middleware around the whole application. `caller_of`: maps a key to its session, to MASTER, or to None if unknown."""

    def __init__(self, app: ASGIApp, caller_of: Callable[[str], str | None]) -> None:
        self._app, self._caller_of = app, caller_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        caller = self._caller_of(key_of(request))
        refused = _refusal(request, is_known=caller is not None)
        if refused is not None:
            await _answer_unread(refused, request, receive, send)
            return
        scope.get(KEY_SHOWN, lambda: None)()  # without a port, nobody asks
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the application has answered 500
            MISHAPS.note("a request", caller or "a harness", error)


class Bodies:
    """Bounds the bytes of bodies that are being read or parsed, per caller and in total. `long_work`: parses large ones."""

    def __init__(self, long_work: LongWork | None = None) -> None:
        self._held: Counter[str] = Counter()
        self._long_work = long_work or LongWork()

    async def parsed(self, request: Request, caller: str, parse: Callable[[Mapping[str, object]], T]) -> T:
        """Parses the whole body as JSON, then with `parse`; a large one in a thread."""
        async with self.read(request, caller) as data:
            if len(data) <= PARSED_AT_ONCE_BYTES_MAX:
                return parse(body_of(data))
            return await self._long_work.run(caller, lambda: parse(body_of(data)))

    @asynccontextmanager
    async def read(self, request: Request, caller: str) -> AsyncIterator[bytes]:
        """Reads the whole body of a request. It counts towards the limits until the context ends."""
        parts: list[bytes] = []
        count = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    count += len(part)
                    self._held[caller] += len(part)
                    self._check(caller, count)
                    parts.append(part)
            yield b"".join(parts)
        except TimeoutError:
            raise CallRefused(408, "too_slow", f"expected the whole body within {BODY_S:.0f} s") from None
        finally:
            self._held[caller] -= count
            if not self._held[caller]:
                del self._held[caller]

    def _check(self, caller: str, count: int) -> None:
        if count > BODY_BYTES_MAX:
            raise too_large()
        is_one_over = caller != MASTER and self._held[caller] > BODIES_OF_ONE_BYTES_MAX
        if is_one_over or self._held.total() > BODIES_BYTES_MAX:
            raise CallRefused(429, "busy", "too many large requests are being read", 1.0)


def key_of(request: Request) -> str:
    """The key of OpenAI's clients, or of Tinker's, which begins with `tml-`."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "").removeprefix("tml-")


def error_response(refused: CallRefused) -> Response:
    headers = {"retry-after": f"{refused.retry_after_s:g}"} if refused.retry_after_s else {"x-should-retry": "false"}
    return JSONResponse(error_body(refused), status_code=refused.status, headers=headers)


def too_large() -> CallRefused:
    return CallRefused(413, "too_large", f"expected a body of at most {BODY_BYTES_MAX} bytes")


def _refusal(request: Request, *, is_known: bool) -> CallRefused | None:
    if not is_known:
        return CallRefused(401, "invalid_api_key", "expected the gateway's key, or that of an episode under way")
    if not _has_body(request):
        return None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        text = f"content-encoding: expected none, got {coding[:80]!r}"
        return CallRefused(415, "invalid_request_error", text)
    if kind not in _KINDS:
        return CallRefused(415, "invalid_request_error", f"content-type: expected {_KINDS[0]}, got {kind[:80]!r}")
    length = request.headers.get("content-length", "0")
    return too_large() if int(length) > BODY_BYTES_MAX else None  # h11 has checked: at most 20 digits


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


async def _answer_unread(refused: CallRefused, request: Request, receive: Receive, send: Send) -> None:
    """Answers at once, drains the rest of the request within LINGER_S and LINGER_BYTES_MAX, then ends the connection."""
    response = error_response(refused)
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_S):
            left, is_more = LINGER_BYTES_MAX, _has_body(request) and "expect" not in request.headers
            while is_more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                is_more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


KEEP_ALIVE_S = 15.0  # nginx ends a silent answer after 60 s


class GatewayApp:
    """`master_key`: outside harnesses ask for episodes with it; each session has a key of its own."""

    def __init__(self, episodes: Episodes, model: str, master_key: str, bytes_of: BytesOf) -> None:
        self._episodes, self._model, self._master_key, self._bytes_of = episodes, model, master_key, bytes_of
        self._bodies = Bodies(episodes.long_work)

    def application(self) -> ASGIApp:
        routes = []
        for prefix in ("/v1", "/s/{session}/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", partial(self._answered, call_of=chat_call), methods=["POST"]),
                Route(f"{prefix}/completions", partial(self._answered, call_of=text_call), methods=["POST"]),
                Route(f"{prefix}/models", self._models),
                Route(f"{prefix}/models/{{model:path}}", self._models),
            ]
        routes += [
            Route("/v1/sessions", self._seat, methods=["POST"]),
            Route("/v1/sessions", self._counts),
            Route("/v1/sessions/{session}/reward", self._reward, methods=["POST"]),
            Route("/v1/sessions/{session}", self._give_up, methods=["DELETE"]),
        ]
        handlers = dict.fromkeys(
            (CallRefused, MalformedMessage, ClientDisconnect, HTTPException, Exception), error_answer
        )
        return AccessCheck(Starlette(routes=routes, exception_handlers=handlers), self._caller_of)

    # ---- calls

    async def _answered(self, request: Request, call_of: Callable[[Mapping[str, object]], CallRequest]) -> Response:
        session = self._session_of(request)
        if self._episodes.is_spent(session):
            raise CallRefused(400, "too_many_calls", "this episode has made all the calls that it may")
        try:
            parsed = await self._bodies.parsed(request, session.session_id, call_of)
        except MalformedMessage:
            session.call_count += 1
            raise
        is_obeyed = parsed.temperature is not None and session.problem.is_evaluation
        ignored = [name for name in parsed.ignored if not (is_obeyed and name == "temperature")]
        headers = {"x-echo2-ignored": ", ".join(ignored)} if ignored else {}
        call = self._episodes.begin_call(session, parsed)
        if parsed.is_streamed and not call.answer.done():
            return EventStream(self._streamed(call), lambda: self._episodes.leave(call), headers)
        try:
            choices = await answered(request, call.answer)
        finally:
            self._episodes.leave(call)
        now_s = int(unix_now())
        if parsed.is_streamed:
            body = "".join(pieces_of(call, choices, self._model, now_s, self._bytes_of))
            return Response(body, media_type="text/event-stream", headers=headers)
        return JSONResponse(reply_of(call, choices, self._model, now_s, self._bytes_of), headers=headers)

    async def _streamed(self, call: Call) -> AsyncIterator[str]:
        now_s, sent, answer, pieces = int(unix_now()), "", call.answer, call.pieces
        try:
            while not answer.done():
                coming = await first_of(answer, pieces.get())
                if coming.done():
                    yield piece_of(call, coming.result(), self._model, now_s, is_first=not sent)
                    sent += coming.result()
                elif not answer.done():
                    yield ": still sampling\n\n"
            choices = answer.result()
            if not choices[0].text.startswith(sent):
                raise sampled_anew()
            for piece in pieces_of(call, choices, self._model, now_s, self._bytes_of, sent):
                yield piece
        except CallRefused as refused:
            yield f"data: {json.dumps(error_body(refused))}\n\n"

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        return models_answer(request, self._model)

    # ---- sessions

    async def _seat(self, request: Request) -> Response:
        self._check_master(request)
        body = await self._bodies.parsed(request, MASTER, dict)
        label = body.get("label", "")
        if not isinstance(label, str) or len(label) > LABEL_CHARS_MAX:
            raise MalformedMessage(f"label: expected a text of at most {LABEL_CHARS_MAX} characters")
        session = self._episodes.take_seat(label)
        content = {"group": session.problem.root, "problem": dict(session.problem.description), "seat": session.seat}
        # Metadata may be of types that JSON does not have.
        text = json.dumps({"id": session.session_id, "key": session.key, **content}, default=str)
        return Response(text, status_code=201, media_type="application/json")

    async def _reward(self, request: Request) -> Response:
        session_id = self._named_by(request)
        body = await self._bodies.parsed(request, session_id, dict)
        value, parts = body.get("reward"), body.get("parts") or {}
        if not isinstance(parts, dict) or len(parts) > 64 or not all(map(is_reward, (value, *parts.values()))):
            fields = {name: body[name] for name in ("reward", "parts") if name in body} or "neither"
            what = f"a number within {REWARD_MAX:,.0f} of 0, and parts as an object of such numbers"
            raise MalformedMessage(f"reward: expected {what}, got {fields!r:.200}")
        assert isinstance(value, int | float), "checked above"
        scored = float(value), {str(k)[:64]: float(v) for k, v in parts.items()}
        if session := self._episodes.sessions.get(session_id):
            self._episodes.reward(session, *scored)
        ended = self._episodes.ended[session_id]
        if ended.scored != scored:  # else it is this reward, told again maybe
            raise CallRefused(409 if ended.scored else 410, "session_ended", ended.text)
        return JSONResponse({"id": session_id, "is_ended": True})

    async def _give_up(self, request: Request) -> Response:
        session = self._session_of(request)
        self._episodes.fail(session, "its harness gave it up")
        return JSONResponse({"id": session.session_id, "is_ended": True})

    async def _counts(self, request: Request) -> Response:
        self._check_master(request)
        return JSONResponse({"open": len(self._episodes.sessions), **asdict(self._episodes.counts)})

    # ---- who asks

    def _caller_of(self, key: str) -> str | None:
        """Returns the session with this key, open or ended, MASTER for the gateway's key, or None."""
        if hmac.compare_digest(key.encode(), self._master_key.encode()):
            return MASTER
        session_id = key.partition(".")[0]
        return session_id if self._episodes.has_key(session_id, key) else None

    def _named_by(self, request: Request) -> str:
        """Returns the session that the path names, or else the key's. Raises CallRefused (401) unless the key is that session's or
        the master's, and 404 if there is none."""
        caller = self._caller_of(key_of(request))
        session_id = str(request.path_params.get("session", caller or ""))
        if caller not in (MASTER, session_id) or not session_id:
            raise CallRefused(401, "invalid_api_key", "expected the key of this episode, from POST /v1/sessions")
        if session_id not in self._episodes.sessions and session_id not in self._episodes.ended:
            raise CallRefused(
                404, "no_session", f"expected an episode since the learner's last start, got {session_id!r:.80}"
            )
        return session_id

    def _session_of(self, request: Request) -> Session:
        """As `_named_by`. Raises CallRefused (410), which says why, if the episode has ended."""
        session_id = self._named_by(request)
        if session_id not in self._episodes.sessions:
            raise CallRefused(410, "session_ended", self._episodes.ended[session_id].text)
        return self._episodes.sessions[session_id]

    def _check_master(self, request: Request) -> None:
        if self._caller_of(key_of(request)) != MASTER:
            raise CallRefused(401, "invalid_api_key", "expected the gateway's key")


class EventStream(StreamingResponse):
    """Server-sent events. `on_end`: called however it ends, also where the client has left before the first event is made."""

    def __init__(
        self, events: AsyncIterator[str], on_end: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def first_of(answer: asyncio.Future[Any], other: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Waits for either, KEEP_ALIVE_S at most. Returns the task of `other`, which ends here unless it is done."""
    task = asyncio.ensure_future(other)
    try:
        both: set[asyncio.Future[Any]] = {answer, task}
        await asyncio.wait(both, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
    return task


async def answered(request: Request, answer: asyncio.Future[T]) -> T:
    """Returns the answer. Raises ClientDisconnect if the client hangs up first."""

    async def end_of_connection() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    hung_up = asyncio.ensure_future(end_of_connection())
    try:
        await asyncio.wait((answer, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        hung_up.cancel()


def sampled_anew() -> CallRefused:
    """What a stream ends with whose beginning no longer holds."""
    return CallRefused(502, "sampled_anew", "another worker began this completion anew, and it came out otherwise")


def models_answer(request: Request, model: str, **more: object) -> Response:
    """The list of the one model, or the model that the path names."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "echo2", **more}
    asked = request.path_params.get("model")
    if asked not in (None, model):
        raise CallRefused(404, "model_not_found", f"model: expected {model!r}, got {asked!r:.80}")
    return JSONResponse(card if asked else {"object": "list", "data": [card]})


async def error_answer(request: Request, error: Exception) -> Response:
    match error:
        case CallRefused():
            return error_response(error)
        case MalformedMessage() | ConfigError():
            return error_response(CallRefused(400, "invalid_request_error", str(error)))
        case ClientDisconnect():
            return Response(status_code=499)
        case HTTPException():
            known = ", ".join(sorted({route.path for route in request.app.routes if "{" not in route.path}))
            text = f"{request.method} {request.url.path[:200]}: {error.detail}, expected one of {known}"
            return error_response(CallRefused(error.status_code, "not_supported", text))
    return error_response(CallRefused(500, "internal_error", f"{type(error).__name__}; see the learner's log"))


STOP_GRACE_S = 1  # streams never end by themselves; a learner that stops must not wait for them


class GatewayPort:
    """Binds `host:port` (port 0: any free port) on construction, so that `url` is known before `run` serves."""

    def __init__(self, listen: str, certificate: str = "", limits: HttpLimits = GATEWAY) -> None:
        host, _, port = (listen or "127.0.0.1:0").rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ConfigError(f"agent.listen: expected HOST:PORT, got {listen!r}")
        if host not in ("127.0.0.1", "::1", "localhost") and not certificate:
            raise ConfigError(
                f"agent.listen: expected agent.tls, a PEM file with certificate and key, for {host}, as keys of episodes "
                "would travel in clear text"
            )
        try:
            if certificate:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, password="")
        except OSError as error:
            text = f"agent.tls: expected a PEM file with certificate and key, without a passphrase, at {certificate}, got: {error}"
            raise ConfigError(text) from None
        self._listener = listening_socket(host)
        try:
            self._listener.bind((listened(host), int(port)))
        except OSError as error:
            self._listener.close()
            raise PortBusy(
                f"agent.listen: expected to listen on {address_of(host, int(port))}: {error.strerror}"
            ) from None
        self._listener.listen(limits.backlog)  # connections that arrive before `run` wait here
        self._limits = limits
        self._tls = {"ssl_certfile": certificate} if certificate else {}
        address = address_of(host, self._listener.getsockname()[1])
        self.url = f"{'https' if certificate else 'http'}://{address}"
        self._server: HttpServer | None = None

    async def run(self, app: ASGIApp) -> None:
        """Serves until `stop` or cancellation."""
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=STOP_GRACE_S, timeout_keep_alive=75, server_header=False, **self._tls,
        )  # fmt: skip
        self._server = HttpServer(config, self._limits)
        await self._server.serve(sockets=[self._listener])

    async def stop(self, serving: asyncio.Task[None] | None) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if serving is not None:
            await asyncio.gather(serving, return_exceptions=True)
        self._listener.close()


# ---- replies: JSON bodies, and server-sent events of a stream

Json = dict[str, object]
BytesOf = Callable[[int], bytes]


def reply_of(call: Call, answers: Sequence[Choice], model: str, now_s: int, bytes_of: BytesOf) -> Json:
    """Builds the whole reply. `bytes_of`: returns the bytes of a token ID."""
    request = call.request
    is_chat = request.prompt is None
    choices = []
    for number, choice in enumerate(answers):
        logprobs = _logprobs(choice, bytes_of, is_chat=is_chat) if request.wants_logprobs else None
        reply: Json = {"index": number, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        if is_chat:
            called: Json = {"tool_calls": _written(choice)} if choice.tool_calls else {}
            reply["message"] = {"role": "assistant", "content": choice.text, "refusal": None, **called}
        else:
            reply["text"] = choice.text
        choices.append(reply | _ids_of(call, choice))
    return _head(call, model, now_s) | {"choices": choices, "usage": _usage(call, answers)} | _prompt_ids_of(call)


def piece_of(call: Call, text: str, model: str, now_s: int, *, is_first: bool) -> str:
    """Builds the server-sent event for the next piece of a single-choice stream."""
    return _piece(call, model, now_s, 0, _content(call.request, text, is_first=is_first))


def pieces_of(
    call: Call, answers: Sequence[Choice], model: str, now_s: int, bytes_of: BytesOf, streamed: str = ""
) -> Iterator[str]:
    """Yields the answer as server-sent events. `streamed`: text of the single choice that was sent already, and is left out."""
    request = call.request
    is_chat = request.prompt is None
    for number, choice in enumerate(answers):
        logprobs = _logprobs(choice, bytes_of, is_chat=is_chat) if request.wants_logprobs else None
        content = _content(request, choice.text[len(streamed) :], is_first=not streamed)
        if is_chat and choice.tool_calls:
            written = _written(choice)
            content["delta"]["tool_calls"] = [{"index": place, **tool} for place, tool in enumerate(written)]
        prompt = {} if number else _prompt_ids_of(call)
        yield _piece(call, model, now_s, number, content | _ids_of(call, choice), logprobs, more=prompt)
        end: Json = {"delta": {}} if is_chat else {"text": ""}
        yield _piece(call, model, now_s, number, end, None, choice.finish_reason)
    if request.wants_usage:
        yield _event(_head(call, model, now_s, ".chunk") | {"choices": [], "usage": _usage(call, answers)})
    yield "data: [DONE]\n\n"


def error_body(refused: CallRefused) -> Json:
    kind = "api_error" if refused.status >= 500 or refused.retry_after_s else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "code": refused.code, "param": None}}


def _content(request: CallRequest, text: str, *, is_first: bool) -> dict[str, Any]:
    if request.prompt is not None:
        return {"text": text}
    return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


def _piece(
    call: Call, model: str, now_s: int, number: int, content: Json, logprobs: Json | None = None, reason: str | None = None,
    more: Json | None = None,
) -> str:  # fmt: skip
    choice: Json = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
    return _event(_head(call, model, now_s, ".chunk") | {"choices": [choice]} | (more or {}))


def _ids_of(call: Call, choice: Choice) -> Json:
    """Of a choice; of a text's, as in vLLM's answers, those of the prompt too."""
    if not call.request.wants_ids:
        return {}
    sampled, of_prompt = choice.sampled, {} if call.request.prompt is None else _prompt_ids_of(call)
    return {"token_ids": list(sampled.token_ids), "versions": list(sampled.versions), **of_prompt}


def _prompt_ids_of(call: Call) -> Json:
    return {"prompt_token_ids": list(call.prompt_token_ids)} if call.request.wants_ids else {}


def _head(call: Call, model: str, now_s: int, of_chat: str = "") -> Json:
    """`of_chat`: behind the kind of a chat's answer."""
    is_chat = call.request.prompt is None
    prefix, kind = ("chatcmpl", "chat.completion" + of_chat) if is_chat else ("cmpl", "text_completion")
    return {"id": f"{prefix}-{call.name}", "object": kind, "created": now_s, "model": model}


def _written(choice: Choice) -> list[Json]:
    """Returns the tool calls with their arguments as JSON text."""
    written = []
    for call in choice.tool_calls:
        function = call["function"]
        assert isinstance(function, dict), "as the reading made it"
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        written.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return written


def _logprobs(choice: Choice, bytes_of: BytesOf, *, is_chat: bool) -> Json:
    pieces = [bytes_of(token) for token in choice.sampled.token_ids]
    texts = [piece.decode(errors="replace") for piece in pieces]
    if not is_chat:
        scores: Json = {"token_logprobs": list(choice.sampled.logprobs), "top_logprobs": None}
        return {"tokens": texts, **scores, "text_offset": _offsets(pieces)}
    content: list[Json] = [
        {"token": text, "logprob": logprob, "bytes": list(piece), "top_logprobs": []}
        for text, piece, logprob in zip(texts, pieces, choice.sampled.logprobs, strict=True)
    ]
    return {"content": content}


def _offsets(pieces: Sequence[bytes]) -> list[int]:
    """Where each token's text begins, in characters. A character belongs to the token with its last byte."""
    decoder, offsets, at = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(decoder.decode(piece))
    return offsets


def _usage(call: Call, answers: Sequence[Choice]) -> Json:
    sampled = sum(len(choice.sampled.token_ids) for choice in answers)
    prompt = len(call.prompt_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
