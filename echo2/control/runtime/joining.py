"""Enrolling with a coordinator that may be away.

Guarantees: an unreachable coordinator is retried forever with jittered backoff, and the wait is shown; a wrong token, peer or
protocol version ends the attempt at once. Leaves to others: keeping the credentials (worker, learner), ending it early.
"""

from __future__ import annotations

import asyncio

from echo2.base.errors import Unreachable
from echo2.control.backoff import Backoff
from echo2.control.waits import Waits
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.trust.runtime.enrolling import enrol
from echo2.trust.runtime.tls import Credentials


async def enrolled(link: JoinLink, identity: Identity, role: Role, waits: Waits, backoff: Backoff) -> Credentials:
    """Enrols in the run that `link` names; returns the credentials."""
    while True:
        try:
            credentials = await enrol(link, identity, role)
        except Unreachable as error:
            waits.begin("coordinator", f"the coordinator at {link.address} to enrol ({error})")
            await asyncio.sleep(backoff.next_pause_s())
            continue
        waits.end("coordinator")
        return credentials


async def unless(stopped: asyncio.Event, joining: asyncio.Task[Credentials]) -> Credentials | None:
    """The result of `joining`; None, with `joining` cancelled, if the node is stopped first."""
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if joining.done():
        return joining.result()
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    return None
