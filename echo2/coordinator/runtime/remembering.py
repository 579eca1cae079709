"""Keeps what this run sees of each kind of machine in the machines file, for later runs.

Waits `LOOK_S` between looks at the fleet and writes every `WRITE_S`, when the run is finished and when the coordinator stops.
A file that cannot be written is told once and ends nothing. Leaves to others: what is seen (sightings), the file
(experience_file).
"""

from __future__ import annotations

import asyncio
import logging

from echo2.base.errors import EchoError
from echo2.base.ids import PeerId
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.experience_file import add
from echo2.coordinator.runtime.hub import PREEMPTION_WORD, Hub
from echo2.coordinator.sightings import Sightings
from echo2.outside import unix_now
from echo2.outside.guard import noting

LOOK_S = 10.0
WRITE_S = 600.0
_log = logging.getLogger("echo2.coordinator")


async def remember(hub: Hub) -> None:
    """Until cancelled; does nothing where nothing is to be kept."""
    if hub.options.machines_file is None:
        await asyncio.Event().wait()
    sightings, written_at, was_finished = Sightings(hub.options.run_id, built_in_catalogue()), hub.clock.now(), False
    try:
        while True:
            with noting("looking at machines"):
                look(hub, sightings)
            is_finished = hub.ending.finish is not None
            if hub.clock.now() - written_at >= WRITE_S or (is_finished and not was_finished):
                written_at = hub.clock.now()
                await asyncio.to_thread(_write, hub, sightings)
            was_finished = is_finished
            await asyncio.sleep(LOOK_S)
    finally:
        _write(hub, sightings)


def look(hub: Hub, sightings: Sightings) -> None:
    offers = {offer.name: offer for offer in hub.money.offers}
    rented = {
        worker.peer_id: (machine, offers[machine.offer])
        for machine in hub.money.machines.values()
        if machine.offer in offers
        for worker in hub.money.workers_of(machine)
    }
    preempted = {PeerId(one.whom) for one in hub.keeper.paid if PREEMPTION_WORD in one.reason}
    members = list(hub.membership.members.values())
    sightings.look(members, rented, hub.board, hub.book.worth, preempted, hub.clock.now())


def _write(hub: Hub, sightings: Sightings) -> None:
    assert hub.options.machines_file is not None, "remembered only where there is a file"
    try:
        add(hub.options.machines_file, sightings.records(unix_now()))
    except EchoError as error:
        _log.warning("%s", error)
