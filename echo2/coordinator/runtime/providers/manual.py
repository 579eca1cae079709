"""Commands for a person to paste on a machine that somebody rents; such a machine it can neither see nor end."""

from __future__ import annotations

import shlex

from echo2.coordinator.provisioning import Offer, Sighting


def join_command(join_link: str) -> str:
    """What makes a machine a worker of the run."""
    return f"echo-worker join {shlex.quote(join_link)}"


class ManualProvider:
    """`rent` makes the command. `observe` tells of nothing: what a person does is not seen from here."""

    name = "manual"
    link_uses = 1

    def __init__(self, offer: Offer) -> None:
        offer.allow()

    async def rent(self, machine_id: str, join_link: str) -> str:
        return join_command(join_link)

    async def release(self, machine_id: str) -> None:
        """The person ends the machine; here there is nothing to end."""

    async def observe(self) -> dict[str, Sighting]:
        return {}
