"""The bridge between asyncio and trio: bounded, cancelled together, closed together."""

from __future__ import annotations

import asyncio

import pytest
import trio

from echo2.base.errors import EchoError, LimitExceeded, Unreachable
from echo2.broadcast.nat.libp2p import CALLS_MAX, TrioThread


async def _started() -> TrioThread:
    thread = TrioThread("test-trio")
    await thread.start()
    return thread


def test_a_call_runs_in_trio_and_brings_back_its_value_or_its_error() -> None:
    async def main() -> None:
        thread = await _started()

        async def value() -> str:
            await trio.lowlevel.checkpoint()
            return trio.lowlevel.current_task().name

        async def error() -> None:
            raise EchoError("of trio")

        assert "_perform" in await thread.call(value)
        with pytest.raises(EchoError, match="of trio"):
            await thread.call(error)
        await thread.stop()
        with pytest.raises(Unreachable):
            await thread.call(value)

    asyncio.run(main())


def test_cancelling_the_awaiting_task_cancels_the_call_and_stop_ends_the_rest() -> None:
    async def main() -> None:
        thread = await _started()
        seen = asyncio.Event()
        ended = asyncio.Event()

        async def endless() -> None:
            thread.to_asyncio(seen.set)
            try:
                await trio.sleep_forever()
            finally:
                thread.to_asyncio(ended.set)

        task = asyncio.create_task(thread.call(endless))
        await seen.wait()
        task.cancel()
        await asyncio.wait_for(ended.wait(), 5)
        other = asyncio.create_task(thread.call(endless))
        await asyncio.sleep(0)
        await thread.stop()
        with pytest.raises(Unreachable):
            await other

    asyncio.run(main())


def test_calls_under_way_are_bounded() -> None:
    async def main() -> None:
        thread = await _started()
        tasks = [asyncio.create_task(thread.call(trio.sleep_forever)) for _ in range(CALLS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded, match=str(CALLS_MAX)):
            await thread.call(trio.lowlevel.checkpoint)
        await thread.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("direction", ["to trio", "from trio"])
def test_a_pipe_keeps_order_and_holds_no_more_than_its_limit_and_a_frame(direction: str) -> None:
    frames = [bytes([number % 251]) * (number % 37 + 1) for number in range(2000)]

    async def main() -> None:
        thread = await _started()
        pipe = thread.pipe(100)
        most = 0

        async def write_in_trio() -> None:
            for frame in frames:
                await pipe.put_from_trio(frame)
            pipe.close()

        async def read_in_trio() -> list[bytes]:
            got = []
            while (frame := await pipe.take_in_trio()) is not None:
                got.append(frame)
            return got

        if direction == "to trio":
            reader = asyncio.create_task(thread.call(read_in_trio))
            for frame in frames:
                await pipe.put_from_asyncio(frame)
                most = max(most, pipe.held_bytes)
            pipe.close()
            got = await reader
        else:
            writer = asyncio.create_task(thread.call(write_in_trio))
            got = []
            while (frame := await pipe.take_in_asyncio()) is not None:
                got.append(frame)
                most = max(most, pipe.held_bytes)
            await writer
        assert got == frames
        assert most <= 100 + 37
        await thread.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_writer_that_waits_for_room_learns_that_the_pipe_was_closed() -> None:
    async def main() -> None:
        thread = await _started()
        pipe = thread.pipe(1)
        await pipe.put_from_asyncio(b"x")
        waiting = asyncio.create_task(pipe.put_from_asyncio(b"y"))
        await asyncio.sleep(0)
        assert not waiting.done()
        pipe.close()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(waiting, 5)
        assert await pipe.take_in_asyncio() == b"x"
        assert await pipe.take_in_asyncio() is None
        await thread.stop()

    asyncio.run(main())
