"""Waiting for sockets: until one may be read or written, and for connections as they come, of which none is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


async def readable(one: socket.socket) -> None:
    """Something has come, or its end."""
    loop = asyncio.get_running_loop()
    await until_ready(loop.add_reader, loop.remove_reader, one.fileno())


async def until_ready(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object], descriptor: int
) -> None:
    """`add` and `remove`: the loop's, for readers or writers."""
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


async def accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection and the host it comes from. OSError where it was gone already, or no descriptor is free.

    `loop.sock_accept` hands its connection over by a future: where the task is cancelled in the very turn in which one came,
    nobody closes it. Here nothing is waited for between taking a connection and returning it.
    """
    while True:
        await readable(listener)
        try:
            taken, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            continue
        taken.setblocking(False)
        return taken, str(address[0])
