import asyncio

import pytest

from echo2.gateway import operations
from echo2.gateway.episodes import CallRefused
from echo2.gateway.operations import InOrder, Operations


async def test_operations_run_in_the_order_of_their_numbers_one_at_a_time_and_a_failed_one_ends_its_turn() -> None:
    ran: list[str] = []
    order, asked = InOrder(), Operations()

    async def work(number: int) -> int:
        async with order.turn(number):
            ran.append(f"{number} begins")
            await asyncio.sleep(0)
            ran.append(f"{number} ends")
            if number == 2:
                raise CallRefused(400, "bad", "the second is wrong")
            return number

    for number in (3, 2, 4, 1):
        asked.begin(f"c:{number}", lambda number=number: work(number))
        await asyncio.sleep(0)
    asked.begin("c:1", lambda: work(1))  # its answer was lost: it runs once
    results = [await asked.result(f"c:{number}", 10.0) for number in (1, 3, 4)]
    assert results == [1, 3, 4]
    with pytest.raises(CallRefused, match="the second is wrong"):
        await asked.result("c:2", 10.0)
    for number in (4, 5 + operations.AHEAD_MAX):
        with pytest.raises(CallRefused, match="seq_id: expected 5, the next"):
            order.check(number)
    assert ran == [f"{number} {what}" for number in (1, 2, 3, 4) for what in ("begins", "ends")]


async def test_an_operation_may_take_longer_than_a_missing_number_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "MISSING_S", 0.01)
    order, ran = InOrder(), list[str]()

    async def work(number: int) -> None:
        async with order.turn(number):
            ran.append(f"{number} begins")
            await asyncio.sleep(0.1)
            ran.append(f"{number} ends")

    await asyncio.gather(work(1), work(2))
    assert order.missing == 0
    await asyncio.gather(work(4), work(5))
    assert order.missing == 3
    assert ran == [f"{number} {what}" for number in (1, 2, 4, 5) for what in ("begins", "ends")]


async def test_a_result_is_kept_for_a_second_poll_until_newer_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "RESULTS_MAX", 4)
    monkeypatch.setattr(operations, "READ_MAX", 2)
    asked, going_on = Operations[str](), asyncio.Event()

    async def waits() -> str:
        await going_on.wait()
        return "done"

    async def gone(name: str) -> None:
        with pytest.raises(CallRefused, match=f"got '{name}'"):
            await asked.result(name, 10.0)

    asked.begin("slow", waits)
    assert await asked.result("slow", 0.0) is None
    for name in "abc":
        asked.begin(name, lambda name=name: asyncio.sleep(0, name))  # type: ignore[misc]
    assert [await asked.result(name, 10.0) for name in "aaba"] == list("aaba"), "two that were read are kept"
    assert await asked.result("c", 10.0) == "c"
    await gone("a")
    asked.begin("d", waits)
    asked.begin("e", waits)
    await gone("b")  # the oldest that has ended made room
    asked.begin("f", waits)
    with pytest.raises(CallRefused, match="at most 4 operations under way"):
        asked.begin("g", waits)
    asked.cancel("d")
    await gone("d")
    going_on.set()
    assert await asked.result("slow", 10.0) == "done"
    await asked.close()
