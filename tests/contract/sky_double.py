"""What the SkyPilot provider asks of the library, without a cloud: requests, clusters, and a cloud that may take them.

`Task` and `Resources` are SkyPilot's own where it is installed, so that what we build is what it takes.
"""

import enum
import types
from typing import Any


class ClusterStatus(enum.Enum):
    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"


class StatusRefreshMode(enum.Enum):
    AUTO = "AUTO"


class _Errors(types.SimpleNamespace):
    class ClusterDoesNotExist(ValueError): ...

    class ResourcesUnavailableError(Exception): ...

    class ApiServerConnectionError(RuntimeError): ...


class Task:
    def __init__(self, name: str, setup: str, run: str, secrets: dict[str, str]) -> None:
        self.name, self.setup, self.run, self.secrets = name, setup, run, secrets

    def set_resources(self, resources: Any) -> None:
        self.resources = resources


class Resources:
    def __init__(self, **wanted: Any) -> None:
        self.wanted = wanted


class Sky:
    """The module's face. `clusters` is the cloud."""

    ClusterStatus, StatusRefreshMode, exceptions = ClusterStatus, StatusRefreshMode, _Errors
    Task, Resources = Task, Resources

    def __init__(self) -> None:
        self.clusters: dict[str, ClusterStatus] = {}
        self.launched: list[Any] = []
        self.is_away = self.is_full = False

    def launch(self, task: Any, cluster_name: str) -> Any:
        def act() -> None:
            if self.is_full:
                raise _Errors.ResourcesUnavailableError("no A100 in any zone")
            self.launched.append(task)
            self.clusters[cluster_name] = ClusterStatus.UP

        return act

    def down(self, cluster_name: str) -> Any:
        def act() -> None:
            if cluster_name not in self.clusters:
                raise _Errors.ClusterDoesNotExist(cluster_name)
            del self.clusters[cluster_name]

        return act

    def status(self, refresh: StatusRefreshMode) -> Any:
        return lambda: [{"name": name, "status": status} for name, status in self.clusters.items()]

    def get(self, request: Any) -> Any:
        if self.is_away:
            raise _Errors.ApiServerConnectionError("the API server does not answer")
        return request()
