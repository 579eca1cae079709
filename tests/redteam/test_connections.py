"""Hostile clients hold connections and unfinished messages of a real coordinator; honest ones go on beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request

import grpc
import pytest

from echo2.trust import tls
from tests.patience import WAIT_S
from tests.redteam.hostile import Stalled, idle_connections, still_open, tls_to, varint
from tests.redteam.target import ELSEWHERE, Target

LOG_BYTES_MAX = 64 << 10
MEMORY_MAX = 64 << 20
REFUSED_MAX = 32 << 20  # two such messages; with what the process makes once
MESSAGE = 15 << 20


def page_answers(target: Target) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{target.port('dashboard_port')}/healthz", timeout=WAIT_S) as answer:
        return bool(answer.status == 200)


@pytest.mark.parametrize("port", ["enrol_port", "port", "dashboard_port"])
def test_more_idle_connections_than_descriptors_end_nothing_and_lock_nobody_out(target: Target, port: str) -> None:
    logged = len(target.log())
    with idle_connections(target.port(port), 1100, ELSEWHERE) as held:
        target.join()  # within the time that a newcomer waits, on the ports that everybody uses
        assert page_answers(target)
        deadline = time.monotonic() + 20
        while still_open(held) > 64 and time.monotonic() < deadline:
            time.sleep(0.1)  # a real process has no virtual clock
        assert still_open(held) <= 64, "an address keeps its share, not the port"
        assert target.descriptors() < 600, "descriptors are left for the database and the journal"
        target.join()
    assert target.is_alive()
    assert len(target.log()) - logged < LOG_BYTES_MAX


def stall(
    target: Target, port: str, path: str, credentials: tls.Credentials | None, connections: int, patience_s: float
) -> int:
    """Memory that the coordinator keeps for unfinished messages, three streams a connection."""
    before, most = target.resident_bytes(), 0
    with contextlib.ExitStack() as open_ones:
        for _ in range(connections):
            with contextlib.suppress(OSError):
                connection = open_ones.enter_context(tls_to(target.port(port), credentials, ELSEWHERE))
                attack = Stalled(connection)
                for _ in range(3):
                    attack.push(attack.begin(path), MESSAGE - 1, MESSAGE, patience_s)
            most = max(most, target.resident_bytes() - before)
        time.sleep(1.0)  # two looks of the doors
        kept = target.resident_bytes() - before
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
    member, before, cpu = target.join(), target.resident_bytes(), target.cpu_seconds()
    hello = b"\x5a\x00" * (7 << 20)  # held_leases, each of two bytes
    message = b"\x0a" + varint(len(hello)) + hello

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
    while (kept := target.resident_bytes() - before) > REFUSED_MAX and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"four messages of seven million submessages each: kept {kept >> 20} MiB")
    assert kept < REFUSED_MAX, f"{kept >> 20} MiB"
    assert target.cpu_seconds() - cpu < 3.0
    assert target.is_alive()
