"""The bridge between asyncio and trio: calls are bounded and cancelled together. What passes a hole: test_transport."""

from __future__ import annotations

import asyncio

import pytest
import trio

from echo2.base.errors import EchoError, LimitExceeded, Unreachable
from echo2.broadcast.nat.libp2p import CALLS_MAX, TrioThread


def test_a_call_runs_in_trio_and_ends_with_its_value_its_error_its_caller_or_the_thread() -> None:
    async def main() -> None:
        thread = TrioThread("test-trio")
        await thread.start()
        seen, ended = asyncio.Event(), asyncio.Event()

        async def value() -> str:
            await trio.lowlevel.checkpoint()
            return trio.lowlevel.current_task().name

        async def error() -> None:
            raise EchoError("of trio")

        async def endless() -> None:
            thread.to_asyncio(seen.set)
            try:
                await trio.sleep_forever()
            finally:
                thread.to_asyncio(ended.set)

        assert "_perform" in await thread.call(value)
        with pytest.raises(EchoError, match="of trio"):
            await thread.call(error)
        task = asyncio.create_task(thread.call(endless))
        await seen.wait()
        task.cancel()
        await asyncio.wait_for(ended.wait(), 5)
        others = [asyncio.create_task(thread.call(trio.sleep_forever)) for _ in range(CALLS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded, match=str(CALLS_MAX)):
            await thread.call(value)
        await thread.stop()
        for other in others:
            with pytest.raises(Unreachable):
                await other
        with pytest.raises(Unreachable):
            await thread.call(value)

    asyncio.run(asyncio.wait_for(main(), 30))
