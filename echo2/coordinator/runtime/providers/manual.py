"""Makes join commands for a person to run on a machine rented by hand. The provider can neither observe nor end such a machine."""

from __future__ import annotations

import shlex

from echo2.coordinator.provisioning import MachineOffer, Sighting


def base_arguments(model_path: str) -> list[str]:
    """Arguments that name the base checkpoint: a worker looks for it on its machine or the hub before it asks peers for weights."""
    return ["--model.path", model_path] if model_path else []


def join_command(join_link: str, model_path: str = "") -> str:
    """The shell command that makes a machine a worker of the run."""
    return shlex.join(["echo-worker", "join", join_link, *base_arguments(model_path)])


class ManualProvider:
    """`rent` returns the command. `observe` is always empty, because the provider cannot see what a person does."""

    name = "manual"
    link_uses = 1

    def __init__(self, offer: MachineOffer, model_path: str = "") -> None:
        offer.allow()
        self._model_path = model_path

    async def rent(self, machine_id: str, join_link: str) -> str:
        return join_command(join_link, self._model_path)

    async def release(self, machine_id: str) -> None:
        """Does nothing: the person has to end the machine."""

    async def observe(self) -> dict[str, Sighting]:
        return {}
