"""Adds up what the whole fleet costs: workers by their own price, rented machines by their offer's, nothing twice.

Guarantees: sums are up to date when asked for. Leaves to others: prices, renting (provisioner), saving.
"""

from __future__ import annotations

from collections.abc import Container

from echo2.base.clock import Clock
from echo2.base.ids import PeerId
from echo2.coordinator import accounts
from echo2.coordinator.fleet_advice import kind_text
from echo2.coordinator.membership import Member, Membership
from echo2.coordinator.options import CoordinatorOptions
from echo2.coordinator.pricing import PriceLimit, price_limit
from echo2.coordinator.provisioning import MachineOffer, RentedMachine
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.tokens import TokenBook


class Money:
    """`machines`: all machines that were ever rented in this run, by id. `offers`: what may be rented, with GPUs named by
    `kind_text`."""

    def __init__(self, membership: Membership, tokens: TokenBook, clock: Clock) -> None:
        self._membership, self._tokens, self._clock = membership, tokens, clock
        self.machines: dict[str, RentedMachine] = {}
        self.standby_before = 0.0  # USD of own workers on standby, from earlier processes
        self.offers: tuple[MachineOffer, ...] = ()

    def workers_of(self, machine: RentedMachine) -> list[Member]:
        """The workers that joined with the machine's token."""
        token, members = self._tokens.tokens.get(machine.token_id), self._membership.members
        return [members[peer_id] for peer_id in sorted(token.peers) if peer_id in members] if token else []

    def _rented_workers(self) -> dict[PeerId, str]:
        """The workers on rented machines, each with its machine's id."""
        machines = self.machines.values()
        return {worker.peer_id: one.machine_id for one in machines for worker in self.workers_of(one)}

    def standby_usd(self, rented: Container[PeerId] | None = None) -> float:
        """What workers on no rented machine have cost on standby over the whole run, in USD."""
        rented = self._rented_workers() if rented is None else rented
        own = (member for member in self._membership.members.values() if member.peer_id not in rented)
        return self.standby_before + sum(member.usd_standby for member in own)

    def limit_of(self, member: Member, options: CoordinatorOptions) -> PriceLimit:
        """The highest price that this worker may ask without the operator's approval."""
        machines = (machine for machine in self.machines.values() if machine.is_open)
        own = next((machine for machine in machines if member in self.workers_of(machine)), None)
        gpu = kind_text(member.hello.gpu, built_in_catalogue())
        return price_limit(own, self.offers, gpu, options.usd_per_hour_cap, options.usd_budget)

    def sums(self) -> accounts.FleetCosts:
        """The bill and its useful share, metered up to now."""
        members, now = self._membership.members.values(), self._clock.now()
        accounts.meter(members, now)
        rented = self._rented_workers()
        return accounts.sums(members, self.machines.values(), rented, now, self.standby_usd(rented))
