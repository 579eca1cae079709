"""Bytes from one socket to another, both ways, without this process reading them: the kernel moves them where it can.

Guarantees: what one side sent before it ended still reaches the other; once one direction has ended, the other has ENDING_S to end
too; at most PIPE_BYTES wait for each direction, so that a side that does not read holds up the other in its own machine; both
sockets are closed at the end. Where the system has no `splice` (Linux has), bytes are copied. Leaves to others: who may, how much
(`moved` may raise LimitExceeded, which ends it) and for how long (the caller cancels it).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator

from echo2.outside.ready import until_ready

PIPE_BYTES = 1 << 20
ENDING_S = 3.0
"""TLS ends both directions at once: what it still says after one has ended is a few bytes."""
_COPY_BYTES = 256 << 10
_F_SETPIPE_SZ = 1031  # of fcntl.h; Linux alone
_splice = getattr(os, "splice", None)
_FLAGS = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)
Moved = Callable[[int], None]


async def carry(first: socket.socket, second: socket.socket, moved: Moved) -> None:
    """Returns once both directions have ended, ENDING_S after the first has, or when one fails. `moved` is told of each piece, in
    bytes. Raises what `moved` raises."""
    one_way = _spliced if _splice is not None else _copied
    ways = [asyncio.ensure_future(one_way(a, b, moved)) for a, b in ((first, second), (second, first))]
    try:
        ended, going = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if going and not any(way.exception() for way in ended):
            ended |= (await asyncio.wait(going, timeout=ENDING_S))[0]
        for way in ended:
            with contextlib.suppress(OSError):  # one side was cut off, which is how connections end
                way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        first.close()
        second.close()


async def _copied(source: socket.socket, target: socket.socket, moved: Moved) -> None:
    loop = asyncio.get_running_loop()
    while piece := await loop.sock_recv(source, _COPY_BYTES):
        moved(len(piece))
        await loop.sock_sendall(target, piece)
    _end(target)


async def _spliced(source: socket.socket, target: socket.socket, moved: Moved) -> None:
    assert _splice is not None
    loop, taking, giving = asyncio.get_running_loop(), source.fileno(), target.fileno()
    with _kernel_pipe() as (outlet, inlet):
        while True:
            try:
                waiting = _splice(taking, inlet, PIPE_BYTES, flags=_FLAGS)
            except BlockingIOError:
                await until_ready(loop.add_reader, loop.remove_reader, taking)
                continue
            if not waiting:
                break
            moved(waiting)
            while waiting:
                try:
                    waiting -= _splice(outlet, giving, waiting, flags=_FLAGS)
                except BlockingIOError:
                    await until_ready(loop.add_writer, loop.remove_writer, giving)
            await asyncio.sleep(0)  # a fast pair leaves the loop to others between two pieces
    _end(target)


def _end(target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended as well
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _kernel_pipe() -> Iterator[tuple[int, int]]:
    outlet, inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a user has so much of this memory; the usual 64 KiB do, at more calls
            fcntl.fcntl(inlet, _F_SETPIPE_SZ, PIPE_BYTES)
        yield outlet, inlet
    finally:
        os.close(outlet)
        os.close(inlet)
