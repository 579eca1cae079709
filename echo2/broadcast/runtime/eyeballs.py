"""Connects to the first address of a peer that answers (Happy Eyeballs, RFC 8305), trying the next while earlier ones are pending.

Guarantees: returns one connection and closes any other; addresses are tried in the given order, NEXT_ADDRESS_S apart or as
soon as the previous one has failed. Raises the last error if all fail. Leaves to others: which addresses, and dialling one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from echo2.base.errors import EchoError
from echo2.broadcast.runtime.transport import Connection

NEXT_ADDRESS_S = 0.25
_C = TypeVar("_C", bound=Connection)


async def hosts_of(name: str, port: int) -> list[str]:
    """Resolves a name to numeric hosts, IPv6 and IPv4 alternating. OSError if it cannot be resolved."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(name.strip("[]"), port, type=socket.SOCK_STREAM)
    hosts = list(dict.fromkeys(str(place[0]) for *_, place in infos))
    six = [host for host in hosts if ipaddress.ip_address(host.partition("%")[0]).version == 6]
    pairs = itertools.zip_longest(six, [host for host in hosts if host not in six])
    return [host for pair in pairs for host in pair if host is not None]


async def first_of(addresses: Sequence[str], dial: Callable[[str], Awaitable[_C]]) -> tuple[_C, str]:
    """Returns the connection and the address that answered. `addresses` must not be empty."""
    trying: dict[asyncio.Future[_C], str] = {}
    left, error = list(addresses), None
    try:
        while left or trying:
            if left:
                address = left.pop(0)
                trying[asyncio.ensure_future(dial(address))] = address
            pause_s = NEXT_ADDRESS_S if left else None
            done, _ = await asyncio.wait(trying, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in sorted(done, key=list(trying).index):
                address = trying.pop(attempt)
                if not isinstance(attempt.exception(), EchoError):
                    return attempt.result(), address
                error = attempt.exception()
    finally:
        _give_up(trying)
    assert error is not None, "no address was given"
    raise error


def _give_up(trying: Iterable[asyncio.Future[_C]]) -> None:
    """Cancels pending dials without waiting, because the caller may itself be cancelled."""
    for attempt in trying:
        if attempt.done():
            _close_late(attempt)
        else:
            attempt.add_done_callback(_close_late)
            attempt.cancel()


def _close_late(attempt: asyncio.Future[Any]) -> None:
    """Closes a connection that was established just as it was cancelled."""
    if not attempt.cancelled() and attempt.exception() is None:
        closing = asyncio.ensure_future(attempt.result().close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[None]] = set()
"""Keeps references, because the event loop holds tasks only weakly."""
