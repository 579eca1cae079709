"""What the whole fleet costs: workers by their own price, rented machines by their offer's, neither twice.

Guarantees: sums are up to the moment of asking. Leaves to others: prices, renting (provisioner), keeping.
"""

from __future__ import annotations

from echo2.base.clock import Clock
from echo2.base.ids import PeerId
from echo2.coordinator import accounts
from echo2.coordinator.membership import Member, Membership
from echo2.coordinator.options import CoordinatorOptions
from echo2.coordinator.pricing import PriceLimit, price_limit
from echo2.coordinator.provisioning import MachineOffer, RentedMachine
from echo2.coordinator.tokens import TokenBook


class Money:
    """`machines`: all that were ever rented in this run, by id; `offers`: what may be rented."""

    def __init__(self, membership: Membership, tokens: TokenBook, clock: Clock) -> None:
        self._membership, self._tokens, self._clock = membership, tokens, clock
        self.machines: dict[str, RentedMachine] = {}
        self.offers: tuple[MachineOffer, ...] = ()

    def workers_of(self, machine: RentedMachine) -> list[Member]:
        """Who joined with the machine's token."""
        token, members = self._tokens.tokens.get(machine.token_id), self._membership.members
        return [members[peer_id] for peer_id in sorted(token.peers) if peer_id in members] if token else []

    def _rented_workers(self) -> set[PeerId]:
        return {worker.peer_id for machine in self.machines.values() for worker in self.workers_of(machine)}

    def limit_of(self, member: Member, options: CoordinatorOptions) -> PriceLimit:
        """What this worker may ask without the operator's word."""
        machines = (machine for machine in self.machines.values() if machine.is_open)
        own = next((machine for machine in machines if member in self.workers_of(machine)), None)
        return price_limit(own, self.offers, member.hello.gpu, options.usd_per_hour_cap, options.usd_budget)

    def sums(self) -> accounts.FleetCosts:
        """With what rented machines cost while they idle."""
        members, now = self._membership.members.values(), self._clock.now()
        accounts.meter(members, now)
        return accounts.sums(members, self.machines.values(), self._rented_workers(), now)
