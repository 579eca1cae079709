"""Time until every worker holds a verified artifact, against the fluid bound: real node processes, real transports.

    python -m benchmarks.bench_broadcast [--workers 4 8] [--kind homogeneous heterogeneous] [--mib 32] [--scale 0.25]

The network is the transport-level shaper on loopback (uplink, downlink, delay per node). Ratio = slowest worker /
fluid bound, the bound counted in payload bytes. Rates are those of the WAN table times --scale: when two cores cannot
move the sum of all uplinks, the table says so (cpu share near the core count) and a smaller scale is in place.
`--launcher 'ip netns exec {name}'` with `--addresses` runs the same in namespaces that you have set up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echo2.base.ids import RunId
from echo2.broadcast.identity import NodeCertificate, Role, RunAuthority, TlsKey, certificate_request
from echo2.broadcast.runtime import tls

MBIT = 125_000.0
HETEROGENEOUS = ([50, 200, 75, 100, 150, 50, 100, 75], [150, 400, 200, 200, 300, 200, 400, 150])
TARGETS = {
    ("homogeneous", 4): 1.08, ("homogeneous", 8): 1.10, ("homogeneous", 16): 1.15,
    ("heterogeneous", 4): 1.08, ("heterogeneous", 8): 1.12, ("heterogeneous", 16): 1.15,
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "broadcast.json"


def links(kind: str, workers: int, scale: float) -> list[dict[str, Any]]:
    """The seed and its workers: rates in bytes/s, RTT in seconds."""
    nodes = [{"name": "seed", "up": 200 * MBIT * scale, "down": 400 * MBIT * scale, "rtt": 0.06}]
    for i in range(workers):
        up, down = (100, 200) if kind == "homogeneous" else (HETEROGENEOUS[0][i % 8], HETEROGENEOUS[1][i % 8])
        nodes.append(
            {"name": f"w{i}", "up": up * MBIT * scale, "down": down * MBIT * scale, "rtt": (0.02, 0.06, 0.08)[i % 3]}
        )
    return nodes


def fluid_s(nodes: list[dict[str, Any]], size_bytes: float) -> float:
    seed, workers = nodes[0], nodes[1:]
    total = seed["up"] + sum(w["up"] for w in workers)
    return max(size_bytes / seed["up"], size_bytes / min(w["down"] for w in workers), len(workers) * size_bytes / total)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare(folder: Path, scene: dict[str, Any]) -> None:
    """Identities and certificates of a run made for this measurement."""
    coordinator = tls.load_or_create_identity(folder / "coordinator")
    authority = RunAuthority.create(coordinator, RunId("bench"), time.time())
    scene["peer_ids"] = []
    for number, node in enumerate(scene["nodes"]):
        identity, key = tls.load_or_create_identity(folder / node["name"]), TlsKey.generate()
        role = Role.LEARNER if number == 0 else Role.WORKER
        issued: NodeCertificate = authority.issue(certificate_request(identity, key), role, time.time())
        tls.save_credentials(
            folder / node["name"],
            tls.Credentials(
                identity, key.to_pem(), issued, authority.certificate_pem, RunId("bench"), coordinator.peer_id, "none:1"
            ),
        )
        scene["peer_ids"].append(identity.peer_id)
    (folder / "scene.json").write_text(json.dumps(scene))


def measure(scene: dict[str, Any], launcher: str = "") -> dict[str, Any]:
    """Runs one scene; {slowest_s, per worker, cpu}."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        source = os.urandom(scene["bytes"])
        (folder / "source").write_bytes(source)
        scene["source"] = str(folder / "source")
        prepare(folder, scene)
        procs = [_start(folder, number, node, launcher) for number, node in enumerate(scene["nodes"])]
        try:
            for proc in procs:
                _expect(proc, "READY")
            for proc in [*procs[1:], procs[0]]:
                _tell(proc, "GO")
            results = [json.loads(_line(proc)) for proc in procs]
            for proc in procs:
                _tell(proc, "STOP")
            results = [result | json.loads(_line(proc)) for proc, result in zip(procs, results, strict=True)]
        finally:
            for proc in procs:
                proc.terminate()
            for proc in procs:
                proc.wait(20)
    want = hashlib.sha256(source).hexdigest()
    assert all(r["sha256"] == want for r in results[1:] if r["done_at"]), "a worker holds other bytes"
    return _summary(results)


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    begun = results[0]["begun_at"]
    times = {r["name"]: r["done_at"] - begun for r in results[1:]}
    return {
        "slowest_s": max(times.values()), "times": times, "seed_sent": results[0]["sent"],
        "sent": sum(r["sent"] for r in results), "duplicates": sum(r["duplicates"] for r in results),
        "pulled": sum(r["pulled"] for r in results), "cpu_s": sum(r["cpu_s"] for r in results),
        "topology": results[0]["topology"], "rss_mib": max(r["rss_mib"] for r in results),
    }  # fmt: skip


def _start(folder: Path, number: int, node: dict[str, Any], launcher: str) -> subprocess.Popen[str]:
    command = [*shlex.split(launcher.format(name=node["name"])), sys.executable, "-m", "benchmarks.broadcast_peer"]
    log = (folder / f"{node['name']}.log").open("w")
    return subprocess.Popen(
        [*command, str(folder), str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
    )  # fmt: skip


def _tell(proc: subprocess.Popen[str], word: str) -> None:
    assert proc.stdin is not None
    proc.stdin.write(word + "\n")
    proc.stdin.flush()


def _line(proc: subprocess.Popen[str]) -> str:
    assert proc.stdout is not None
    line = proc.stdout.readline()
    if not line:
        raise SystemExit(f"a node process ended early with code {proc.wait(5)}")
    return line


def _expect(proc: subprocess.Popen[str], word: str) -> None:
    line = _line(proc).strip()
    assert line == word, f"expected {word}, got {line!r}"


def scene_of(kind: str, workers: int, method: str, options: argparse.Namespace) -> dict[str, Any]:
    nodes = links(kind, workers, options.scale)
    for node in nodes:
        node["address"] = f"127.0.0.1:{_free_port()}"
    return {
        "nodes": nodes, "method": method, "bytes": int(options.mib * 2**20), "chunk_bytes": options.chunk_kib << 10,
        "is_shaped": True, "pace": 0.0,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kind", nargs="+", default=["homogeneous", "heterogeneous"])
    parser.add_argument("--method", nargs="+", default=["star", "echo2"])
    parser.add_argument("--mib", type=float, default=32)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--chunk-kib", type=int, default=128)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| links | workers | method | plan | slowest s | bound s | ratio | target | seed sent / size | dup % | cpu s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for kind in options.kind:
        for workers in options.workers:
            for method in options.method:
                scene = scene_of(kind, workers, method, options)
                bound = fluid_s(scene["nodes"], scene["bytes"])
                got = measure(scene)
                target = TARGETS.get((kind, workers)) if method == "echo2" else None
                ratio = got["slowest_s"] / bound
                print(
                    f"| {kind} | {workers} | {method} | {got['topology']} | {got['slowest_s']:.2f} | {bound:.2f} | "
                    f"{ratio:.3f} | {target or '-'} | {got['seed_sent'] / scene['bytes']:.2f} | "
                    f"{100 * got['duplicates'] / max(1, got['sent']):.2f} | {got['cpu_s']:.1f} |", flush=True,
                )  # fmt: skip
                rows.append(
                    {"name": f"{kind}/{workers}/{method}", "value": ratio, "unit": "x fluid bound", "target": target,
                     "better": "lower"}
                )  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
