"""Hostile clients hold connections and unfinished messages of a real coordinator; honest ones go on beside them."""

import asyncio
import contextlib
import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from echo2.trust import tls
from tests.patience import WAIT_S
from tests.redteam.cost import cpu_seconds, resident_bytes
from tests.redteam.hostile import ELSEWHERE, Stalled, Target, coordinator, idle_connections, still_open, tls_to

LOG_BYTES_MAX = 64 << 10
MEMORY_MAX = 64 << 20
REFUSED_MAX = 32 << 20  # two such messages; with what the process makes once
MESSAGE = 15 << 20


@pytest.mark.parametrize("port", ["enrol_port", "port", "dashboard_port"])
def test_more_idle_connections_than_descriptors_end_nothing_and_lock_nobody_out(target: Target, port: str) -> None:
    logged = len(target.log())
    with idle_connections(target.port(port), 1100, ELSEWHERE) as held:
        target.join()  # within the time that a newcomer waits, on the ports that everybody uses
        page = f"http://127.0.0.1:{target.port('dashboard_port')}/healthz"
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            assert answer.status == 200
        deadline = time.monotonic() + 20
        while still_open(held) > 64 and time.monotonic() < deadline:
            time.sleep(0.1)  # a real process has no virtual clock
        assert still_open(held) <= 64, "an address keeps its share, not the port"
        descriptors = [*Path(f"/proc/{target.pid}/fd").iterdir()]
        assert len(descriptors) < 600, "some are left for the database and the journal"
        target.join()
    assert target.is_alive()
    assert len(target.log()) - logged < LOG_BYTES_MAX


def stall(
    target: Target, port: str, path: str, credentials: tls.Credentials | None, connections: int, patience_s: float
) -> int:
    """Memory that the coordinator keeps for unfinished messages, three streams a connection."""
    before, most = resident_bytes(target.pid), 0
    with contextlib.ExitStack() as open_ones:
        for _ in range(connections):
            with contextlib.suppress(OSError):
                connection = open_ones.enter_context(tls_to(target.port(port), credentials, ELSEWHERE))
                attack = Stalled(connection)
                for _ in range(3):
                    attack.push(attack.begin(path), MESSAGE - 1, MESSAGE, patience_s)
            most = max(most, resident_bytes(target.pid) - before)
        time.sleep(1.0)  # two looks of the doors
        kept = resident_bytes(target.pid) - before
    print(f"{connections} connections with 3 stalled streams: at most {most >> 20} MiB, kept {kept >> 20} MiB")
    return max(most, kept)


def test_stalled_messages_of_a_stranger_pin_no_memory(target: Target) -> None:
    assert stall(target, "enrol_port", "/echo2.v1.Enrolment/Enrol", None, 8, 0.2) < MEMORY_MAX // 2
    target.join()


def test_stalled_messages_of_a_member_pin_what_a_peer_may_hold(target: Target) -> None:
    member = target.join()
    assert stall(target, "port", "/echo2.v1.Coordinator/WorkerSession", member, 8, 1.0) < MEMORY_MAX + (48 << 20)
    target.join()


def test_a_message_of_empty_submessages_is_refused_before_anything_is_made_of_it(target: Target) -> None:
    member, before, cpu = target.join(), resident_bytes(target.pid), cpu_seconds(target.pid)
    hello = b"\x5a\x00" * (7 << 20)  # held_leases, each of two bytes
    message = b"\x0a\x80\x80\x80\x07" + hello  # its length, 14 MiB, as protobuf writes it

    async def scene() -> None:
        async with tls.open_channel(member.coordinator_address, member.coordinator_peer_id, member) as channel:
            for _ in range(4):
                call = channel.stream_stream("/echo2.v1.Coordinator/WorkerSession")()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(message)
                    await call.done_writing()
                    assert b"MalformedMessage" in await call.read()

    asyncio.run(scene())
    deadline = time.monotonic() + 3
    while (kept := resident_bytes(target.pid) - before) > REFUSED_MAX and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"four messages of seven million submessages each: kept {kept >> 20} MiB")
    assert kept < REFUSED_MAX, f"{kept >> 20} MiB"
    assert cpu_seconds(target.pid) - cpu < 3.0
    assert target.is_alive()


# ---- A hostile client meets the page of a real coordinator


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
