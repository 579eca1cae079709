"""Rents machines from any cloud that SkyPilot supports, each as a cluster of one node, through SkyPilot's Python API.

Guarantees: a machine is the cluster named by its id, so `rent` is idempotent; the join link is passed as a secret of the task, not
on a command line. Requests block in threads. Leaves to others: accounts and the choice of zone (SkyPilot), prices (the offer names
one; `max_hourly_cost` makes SkyPilot respect it).

Settings: `accelerators` (such as `A100:1`), `infra` (such as `runpod` or `aws/us-east-1`), `cpus`, `memory`, `image_id`,
`disk_size`, `setup` (what to run once; by default a pip install of this release), `arguments` (more options of echo-worker).
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import echo2
from echo2.base.errors import ConfigError, ResourceError, Unreachable
from echo2.base.ids import RunId
from echo2.coordinator.provisioning import MachineOffer, MachineState, Sighting, machine_prefix
from echo2.coordinator.runtime.providers.manual import base_arguments

PRICE_MARGIN = 1.05
RESOURCES = ("accelerators", "infra", "cpus", "memory", "image_id", "disk_size")
"""Settings that are passed to SkyPilot unchanged."""
Answer = TypeVar("Answer")


def _library(offer: MachineOffer) -> Any:
    try:
        import sky
    except ImportError:
        raise ConfigError(
            f"offer {offer.name}: the provider skypilot takes SkyPilot: pip install 'echo2[skypilot]'"
        ) from None
    return sky


class SkyPilotProvider:
    """`sky`: the library; a test passes a fake one."""

    name = "skypilot"
    link_uses = 1

    def __init__(self, offer: MachineOffer, run_id: RunId, sky: Any = None, model_path: str = "") -> None:
        offer.allow(*RESOURCES, "setup", "arguments")
        self._offer, self._prefix = offer, machine_prefix(run_id, offer.name)
        self._base = shlex.join(base_arguments(model_path))
        self._sky = sky if sky is not None else _library(offer)
        with suppress(Unreachable):  # refuse invalid settings now, not at the first rent
            self.task("check", "echo2://check")

    def task(self, machine_id: str, join_link: str) -> Any:
        """The SkyPilot task of one machine with its resources. ConfigError if SkyPilot rejects it, Unreachable if SkyPilot cannot
        fetch its catalogue."""
        offer = self._offer
        setup = offer.setting("setup", f"pip install 'echo2[worker]=={echo2.__version__}'")
        more = f"{self._base} {offer.setting('arguments', '')}".strip()
        run = (
            'umask 077 && printf %s "$ECHO2_JOIN_LINK" > ~/echo2-join.link && '
            f"exec echo-worker join @$HOME/echo2-join.link --name {machine_id} "
            f"--worker.price_usd_per_hour {offer.usd_per_hour:g} --worker.is_spot {str(offer.is_spot).lower()} {more}"
        ).strip()
        wanted: dict[str, Any] = {"use_spot": offer.is_spot}
        for key in RESOURCES:
            if value := offer.setting(key, ""):
                wanted[key] = value
        if offer.usd_per_hour > 0:
            wanted["max_hourly_cost"] = round(offer.usd_per_hour * PRICE_MARGIN, 6)
        try:
            task = self._sky.Task(name=machine_id, setup=setup, run=run, secrets={"ECHO2_JOIN_LINK": join_link})
            task.set_resources(self._sky.Resources(**wanted))
        except ValueError as error:
            raise ConfigError(f"offer {offer.name}: SkyPilot takes no such task: {error}") from None
        except OSError as error:
            raise Unreachable(f"offer {offer.name}: SkyPilot could not fetch its catalog: {error}") from None
        return task

    async def rent(self, machine_id: str, join_link: str) -> str:
        task = self.task(machine_id, join_link)
        if machine_id not in await self.observe():
            await self._ask(lambda: self._sky.launch(task, cluster_name=machine_id), f"launch of {machine_id}")
        return ""

    async def release(self, machine_id: str) -> None:
        if machine_id in await self.observe():
            await self._ask(lambda: self._sky.down(machine_id), f"down of {machine_id}")

    async def observe(self) -> dict[str, Sighting]:
        refresh = self._sky.StatusRefreshMode.AUTO
        found = await self._ask(lambda: self._sky.status(refresh=refresh), "status")
        return {
            one["name"]: _sighting(str(getattr(one["status"], "name", one["status"])))
            for one in found
            if one["name"].startswith(self._prefix)
        }

    async def _ask(self, request: Callable[[], Any], what: str) -> Any:
        """Sends a request and waits for its answer in a thread; translates SkyPilot's errors to ResourceError or Unreachable. A
        cluster that does not exist gives None."""
        exceptions = self._sky.exceptions
        try:
            return await asyncio.to_thread(lambda: self._sky.get(request()))
        except exceptions.ClusterDoesNotExist:
            return None
        except exceptions.ResourcesUnavailableError as error:
            raise ResourceError(f"skypilot, {what} for offer {self._offer.name}: {error}") from None
        except (exceptions.ApiServerConnectionError, OSError) as error:
            raise Unreachable(f"skypilot, {what}: {error}") from None
        except (RuntimeError, ValueError) as error:  # raised by a cloud's library, passed on by SkyPilot's server
            raise ResourceError(f"skypilot, {what}: {type(error).__name__}: {error}") from None


def _sighting(status: str) -> Sighting:
    match status:
        case "UP":
            return Sighting(MachineState.RUNNING)
        case "STOPPED" | "AUTOSTOPPING":
            return Sighting(MachineState.ENDING, "the cloud has stopped it")
        case _:
            return Sighting(MachineState.STARTING)
