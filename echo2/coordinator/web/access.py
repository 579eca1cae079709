"""Controls access to the page: who may look and who may act.

On a loopback address the page is open to the machine's users; elsewhere it is served over TLS with the run's certificate and
requires the access token, which is in the run's folder (`links/dashboard.token`, mode 0600): first as `?token=` in the address,
after that as a cookie that scripts cannot read; or as a bearer token. Guarantees: on loopback, a request is answered only if its
one Host header is, byte for byte, one of our names with or without a port (DNS rebinding); an action needs a header whose value
only our own page can know, and, if the browser sends an origin, it must be ours (CSRF); secrets are compared in constant time. No
decision rests on a parsed address: a parser that gives up falls back to the name of this server.
"""

from __future__ import annotations

import asyncio
import re
import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "echo2_access"  # its name is ours alone on this host
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
        await self._app(scope, _Body(receive).receive, _with_headers(send))

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
        return self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer)

    def _welcome(self, request: Request) -> Response:
        response = RedirectResponse(_own_path(request), status_code=303)
        is_secure = request.scope["scheme"] == "https"
        response.set_cookie(
            COOKIE, self._token, httponly=True, samesite="strict", secure=is_secure, max_age=30 * 86_400
        )
        return response


def _own_path(request: Request) -> str:
    """The request's path, which a browser must not take for the name of another host."""
    return "/" + str(request.scope["path"]).lstrip("/\\")


class BodyRefused(Exception):
    """A body is too long or too slow, whatever its headers declare."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Body:
    """A request's body, limited in size and time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left_bytes = REQUEST_BYTES_MAX
        self._until = asyncio.get_running_loop().time() + BODY_S
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise BodyRefused(408, f"expected the whole body within {BODY_S:.0f} s") from None
        self._left_bytes -= len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._left_bytes < 0:
            raise BodyRefused(413, f"expected a body of up to {REQUEST_BYTES_MAX} bytes")
        return message


async def body_refused(request: Request, error: Exception) -> Response:
    """The answer to a refused body; without this handler it would be a 500."""
    assert isinstance(error, BodyRefused)
    return _problem(error.status, str(error))


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
