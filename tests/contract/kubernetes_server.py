"""A small Kubernetes API server over real HTTP: Deployments, Pods and Secrets, and a controller that makes the pods.

It answers what the official client asks of these kinds: reads, lists by label, strategic-merge patches with a check of the
resource version, creation. Whenever a Deployment or a pod changes, its controller brings the number of pods in line,
taking away those of the least deletion cost first.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LABELS = {"app": "echo2-worker"}


def merged(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386 on dicts, which is what a strategic merge does to maps."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result


class Cluster:
    """The objects, by kind and name; use as a context manager, `url` is where it listens."""

    def __init__(self, deployment: str) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.conflicts_to_come = 0
        self.is_broken = False
        self.pods: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.deployment = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": deployment, "namespace": "rl", "resourceVersion": "1", "annotations": {}},
            "spec": {"replicas": 0, "selector": {"matchLabels": LABELS},
                     "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "worker"}]}}},
        }  # fmt: skip

    def __enter__(self) -> Cluster:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def reconcile(self) -> None:
        """The Deployment's controller."""
        with self.lock:
            wanted = self.deployment["spec"]["replicas"]
            alive = [pod for pod in self.pods.values() if "deletionTimestamp" not in pod["metadata"]]
            cost = lambda pod: int((pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0"))  # noqa: E731
            for pod in sorted(alive, key=cost)[: max(0, len(alive) - wanted)]:
                del self.pods[pod["metadata"]["name"]]
            for _ in range(wanted - len(alive)):
                self.count += 1
                name = f"worker-{self.count}"
                self.pods[name] = {
                    "apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running"},
                    "spec": {"containers": [{"name": "worker"}]},
                    "metadata": {"name": name, "namespace": "rl", "labels": dict(LABELS)},
                }  # fmt: skip

    def evict(self, machine_id: str, message: str) -> str:
        """The pod of a machine is told that it goes; the name of the pod."""
        with self.lock:
            name = next(
                n for n, pod in self.pods.items() if pod["metadata"]["labels"].get("echo2/machine") == machine_id
            )
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "Preemption", "message": message}
            self.pods[name]["status"]["conditions"] = [condition]
            return name

    def end(self, name: str) -> None:
        """An evicted pod is gone; the controller makes another."""
        with self.lock:
            del self.pods[name]
            self.reconcile()

    def answer(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(url)
        path = parts.path.strip("/").split("/")
        with self.lock:
            if self.is_broken:
                return 503, {"message": "the server is away"}
            match method, path[-2:], path[-1]:
                case "GET", [_, "pods"], _:
                    selector = parse_qs(parts.query)["labelSelector"][0]
                    asked = dict(one.split("=") for one in selector.split(","))
                    fit = [p for p in self.pods.values() if asked.items() <= p["metadata"]["labels"].items()]
                    return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": fit}
                case "PATCH", ["pods", name], _ if name in self.pods:
                    self.pods[name] = merged(self.pods[name], body or {})
                    return 200, self.pods[name]
                case "PATCH", ["secrets", name], _ if name in self.secrets:
                    self.secrets[name] = merged(self.secrets[name], body or {})
                    return 200, self.secrets[name]
                case "POST", [_, "secrets"], _:
                    assert body is not None
                    self.secrets[body["metadata"]["name"]] = body
                    return 201, body
                case "GET" | "PATCH", ["deployments", name], _ if name == self.deployment["metadata"]["name"]:
                    return self._deployment(method, body or {})
                case _:
                    return 404, {"message": f"{method} {parts.path}"}

    def _deployment(self, method: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if method == "PATCH":
            version = self.deployment["metadata"]["resourceVersion"]
            if self.conflicts_to_come or body["metadata"].get("resourceVersion") != version:
                self.conflicts_to_come = max(0, self.conflicts_to_come - 1)
                return 409, {"message": "the object has been modified"}
            self.deployment = merged(self.deployment, body)
            self.deployment["metadata"]["resourceVersion"] = str(int(version) + 1)
            self.reconcile()
        return 200, self.deployment


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = cluster.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_POST = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler
