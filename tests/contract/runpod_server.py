"""A small RunPod REST API over real HTTP: pods are made, listed and deleted as its version 1 documents it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "rpa_key-of-the-test"


class Account:
    """Its pods by id; use as a context manager, `url` is where it listens. `asked`: bodies of pods that were made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pods: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.cost = "0.34"
        self.is_full = False
        self.answers_lost = 0
        self.redirect = ""

    def __enter__(self) -> Account:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def made(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        pod = {
            "id": f"pod{len(self.asked):04d}", "name": body["name"], "desiredStatus": "RUNNING", "costPerHr": self.cost,
            "adjustedCostPerHr": float(self.cost), "interruptible": body["interruptible"], "image": body["imageName"],
            "env": body["env"], "lastStartedAt": "2026-07-12T19:14:40.144Z", "lastStatusChange": "Rented by User",
        }  # fmt: skip
        self.pods[str(pod["id"])] = pod
        return pod


def _handler(account: Account) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            return None

        def _say(self, status: int, value: object = None, **headers: str) -> None:
            data = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def _is_let_in(self) -> bool:
            if account.redirect:
                self._say(307, None, location=account.redirect)
                return False
            if self.headers.get("authorization") != f"Bearer {KEY}":
                self._say(401, {"error": "Unauthorized"})
                return False
            return True

        def do_GET(self) -> None:
            with account.lock:
                if self._is_let_in():
                    self._say(200, list(account.pods.values()))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with account.lock:
                if not self._is_let_in():
                    return
                if account.is_full:
                    self._say(
                        500, {"error": "There are no longer any instances available with the requested specifications"}
                    )
                    return
                pod = account.made(body)
                if account.answers_lost:
                    account.answers_lost -= 1
                    self.connection.close()
                    return
                self._say(201, pod)

        def do_DELETE(self) -> None:
            with account.lock:
                if self._is_let_in():
                    is_there = account.pods.pop(self.path.rpartition("/")[2], None) is not None
                    self._say(204 if is_there else 404)

    return Handler
