"""Saves what this run observes of each kind of machine in the machines file, for later runs, and its predictions in its state.

Waits `LOOK_S` between looks at the fleet. Writes the file every `WRITE_S`, when the run finishes and when the coordinator stops.
A file that cannot be written is logged and ends nothing. Leaves to others: what is observed (sightings), the file
(experience_file).
"""

from __future__ import annotations

import asyncio
import logging

from echo2.base.errors import EchoError
from echo2.base.ids import PeerId
from echo2.coordinator.planner_input import believed_rate, is_measured, measured_speed, prior_speed
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.experience_file import add, known
from echo2.coordinator.runtime.hub import PREEMPTION_WORD, Hub
from echo2.coordinator.sightings import Sightings
from echo2.cost_model.kinds import kind_of_name
from echo2.cost_model.next_actions import Interval
from echo2.outside import unix_now
from echo2.outside.guard import noting

LOOK_S = 10.0
WRITE_S = 600.0
PREDICTIONS = "predictions"
"""Key in the state's `meta`."""
_log = logging.getLogger("echo2.coordinator")


async def remember(hub: Hub, kept: str) -> None:
    """Observes and saves until cancelled. `kept`: the predictions that an earlier process saved."""
    sightings, written_at, was_finished = Sightings(hub.options.run_id, built_in_catalogue()), hub.clock.now(), False
    hub.reckoning.track.restore(kept)
    changes = hub.reckoning.track.changes
    try:
        while True:
            with noting("looking at machines"):
                look(hub, sightings)
                compare_rates(hub)
            if changes != hub.reckoning.track.changes:
                changes = hub.reckoning.track.changes
                hub.keeper.meta(PREDICTIONS, hub.reckoning.track.to_json())
                hub.flush_soon()
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


def compare_rates(hub: Hub) -> None:
    """Records the rate assumed for each unmeasured worker, and the measured rate once there is one."""
    living, catalogue, now = list(hub.membership.living()), built_in_catalogue(), hub.clock.now()
    measured = [one for one in living if is_measured(one)]
    speeds = [(one.hello.gpu, measured_speed(one)) for one in measured]
    experience, track = known(hub.options.machines_file), hub.reckoning.track
    for worker in measured:
        if worker.is_proven:
            track.rate_measured(worker.peer_id, believed_rate(worker), now)
    for worker in living if speeds else ():
        if not is_measured(worker):
            rate = prior_speed(worker.hello.gpu, speeds, catalogue, experience).rollouts_per_s
            told = experience.belief(kind_of_name(worker.hello.gpu, catalogue)[0])
            ends = rate * told.low / told.ratio, rate * told.high / told.ratio
            track.rate_expected(
                worker.peer_id, f"worker {worker.name}, {worker.hello.gpu or 'cpu'}", Interval(rate, *ends), now
            )


def _write(hub: Hub, sightings: Sightings) -> None:
    if hub.options.machines_file is None:
        return
    try:
        add(hub.options.machines_file, sightings.records(unix_now()))
    except EchoError as error:
        _log.warning("%s", error)
