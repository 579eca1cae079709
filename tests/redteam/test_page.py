"""A hostile client meets the page of a real coordinator."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.patience import WAIT_S
from tests.redteam.hostile import idle_connections
from tests.redteam.target import ELSEWHERE, Target, coordinator


def asked(target: Target, path: str, body: dict[str, Any] | None = None, csrf: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{target.port('dashboard_port')}{path}"
    request = urllib.request.Request(url, data, {"x-echo2-csrf": csrf})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.loads(answer.read())


def test_the_state_that_every_page_hears_holds_no_join_link(target: Target) -> None:
    csrf = asked(target, "/api/session")["csrf"]
    offers = asked(target, "/api/state")["machines"]["offers"]
    manual = next(offer["name"] for offer in offers if offer["provider"] == "manual")
    rented = asked(target, "/api/machines", {"offer": manual}, csrf)
    assert "echo2://" in rented["command"]
    assert "echo2://" not in json.dumps(asked(target, "/api/state"))
    told = asked(target, "/api/machines/command", {"machine_id": rented["machine_id"]}, csrf)
    assert told["command"] == rented["command"]


def test_off_loopback_the_log_does_not_hold_the_access_token(tmp_path: Path) -> None:
    with coordinator(tmp_path, 'dashboard_host = "0.0.0.0"\n') as target:
        token = (target.links / "dashboard.token").read_text().strip()
        assert token not in target.log()
        assert "dashboard.token" in target.log()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="filters of sockets are Linux's")
def test_a_host_whose_connections_ask_nothing_is_shut_out_for_a_while_and_others_are_not(target: Target) -> None:
    port = target.port("dashboard_port")

    def is_shut_out() -> bool:
        socket.create_connection(("127.0.0.1", port), WAIT_S).close()  # the queue is not full
        try:
            socket.create_connection(("127.0.0.1", port), 0.5, (ELSEWHERE, 0)).close()
        except TimeoutError:
            return True
        return False

    for _ in range(10):  # so few that it is not shut out for its pace
        with idle_connections(port, 8, ELSEWHERE):
            pass
        if is_shut_out():
            break
        time.sleep(0.1)
    else:
        pytest.fail("it is not shut out")
    assert asked(target, "/api/session")["csrf"]
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0, (ELSEWHERE, 0)):
            return
    pytest.fail("it stays shut out")
