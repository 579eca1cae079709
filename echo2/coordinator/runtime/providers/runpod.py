"""Rents machines as pods of RunPod, through its REST API (version 1).

Guarantees: a machine is the pod named by its id, so `rent` is idempotent, and `release` deletes all pods with that name; the join
link is passed as an environment variable of the pod, not on a command line; the key is read from a file or from `RUNPOD_API_KEY`,
is sent only to the server (redirects are not followed) and appears in no message. An offer must name its price, so that cap and
budget count it; a pod that turns out more expensive is deleted again and `rent` fails. Requests block in threads. Leaves to
others: which pods are available (RunPod), whether to rent (provisioner).

Settings: `gpu_type` (such as `NVIDIA GeForce RTX 4090`) and `image`; `gpu_count` (1), `cloud` (`SECURE` or `COMMUNITY`),
`data_centers` (ids separated by commas), `disk_gb` (40), `setup` (what to run first; by default a pip install of this release),
`arguments` (more options of echo-worker), `key_file`, `server` (another address of the API, for tests).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import echo2
from echo2.base.errors import ConfigError, NotAllowed, ResourceError, Unreachable
from echo2.base.ids import RunId
from echo2.coordinator.provisioning import MachineOffer, MachineState, Sighting, machine_prefix
from echo2.coordinator.runtime.providers.manual import base_arguments

SERVER = "https://rest.runpod.io/v1"
KEY_VARIABLE = "RUNPOD_API_KEY"
CLOUDS = ("SECURE", "COMMUNITY")
PRICE_MARGIN = 1.05
ANSWER_S = 30.0
ANSWER_BYTES_MAX = 8 << 20
ERROR_CHARS_MAX = 300
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class RunPodProvider:
    name = "runpod"
    link_uses = 1

    def __init__(self, offer: MachineOffer, run_id: RunId, model_path: str = "") -> None:
        offer.allow(
            "gpu_type",
            "image",
            "gpu_count",
            "cloud",
            "data_centers",
            "disk_gb",
            "setup",
            "arguments",
            "key_file",
            "server",
        )
        whose = f"offer {offer.name}"
        if offer.usd_per_hour <= 0:
            raise ConfigError(f"{whose}: usd_per_hour: expected what a pod may cost, got {offer.usd_per_hour:g}")
        self._offer, self._prefix = offer, machine_prefix(run_id, offer.name)
        self._base = shlex.join(base_arguments(model_path))
        self._gpu_type, self._image = offer.setting("gpu_type"), offer.setting("image")
        self._gpu_count = _whole(offer, "gpu_count", 1, 8)
        self._disk_gb = _whole(offer, "disk_gb", 40, 10_000)
        self._cloud = offer.setting("cloud", CLOUDS[0])
        if self._cloud not in CLOUDS:
            raise ConfigError(f"{whose}: cloud: expected one of {', '.join(CLOUDS)}, got {self._cloud[:40]!r}")
        self._server = offer.setting("server", SERVER).rstrip("/")
        parts = urlsplit(self._server)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
            raise ConfigError(
                f"{whose}: server: expected an address that begins with https://, got {self._server[:80]!r}"
            )
        self._key = _key(offer)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def body(self, machine_id: str, join_link: str) -> dict[str, Any]:
        """The body of the request that makes one machine's pod."""
        offer = self._offer
        setup = offer.setting("setup", f"pip install 'echo2[worker]=={echo2.__version__}'")
        more = f"{self._base} {offer.setting('arguments', '')}".strip()
        run = (
            f'{setup} && umask 077 && printf %s "$ECHO2_JOIN_LINK" > ~/echo2-join.link && '
            f"exec echo-worker join @$HOME/echo2-join.link --name {machine_id} "
            f"--worker.price_usd_per_hour {offer.usd_per_hour:g} --worker.is_spot {str(offer.is_spot).lower()} {more}"
        ).strip()
        asked: dict[str, Any] = {
            "name": machine_id, "imageName": self._image, "gpuTypeIds": [self._gpu_type], "gpuCount": self._gpu_count,
            "cloudType": self._cloud, "interruptible": offer.is_spot, "containerDiskInGb": self._disk_gb, "volumeInGb": 0,
            "env": {"ECHO2_JOIN_LINK": join_link}, "dockerStartCmd": ["bash", "-c", run],
        }  # fmt: skip
        if centers := [one.strip() for one in offer.setting("data_centers", "").split(",") if one.strip()]:
            asked["dataCenterIds"] = centers
        return asked

    async def rent(self, machine_id: str, join_link: str) -> str:
        await asyncio.to_thread(self._rent, machine_id, join_link)
        return ""

    async def release(self, machine_id: str) -> None:
        await asyncio.to_thread(self._release, machine_id)

    async def observe(self) -> dict[str, Sighting]:
        pods = await asyncio.to_thread(self._pods)
        return {str(pod["name"]): _sighting(pod) for pod in sorted(pods, key=_is_up)}

    # ---- in the thread

    def _rent(self, machine_id: str, join_link: str) -> None:
        if any(pod["name"] == machine_id for pod in self._pods()):
            return
        made = self._ask("POST", "/pods", f"a pod for {machine_id}", self.body(machine_id, join_link))
        cost = _cost(made)
        if cost > self._offer.usd_per_hour * PRICE_MARGIN:
            self._release(machine_id)
            raise ResourceError(
                f"offer {self._offer.name}: expected a pod at {self._offer.usd_per_hour:g} USD/h, RunPod asks {cost:g}; it is "
                "ended again"
            )

    def _release(self, machine_id: str) -> None:
        for pod in self._pods():
            if pod["name"] == machine_id:
                self._ask("DELETE", f"/pods/{quote(str(pod['id']), safe='')}", f"the end of {machine_id}")

    def _pods(self) -> list[Mapping[str, Any]]:
        """This offer's pods that are not terminated."""
        found = self._ask("GET", "/pods", "the pods")
        if not isinstance(found, list):
            raise Unreachable("runpod, the pods: expected a list, got something else")
        ours = (pod for pod in found if isinstance(pod, dict) and str(pod.get("name", "")).startswith(self._prefix))
        return [pod for pod in ours if "id" in pod and pod.get("desiredStatus") != "TERMINATED"]

    def _ask(self, method: str, path: str, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends one request and returns the parsed answer. `what`: the subject, for messages.

        NotAllowed for 401 and 403, ResourceError if a POST is refused, Unreachable for other failures. A DELETE of a missing pod
        is no error."""
        whose = f"runpod, {what} for offer {self._offer.name}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, method=method)
        request.add_header("authorization", f"Bearer {self._key}")
        request.add_header("content-type", "application/json")
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                text = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            told = error.read(4096).decode("utf-8", "replace").replace(self._key, "…")[:ERROR_CHARS_MAX]
            if error.code in (401, 403):
                raise NotAllowed(f"{whose}: {error.code}: the key may not do this") from None
            if error.code == 404 and method == "DELETE":
                return None
            if method == "POST" and error.code != 429:  # RunPod answers 500 if no pod is available
                raise ResourceError(f"{whose}: {error.code}: {told}") from None
            raise Unreachable(f"{whose}: {error.code}: {told}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{whose}: {type(error).__name__}: {error}") from None
        if len(text) > ANSWER_BYTES_MAX:
            raise Unreachable(f"{whose}: expected an answer of at most {ANSWER_BYTES_MAX} bytes")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise Unreachable(f"{whose}: expected JSON, got something else") from None


def _key(offer: MachineOffer) -> str:
    path = offer.setting("key_file", "")
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8") if path else os.environ.get(KEY_VARIABLE, "")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"offer {offer.name}: key_file: expected a file with RunPod's key at {path}") from None
    if not key.strip() or not key.strip().isprintable():
        raise ConfigError(f"offer {offer.name}: expected RunPod's key in the setting key_file or in {KEY_VARIABLE}")
    return key.strip()


def _whole(offer: MachineOffer, name: str, default: int, most: int) -> int:
    text = offer.setting(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"offer {offer.name}: {name}: expected 1 to {most}, got {text[:40]!r}")
    return int(text)


def _cost(pod: object) -> float:
    """The pod's price in USD/h, which RunPod sometimes gives as a string; 0 if it gives none."""
    try:
        return float(pod.get("costPerHr") or 0.0) if isinstance(pod, dict) else 0.0
    except (TypeError, ValueError):
        return 0.0


def _is_up(pod: Mapping[str, Any]) -> bool:
    return bool(pod.get("desiredStatus") == "RUNNING")


def _sighting(pod: Mapping[str, Any]) -> Sighting:
    if _is_up(pod):
        return Sighting(MachineState.RUNNING if pod.get("lastStartedAt") else MachineState.STARTING)
    if pod.get("desiredStatus") == "EXITED":
        told = str(pod.get("lastStatusChange") or "")[:200]
        return Sighting(MachineState.ENDING, f"RunPod has stopped it: {told}" if told else "RunPod has stopped it")
    return Sighting(MachineState.STARTING)
