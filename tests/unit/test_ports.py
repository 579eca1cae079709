from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.ports import CHOSEN_PORTS, choose_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_that_people_know_is_taken_and_a_busy_one_is_not() -> None:
    (known,) = choose_ports((0,))
    assert choose_ports((known,)) == (known,)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", known))
        busy.listen()
        (other,) = choose_ports((known,))
        assert other != known


def test_chosen_ports_differ_and_are_none_that_an_outgoing_connection_may_get() -> None:
    chosen = choose_ports((0,) * 200)
    assert len(set(chosen)) == 200 and all(port in CHOSEN_PORTS for port in chosen)
    lowest = int(OUTGOING.read_text().split()[0])
    if lowest < CHOSEN_PORTS.stop:
        pytest.skip(f"this system gives outgoing connections ports from {lowest}, not from 32768, its usual")


def test_a_port_preferred_twice_is_given_once() -> None:
    (known,) = choose_ports((0,))
    first, second = choose_ports((known, known))
    assert first == known != second
