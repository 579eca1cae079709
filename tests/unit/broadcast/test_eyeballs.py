"""Of a peer's addresses the first that answers is taken, and a dead one costs a quarter of a second."""

import asyncio
import time
from typing import cast

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import RunId
from echo2.broadcast.connection import Connection
from echo2.broadcast.transport import NEXT_ADDRESS_S, Transport, first_of, hosts_of
from echo2.trust.identity import Identity, Role, RunAuthority
from tests.certificates import issued

pytestmark = pytest.mark.usefixtures("virtual_time")


class Line:
    """A connection that notes that it was closed."""

    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False

    async def close(self) -> None:
        self.is_closed = True


async def played(answers: dict[str, float]) -> tuple[str, dict[str, bool], float]:
    """By address after how many seconds it answers; negative: it is refused after so many. Whose line is taken, which lines were
    made and whether they are closed, and after how long."""
    lines = list[Line]()

    async def dial(address: str) -> Connection:
        try:
            await asyncio.sleep(abs(answers[address]))
        except asyncio.CancelledError:
            if not address.startswith("late"):  # else it was through as it was cancelled
                raise
        if answers[address] < 0:
            raise Unreachable(f"{address}: refused")
        lines.append(Line(address))
        return cast(Connection, lines[-1])

    _, address = await first_of(list(answers), dial)
    took_s = asyncio.get_running_loop().time()
    await asyncio.sleep(0.05)  # what was given up ends by itself
    return address, {line.address: line.is_closed for line in lines}, took_s


@pytest.mark.parametrize(
    ("answers", "taken", "after_s", "lines"),
    [
        ({"a": 0.0, "b": 0.0}, "a", 0.0, {"a": False}),
        ({"silent": 60.0, "b": 0.0}, "b", NEXT_ADDRESS_S, {"b": False}),
        ({"refused": -0.001, "b": 0.0}, "b", 0.001, {"b": False}),
        ({"late": 60.0, "b": 0.01}, "b", NEXT_ADDRESS_S + 0.01, {"late": True, "b": False}),
    ],
)
async def test_the_first_that_answers_is_taken_and_others_are_closed(
    answers: dict[str, float], taken: str, after_s: float, lines: dict[str, bool]
) -> None:
    address, made, took_s = await played(answers)
    assert (address, made) == (taken, lines) and took_s == pytest.approx(after_s, abs=1e-3)


async def test_where_none_answers_the_error_says_why() -> None:
    with pytest.raises(Unreachable, match="b: refused"):
        await played({"a": -0.01, "b": -0.02})


async def test_a_names_addresses_of_both_families_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.1", "fe80::1%eth0", "2001:db8::1")

    async def found(self: object, host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("peer.example", 7)
        return [(0, 0, 0, "", (one, 7)) for one in hosts]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
    assert await hosts_of("peer.example", 7) == ["fe80::1%eth0", "10.0.0.1", "2001:db8::1", "10.0.0.2"]


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0070001", "127.0.0.1:0", "127.0.0.1:\u00b2", "a..b:7000", f"[fd00::1%{'x' * 70}]:7000"]
)
async def test_where_there_can_be_nobody_nobody_answers(address: str) -> None:
    """Another error would end the node that dials, and with it whoever has such a peer in its plan."""
    credentials = issued(RunAuthority.create(Identity.generate(), RunId("run"), time.time()), Role.WORKER)
    with pytest.raises(Unreachable):
        await Transport(credentials).dial(address, credentials.peer_id)
