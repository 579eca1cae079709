"""Of a peer's addresses the first that answers is taken, and a dead one costs a quarter of a second."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from echo2.base.errors import Unreachable
from echo2.broadcast.connection import Connection
from echo2.broadcast.connections import _beside
from echo2.broadcast.transport import NEXT_ADDRESS_S, first_of, hosts_of


class Line:
    """A connection that notes that it was closed."""

    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False

    async def close(self) -> None:
        self.is_closed = True


class Phone:
    """`answers`: by address after how many seconds it answers; negative: it is refused after so many."""

    def __init__(self, answers: dict[str, float]) -> None:
        self.answers, self.begun = answers, list[str]()
        self.lines: list[Line] = []

    async def dial(self, address: str) -> Connection:
        self.begun.append(address)
        after_s = self.answers[address]
        try:
            await asyncio.sleep(abs(after_s))
        except asyncio.CancelledError:
            if address.startswith("late"):  # it was through as it was cancelled
                return self._line(address)
            raise
        if after_s < 0:
            raise Unreachable(f"{address}: refused")
        return self._line(address)

    def _line(self, address: str) -> Connection:
        self.lines.append(Line(address))
        return cast(Connection, self.lines[-1])


def played(answers: dict[str, float]) -> tuple[str, Phone, float]:
    phone = Phone(answers)
    begun = time.monotonic()

    async def scene() -> tuple[str, float]:
        _, address = await first_of(list(answers), phone.dial)
        took_s = time.monotonic() - begun
        await asyncio.sleep(0.05)  # what was given up ends by itself
        return address, took_s

    address, took_s = asyncio.run(scene())
    return address, phone, took_s


def test_the_first_is_taken_and_no_other_begun_where_it_answers_soon() -> None:
    address, phone, _ = played({"a": 0.0, "b": 0.0})
    assert (address, phone.begun) == ("a", ["a"])


def test_one_that_is_silent_costs_a_quarter_of_a_second() -> None:
    address, phone, took_s = played({"silent": 60.0, "b": 0.0})
    assert address == "b" and NEXT_ADDRESS_S <= took_s < 10 and [line.address for line in phone.lines] == ["b"]


def test_one_that_is_refused_costs_no_wait() -> None:
    address, phone, took_s = played({"refused": -0.001, "b": 0.0})
    assert address == "b" and phone.begun == ["refused", "b"] and took_s < NEXT_ADDRESS_S


def test_one_that_came_too_late_is_closed() -> None:
    address, phone, _ = played({"late": 60.0, "b": 0.01})
    assert address == "b" and {line.address: line.is_closed for line in phone.lines} == {"late": True, "b": False}


def test_where_none_answers_the_error_says_why() -> None:
    with pytest.raises(Unreachable, match="b: refused"):
        played({"a": -0.01, "b": -0.02})


def test_addresses_of_both_families_are_tried_beside_one_another_and_circuits_alone() -> None:
    known = ("10.0.0.1:7", "[2001:db8::1]:7", "10.0.0.2:7", "/p2p/R/p2p-circuit")
    assert _beside("10.0.0.1:7", known) == ["10.0.0.1:7", "[2001:db8::1]:7"]
    assert _beside("[2001:db8::1]:7", known) == ["[2001:db8::1]:7", "10.0.0.1:7"]
    assert _beside("/p2p/R/p2p-circuit", known) == ["/p2p/R/p2p-circuit"]
    assert _beside("h:7", ("h:7",)) == ["h:7"]


def test_a_name_stands_for_its_addresses_of_both_families_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(self: object, host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("peer.example", 7)
        places = [
            ("10.0.0.1", 7),
            ("10.0.0.2", 7),
            ("10.0.0.1", 7),
            ("fe80::1%eth0", 7, 0, 2),
            ("2001:db8::1", 7, 0, 0),
        ]
        return [(0, 0, 0, "", place) for place in places]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
    assert asyncio.run(hosts_of("peer.example", 7)) == ["fe80::1%eth0", "10.0.0.1", "2001:db8::1", "10.0.0.2"]
