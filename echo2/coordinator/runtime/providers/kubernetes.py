"""Rents machines as replicas of a Deployment that the cluster's owner has made, through the official client.

The Deployment defines a worker (image, GPUs, node selector); it mounts the Secret that this provider writes, and runs
`echo-worker join @…/worker.link`. Renting adds a replica, releasing removes that machine's own pod. Guarantees: the list of
requested machines is in the Deployment itself, one annotation each, changed together with `replicas` under the object's resource
version, so that two writers cannot overwrite each other's change, and a coordinator that died in between finds what it did. A pod
that is evicted is reported as ENDING; the cluster starts another in its place, so a join link must admit several workers. Leaves
to others: the cluster's autoscaler, prices (the offer names them).

Settings: `deployment`; `namespace` (`default`), `secret` (DEPLOYMENT-join), `kubeconfig` and `context` (the usual ones; in
a pod: its service account), `server` (an API server without authentication, for tests).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from echo2.base.errors import ConfigError, LimitExceeded, NotAllowed, Unreachable
from echo2.coordinator.provisioning import MachineOffer, MachineState, Sighting

MACHINE_LABEL = "echo2/machine"
WANTED_PREFIX = "machines.echo2/"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LINK_KEY = "worker.link"
TRIES = 8
ANSWER_S = 15.0
Answer = TypeVar("Answer")


def _client(offer: MachineOffer) -> tuple[Any, Any, type[Exception], type[Exception]]:
    """The apps API, the core API, the client's exception and its connections' exception.

    ConfigError if the library is not installed or no cluster is configured."""
    try:
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise ConfigError(
            f"offer {offer.name}: the provider kubernetes takes its official client: pip install 'echo2[kubernetes]'"
        ) from None
    try:
        settings = client.Configuration()
        if server := offer.setting("server", ""):
            settings.host = server
        elif path := offer.setting("kubeconfig", ""):
            config.load_kube_config(path, offer.setting("context", "") or None, client_configuration=settings)
        else:
            config.load_config(client_configuration=settings)
    except config.ConfigException as error:
        raise ConfigError(f"offer {offer.name}: expected a cluster to talk to: {error}") from None
    settings.retries = 2
    connection = client.ApiClient(settings)
    return client.AppsV1Api(connection), client.CoreV1Api(connection), client.ApiException, HTTPError


class KubernetesProvider:
    name = "kubernetes"
    link_uses = 0

    def __init__(self, offer: MachineOffer) -> None:
        offer.allow("deployment", "namespace", "secret", "kubeconfig", "context", "server")
        self._offer = offer
        self._deployment, self._namespace = offer.setting("deployment"), offer.setting("namespace", "default")
        self._secret = offer.setting("secret", f"{self._deployment}-join")
        self._apps, self._core, self._api_error, self._net_error = _client(offer)

    async def rent(self, machine_id: str, join_link: str) -> str:
        await self._ask(lambda: self._rent(machine_id, join_link))
        return ""

    async def release(self, machine_id: str) -> None:
        await self._ask(lambda: self._release(machine_id))

    async def observe(self) -> dict[str, Sighting]:
        return await self._ask(self._observe)

    async def _ask(self, act: Callable[[], Answer]) -> Answer:
        """Calls the client in a thread, because it blocks, and translates its errors: NotAllowed, ConfigError or Unreachable."""
        try:
            return await asyncio.to_thread(act)
        except self._api_error as error:
            status, reason = getattr(error, "status", 0), getattr(error, "reason", "")
            text = f"kubernetes, deployment {self._namespace}/{self._deployment}: {status} {reason}"
            if status in (401, 403):
                raise NotAllowed(f"{text}: the account may not do this") from None
            if status == 404:
                raise ConfigError(f"{text}: expected this Deployment in the cluster") from None
            raise Unreachable(text) from None
        except OSError as error:
            raise Unreachable(f"kubernetes, deployment {self._namespace}/{self._deployment}: {error}") from None
        except self._net_error as error:
            raise Unreachable(f"kubernetes, deployment {self._namespace}/{self._deployment}: {error}") from None

    # ---- in the thread

    def _rent(self, machine_id: str, join_link: str) -> None:
        self._keep_link(join_link)

        def add(wanted: set[str]) -> dict[str, str | None]:
            if len(wanted) >= self._offer.machines_max and machine_id not in wanted:
                raise LimitExceeded(
                    f"kubernetes, deployment {self._deployment}: expected {self._offer.machines_max} machines at most"
                )
            return {machine_id: "wanted"}

        self._change(add)

    def _release(self, machine_id: str) -> None:
        for pod in self._pods():
            if (pod.metadata.labels or {}).get(MACHINE_LABEL) == machine_id:  # removed first when replicas shrink
                body = {"metadata": {"annotations": {DELETION_COST: "-1000"}}}
                self._core.patch_namespaced_pod(pod.metadata.name, self._namespace, body, _request_timeout=ANSWER_S)
        self._change(lambda wanted: {machine_id: None} if machine_id in wanted else {})

    def _change(self, change: Callable[[set[str]], dict[str, str | None]]) -> None:
        """Changes the wanted machines and the number of replicas in one write; retries up to `TRIES` times after a conflict.
        `change`: maps the machines wanted now to what to add (a value) or remove (None)."""
        for attempt in range(TRIES):
            found = self._read()
            wanted = _wanted(found)
            changes = change(wanted)
            after = (wanted | {one for one, value in changes.items() if value}) - {
                one for one, value in changes.items() if value is None
            }
            if after == wanted and found.spec.replicas == len(wanted):
                return
            body = {
                "metadata": {
                    "resourceVersion": found.metadata.resource_version,
                    "annotations": {WANTED_PREFIX + one: value for one, value in changes.items()},
                },
                "spec": {"replicas": len(after)},
            }
            try:
                self._apps.patch_namespaced_deployment(
                    self._deployment, self._namespace, body, _request_timeout=ANSWER_S
                )
                return
            except self._api_error as error:
                if getattr(error, "status", 0) != 409 or attempt == TRIES - 1:
                    raise

    def _keep_link(self, join_link: str) -> None:
        body = {"metadata": {"name": self._secret}, "type": "Opaque", "stringData": {LINK_KEY: join_link}}
        try:
            self._core.patch_namespaced_secret(self._secret, self._namespace, body, _request_timeout=ANSWER_S)
        except self._api_error as error:
            if getattr(error, "status", 0) != 404:
                raise
            self._core.create_namespaced_secret(self._namespace, body, _request_timeout=ANSWER_S)

    def _observe(self) -> dict[str, Sighting]:
        pods = self._pods()
        by_machine = {(pod.metadata.labels or {}).get(MACHINE_LABEL, ""): pod for pod in sorted(pods, key=_is_ending)}
        free = [pod for pod in pods if MACHINE_LABEL not in (pod.metadata.labels or {}) and not _is_ending(pod)]
        found = {}
        for machine_id in sorted(_wanted(self._read())):
            pod = by_machine.get(machine_id)
            if (pod is None or pod.metadata.deletion_timestamp) and free:  # a new pod replaces one that is gone
                pod = free.pop()
                body = {"metadata": {"labels": {MACHINE_LABEL: machine_id}}}
                self._core.patch_namespaced_pod(pod.metadata.name, self._namespace, body, _request_timeout=ANSWER_S)
            found[machine_id] = _sighting(pod)
        return found

    def _read(self) -> Any:
        return self._apps.read_namespaced_deployment(self._deployment, self._namespace, _request_timeout=ANSWER_S)

    def _pods(self) -> list[Any]:
        labels = self._read().spec.selector.match_labels or {}
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        listed = self._core.list_namespaced_pod(self._namespace, label_selector=selector, _request_timeout=ANSWER_S)
        return [pod for pod in listed.items if pod.status.phase not in ("Succeeded", "Failed")]


def _wanted(deployment: Any) -> set[str]:
    annotations = deployment.metadata.annotations or {}
    return {key.removeprefix(WANTED_PREFIX) for key in annotations if key.startswith(WANTED_PREFIX)}


def _is_ending(pod: Any) -> bool:
    """Whether the pod is being deleted or is marked for it: evicted, preempted, its node drained."""
    return pod.metadata.deletion_timestamp is not None or bool(_disruption(pod))


def _disruption(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return condition.message or condition.reason or "the cluster takes it away"
    return ""


def _sighting(pod: Any) -> Sighting:
    if pod is None:
        return Sighting(MachineState.STARTING)
    if _is_ending(pod):
        return Sighting(MachineState.ENDING, _disruption(pod) or "its pod is being deleted")
    return Sighting(MachineState.RUNNING if pod.status.phase == "Running" else MachineState.STARTING)
