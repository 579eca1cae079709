"""libp2p is started until it runs, has a bound of calls, and leaves nothing behind. What passes a hole: test_transport."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.nat import libp2p, reach
from echo2.broadcast.nat.libp2p import CALLS_MAX, TrioThread
from echo2.broadcast.nat.reach import Nat
from tests.patience import WAIT_S


@pytest.mark.parametrize("is_closed_amid", [False, True])
def test_libp2p_is_started_until_it_runs_and_a_node_that_closes_leaves_none_of_it(
    is_closed_amid: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, relays = list[int](), list[tuple[str, str]]()

    class Host:
        """Fails once, then listens; where the node is closed amid its start, it never comes to listen."""

        port = 7

        def __init__(self, *_: Any) -> None:
            self.number = len(tries)
            tries.append(self.number)

        async def run(self, started: Callable[[], object]) -> None:
            if not is_closed_amid and self.number == 0:
                raise OSError("no descriptors are left")
            if not is_closed_amid:
                started()
            await trio.sleep_forever()

        async def keep_relays(self, wanted: dict[PeerId, str]) -> None:
            relays.extend(wanted.items())

        async def close(self) -> None: ...

    async def until(holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.01)

    async def main() -> None:
        credentials: Any = None
        nat = Nat(credentials)
        nat.use_relay(PeerId("relay"), "relay.example:1")
        await until(lambda: tries if is_closed_amid else relays)
        await nat.close()
        await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "libp2p"])

    monkeypatch.setattr(libp2p, "P2pHost", Host)
    monkeypatch.setattr(reach, "START_PAUSE_S", 0.0)
    with caplog.at_level(logging.WARNING, "echo2.broadcast"):
        asyncio.run(main())
    warnings = [record.getMessage() for record in caplog.records]
    if is_closed_amid:
        assert tries == [0] and not warnings
    else:
        assert tries == [0, 1] and relays == [("relay", "relay.example:1")]
        assert [text.partition(";")[0] for text in warnings] == ["libp2p did not start: no descriptors are left"]


async def test_libp2p_that_ends_is_started_again_with_its_relays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relays = list[tuple[str, str]]()

    class Host:
        """Ends once a relay is to be kept, the first time."""

        port = 7

        def __init__(self, *_: Any) -> None:
            self.is_to_end = trio.Event()

        async def run(self, started: Callable[[], object]) -> None:
            started()
            await self.is_to_end.wait()
            raise OSError("a listener is gone")

        async def keep_relays(self, wanted: dict[PeerId, str]) -> None:
            if not relays:
                self.is_to_end.set()
            relays.extend(wanted.items())

        async def close(self) -> None: ...

    monkeypatch.setattr(libp2p, "P2pHost", Host)
    monkeypatch.setattr(reach, "START_PAUSE_S", 0.0)
    credentials: Any = None
    nat = Nat(credentials)
    with caplog.at_level(logging.WARNING, "echo2.broadcast"):
        nat.use_relay(PeerId("relay"), "relay.example:1")
        async with asyncio.timeout(WAIT_S):
            while len(relays) < 2:
                await asyncio.sleep(0.01)
        await nat.close()
    assert relays == 2 * [("relay", "relay.example:1")]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "libp2p: OSError: a listener is gone", "libp2p has ended",
    ]  # fmt: skip
    async with asyncio.timeout(WAIT_S):  # the first thread ends by itself
        while any(thread.name == "libp2p" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_calls_that_wait_for_the_thread_have_a_bound_and_one_that_is_given_up_makes_room() -> None:
    async def answer() -> int:
        return 7

    thread = TrioThread("libp2p")
    await thread.start()
    waiting = [asyncio.create_task(thread.call(trio.sleep_forever)) for _ in range(CALLS_MAX)]
    await asyncio.sleep(0)  # each has begun
    with pytest.raises(LimitExceeded, match=f"at most {CALLS_MAX} calls under way"):
        await thread.call(answer)
    waiting.pop().cancel()
    await asyncio.sleep(0)
    assert await thread.call(answer) == 7
    await thread.stop()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(end) for end in ends} == {Unreachable}, "none waits for a thread that has ended"


async def test_a_call_that_is_given_up_ends_on_the_other_side_too() -> None:
    begun, ended, thread = asyncio.Event(), asyncio.Event(), TrioThread("libp2p")

    async def work() -> None:
        thread.to_asyncio(begun.set)
        try:
            await trio.sleep_forever()
        finally:
            thread.to_asyncio(ended.set)

    await thread.start()
    calling = asyncio.create_task(thread.call(work))
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
        calling.cancel()
        await ended.wait()
    await thread.stop()
