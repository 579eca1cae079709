"""Waits for sockets: until one is readable or writable, and for new connections without losing one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


async def readable(one: socket.socket) -> None:
    """Waits until data or the end of the stream has arrived."""
    loop = asyncio.get_running_loop()
    await until_ready(loop.add_reader, loop.remove_reader, one.fileno())


async def until_ready(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object], descriptor: int
) -> None:
    """Waits until a descriptor is ready. `add` and `remove`: the loop's methods for readers or writers."""
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


async def accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection and the host it comes from. OSError if it was closed already, or no descriptor is free.

    `loop.sock_accept` delivers its connection through a future: if the task is cancelled in the iteration in which one arrives,
    nothing closes it. Here, no await lies between accepting a connection and returning it.
    """
    while True:
        await readable(listener)
        try:
            taken, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            continue
        taken.setblocking(False)
        return taken, str(address[0])
