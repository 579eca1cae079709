"""Connections that come to a listening socket are closed by somebody, whenever the accepting is ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings

from echo2.outside.ready import accepted


@contextlib.contextmanager
def listening():  # type: ignore[no-untyped-def]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        listener.setblocking(False)
        yield listener


def test_each_connection_is_handed_over_with_the_host_it_comes_from() -> None:
    async def scene() -> None:
        with listening() as listener:
            for _ in range(3):
                with socket.create_connection(listener.getsockname()) as caller:
                    taken, host = await accepted(listener)
                    with taken:
                        assert host == "127.0.0.1" and taken.getpeername() == caller.getsockname()
                        assert not taken.getblocking()

    asyncio.run(scene())


def test_one_that_comes_in_the_turn_in_which_the_accepting_ends_is_left_to_the_listener() -> None:
    async def scene() -> None:
        for turns in range(5):
            with listening() as listener:
                accepting = asyncio.create_task(accepted(listener))
                await asyncio.sleep(0)
                with socket.create_connection(listener.getsockname()):
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    accepting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        taken, _ = await accepting
                        taken.close()
                    del accepting
        gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(scene())
