"""Rents machines from any cloud that SkyPilot supports, each as a cluster of one node, through SkyPilot's Python API.

Guarantees: a machine is the cluster named by its id, so `rent` is idempotent; the join link is passed as a secret of the task,
not on a command line. Requests block in threads.

Settings: `accelerators` (such as `A100:1`), `infra` (such as `runpod` or `aws/us-east-1`), `cpus`, `memory`, `image_id`,
`disk_size`, and those of machine_setup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from echo2.base.errors import ConfigError, ResourceError, Unreachable
from echo2.base.ids import RunId
from echo2.base.units import is_loopback
from echo2.coordinator.money.providers.machine_setup import (
    KEYS,
    LINK_VARIABLE,
    base_arguments,
    install_script,
    join_script,
)
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, ObservedMachine, machine_prefix

PRICE_MARGIN = 1.05  # zones of one offer differ by a few percent
RESOURCES = ("accelerators", "infra", "cpus", "memory", "image_id", "disk_size")
"""Settings that are passed to SkyPilot unchanged."""
Answer = TypeVar("Answer")


def _library(offer: MachineOffer) -> Any:
    try:
        import sky
    except ImportError:
        raise ConfigError(
            f"offer {offer.name}: expected SkyPilot to be installed on the coordinator's machine: pip install 'skypilot>=0.10'"
        ) from None
    return sky


class SkyPilotProvider:
    """`sky`: the library; a test passes a fake one."""

    def __init__(self, offer: MachineOffer, run_id: RunId, sky: Any = None, model_path: str = "") -> None:
        offer.allow(*RESOURCES, *KEYS)
        self._offer, self._prefix, self._base = offer, machine_prefix(run_id, offer.name), base_arguments(model_path)
        self._sky = sky if sky is not None else _library(offer)
        # Its own, one for each machine and one for the list: launches take minutes, and the process's threads have other work.
        self._threads = ThreadPoolExecutor(offer.machines_max + 1, thread_name_prefix="skypilot")
        with suppress(Unreachable):  # refuse invalid settings now, not at the first rent
            self.task("check", "echo2://check", offer.usd_per_hour)

    def task(self, machine_id: str, join_link: str, usd_per_hour: float) -> Any:
        """The SkyPilot task of one machine with its resources. ConfigError if SkyPilot rejects it, Unreachable if SkyPilot cannot
        fetch its catalogue."""
        offer = self._offer
        setup, run = install_script(offer), join_script(offer, machine_id, self._base)
        wanted: dict[str, Any] = {"use_spot": offer.is_spot}
        for key in RESOURCES:
            if value := offer.setting(key, ""):
                wanted[key] = value
        if usd_per_hour > 0:
            wanted["max_hourly_cost"] = round(usd_per_hour * PRICE_MARGIN, 6)
        try:
            task = self._sky.Task(name=machine_id, setup=setup, run=run, secrets={LINK_VARIABLE: join_link})
            task.set_resources(self._sky.Resources(**wanted))
        except ValueError as error:
            raise ConfigError(f"offer {offer.name}: SkyPilot takes no such task: {error}") from None
        except OSError as error:
            raise Unreachable(f"offer {offer.name}: SkyPilot could not fetch its catalog: {error}") from None
        return task

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
        if is_loopback(host := urlsplit(join_link).hostname or ""):
            raise ConfigError(
                f"offer {self._offer.name}: expected an address of the coordinator that a rented machine can reach, got {host}: "
                "set coordinator.advertise"
            )
        task = self.task(machine_id, join_link, usd_per_hour)
        if machine_id not in await self.observe():
            await self._ask(lambda: self._sky.launch(task, cluster_name=machine_id), f"launch of {machine_id}")
        return ""

    async def release(self, machine_id: str) -> None:
        if machine_id in await self.observe():
            await self._ask(lambda: self._sky.down(machine_id), f"down of {machine_id}")

    async def observe(self) -> dict[str, ObservedMachine]:
        refresh = self._sky.StatusRefreshMode.AUTO
        clusters = await self._ask(lambda: self._sky.status(refresh=refresh), "status")
        return {
            cluster["name"]: _sighting(str(getattr(cluster["status"], "name", cluster["status"])))
            for cluster in clusters
            if cluster["name"].startswith(self._prefix)
        }

    async def _ask(self, request: Callable[[], Any], what: str) -> Any:
        """Sends a request and waits for its answer in a thread; translates SkyPilot's errors to ResourceError or Unreachable. A
        cluster that does not exist gives None."""
        exceptions = self._sky.exceptions
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: self._sky.get(request()))
        except exceptions.ClusterDoesNotExist:
            return None
        except exceptions.ResourcesUnavailableError as error:
            raise ResourceError(f"skypilot, {what} for offer {self._offer.name}: {error}") from None
        except (exceptions.ApiServerConnectionError, OSError) as error:
            raise Unreachable(f"skypilot, {what}: {error}") from None
        except (RuntimeError, ValueError) as error:  # raised by a cloud's library, passed on by SkyPilot's server
            raise ResourceError(f"skypilot, {what}: {type(error).__name__}: {error}") from None


def _sighting(status: str) -> ObservedMachine:
    match status:
        case "UP":
            return ObservedMachine(MachineState.RUNNING)
        case "STOPPED" | "AUTOSTOPPING":
            return ObservedMachine(MachineState.ENDING, "the cloud has stopped it")
        case _:
            return ObservedMachine(MachineState.STARTING)
