"""Authenticates the gateway's requests and limits their bodies, before any byte of a body is read.

Guarantees: a request without the gateway's key or an open episode's key is answered 401 and its connection is closed; a body must
declare JSON as its content type, which makes browsers send a CORS preflight, and that is never granted; a body must arrive within
BODY_S and hold at most BODY_BYTES_MAX; `Bodies` bounds the bodies in progress together; an unexpected error is answered 500, and
its log lines are rate-limited. Leaves to others: which session a key is for (app), connections (trust/http_port).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from echo2.gateway.episodes import CallRefused
from echo2.gateway.replies import error_body
from echo2.gateway.requests import BODY_BYTES_MAX
from echo2.outside.guard import MISHAPS
from echo2.trust.http_port import KEY_SHOWN

BODY_S = 60.0  # 8 MiB in 60 s is 1.1 Mbit/s, which any client reaches; drips end here
BODIES_BYTES_MAX = 256 << 20  # 32 full bodies at once: a share of the memory of a small learner
BODIES_OF_ONE_BYTES_MAX = 4 * BODY_BYTES_MAX  # an agent with a few parallel calls sends that many at a time
_KINDS = ("application/json", "application/x-protobuf")  # neither can a page of another site send unasked
LINGER_S, LINGER_BYTES_MAX = 1.0, 1 << 20
"""Limits for draining a refused request, in seconds and bytes: a client that is still sending would not read its answer."""
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
        scope.get(KEY_SHOWN, _nothing)()
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the application has answered 500
            MISHAPS.note("a request", caller or "a harness", error)


class Bodies:
    """Bounds the bytes of bodies that are being read or parsed, per episode and in total."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

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
        return CallRefused(401, "invalid_api_key", "expected the key of an episode that has not ended")
    if not _has_body(request):
        return None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
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


def _nothing() -> None:
    """Used if the scope has no KEY_SHOWN callback: the application is called without a port."""
