"""Of several addresses of one peer the first that answers, as RFC 8305 has it: the next is tried beside those that have not yet.

Guarantees: one connection comes out, any other is closed; addresses are begun in the order given, NEXT_ADDRESS_S apart or as
soon as one before has failed. Raises the error of the last that failed. Leaves to others: which addresses, and dialling one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from echo2.base.errors import EchoError
from echo2.broadcast.runtime.transport import Connection

NEXT_ADDRESS_S = 0.25


async def first_of(addresses: Sequence[str], dial: Callable[[str], Awaitable[Connection]]) -> tuple[Connection, str]:
    """The connection, and the address that answered. At least one address is given."""
    trying: dict[asyncio.Future[Connection], str] = {}
    left, error = list(addresses), None
    try:
        while left or trying:
            if left:
                address = left.pop(0)
                trying[asyncio.ensure_future(dial(address))] = address
            pause_s = NEXT_ADDRESS_S if left else None
            done, _ = await asyncio.wait(trying, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for one in sorted(done, key=list(trying).index):
                address = trying.pop(one)
                if not isinstance(one.exception(), EchoError):
                    return one.result(), address
                error = one.exception()
    finally:
        await _end(trying)
    assert error is not None, "no address was given"
    raise error


async def _end(trying: dict[asyncio.Future[Connection], str]) -> None:
    for one in trying:
        one.cancel()
    for late in await asyncio.gather(*trying, return_exceptions=True):
        if not isinstance(late, BaseException):
            await late.close()
