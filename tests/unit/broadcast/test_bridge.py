"""libp2p is started until it runs, has a bound of calls, and leaves nothing behind. What passes a hole: test_transport."""

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


class FakeHost:
    """Of libp2p. `act`: how its start goes; it "fails", "hangs" before it listens, "listens", or does until a relay is to be kept
    and then "ends"."""

    port = 7

    def __init__(self, act: str, relays: list[tuple[str, str]]) -> None:
        self.act, self.relays, self.is_to_end = act, relays, trio.Event()

    async def run(self, started: Callable[[], object]) -> None:
        if self.act == "fails":
            raise OSError("no descriptors are left")
        if self.act != "hangs":
            started()
        if self.act == "ends":
            await self.is_to_end.wait()
            raise OSError("a listener is gone")
        await trio.sleep_forever()

    async def keep_relays(self, wanted: dict[PeerId, str]) -> None:
        self.relays.extend(wanted.items())
        self.is_to_end.set()

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("acts", "relay_count", "warned"),
    [
        (["hangs"], 0, []),
        (["fails", "listens"], 1, ["libp2p did not start: no descriptors are left"]),
        (["ends", "listens"], 2, ["libp2p: OSError: a listener is gone", "libp2p has ended"]),
    ],
)
async def test_libp2p_is_started_until_it_runs_and_again_with_its_relays_and_a_node_that_closes_leaves_none_of_it(
    acts: list[str],
    relay_count: int,
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    relays, left = list[tuple[str, str]](), list(acts)
    monkeypatch.setattr(libp2p, "P2pHost", lambda *_: FakeHost(left.pop(0), relays))
    monkeypatch.setattr(reach, "START_PAUSE_S", 0.0)
    credentials: Any = None
    nat = Nat(credentials)
    with caplog.at_level(logging.WARNING, "echo2.broadcast"):
        nat.use_relay(PeerId("relay"), "relay.example:1")
        await until(lambda: not left and len(relays) == relay_count)
        await nat.close()
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "libp2p"])
    assert relays == relay_count * [("relay", "relay.example:1")]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == warned


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
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
