"""Commands for a person to paste on a machine that somebody rents; such a machine it can neither see nor end."""

from __future__ import annotations

import shlex

from echo2.coordinator.provisioning import MachineOffer, Sighting


def base_arguments(model_path: str) -> list[str]:
    """By which a worker looks for the base checkpoint, on its machine or on the hub, before it asks peers for weights."""
    return ["--model.path", model_path] if model_path else []


def join_command(join_link: str, model_path: str = "") -> str:
    """What makes a machine a worker of the run."""
    return shlex.join(["echo-worker", "join", join_link, *base_arguments(model_path)])


class ManualProvider:
    """`rent` makes the command. `observe` tells of nothing: what a person does is not seen from here."""

    name = "manual"
    link_uses = 1

    def __init__(self, offer: MachineOffer, model_path: str = "") -> None:
        offer.allow()
        self._model_path = model_path

    async def rent(self, machine_id: str, join_link: str) -> str:
        return join_command(join_link, self._model_path)

    async def release(self, machine_id: str) -> None:
        """The person ends the machine; here there is nothing to end."""

    async def observe(self) -> dict[str, Sighting]:
        return {}
