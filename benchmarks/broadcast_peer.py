"""One node process of bench_broadcast: `python -m benchmarks.broadcast_peer FOLDER INDEX`.

Reads FOLDER/scene.json, connects, says READY, waits for GO on stdin, then publishes (index 0) or receives, and prints
what it saw as one JSON line. METHOD star makes workers not relay: the seed sends everything to everyone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from echo2.base.ids import Version
from echo2.broadcast.manifest import ArtifactId
from echo2.broadcast.runtime import tls
from echo2.broadcast.runtime.node import BroadcastNode, NodeOptions
from echo2.broadcast.runtime.progress import ArtifactBegun, ArtifactSealed, BlockArrived
from echo2.broadcast.runtime.shaper import LinkShape
from echo2.broadcast.topology import BroadcastPlan, NodeLink
from echo2.broadcast.trees import plan, star

BLOCK_BYTES = 4 << 20
KEYFRAME = ArtifactId(Version(0))


def make_plan(scene: dict[str, Any], peer_ids: list[Any]) -> BroadcastPlan:
    links = [
        NodeLink(
            peer_id, node["name"], () if node.get("natted") else (node["address"],), node["up"], node["down"],
            node["rtt"],
        )
        for peer_id, node in zip(peer_ids, scene["nodes"], strict=True)
    ]  # fmt: skip
    if scene["method"] == "star":
        return BroadcastPlan(1, tuple(links), star(links), "star")
    return plan(links, 1, scene["bytes"], scene["chunk_bytes"])


async def run(folder: Path, index: int) -> dict[str, Any]:
    scene = json.loads((folder / "scene.json").read_text())
    mine = scene["nodes"][index]
    identity = tls.load_or_create_identity(folder / mine["name"])
    credentials = tls.load_credentials(folder / mine["name"], identity)
    assert credentials is not None
    shape = LinkShape(mine["up"], mine["down"], mine["rtt"]) if scene["is_shaped"] else LinkShape()
    options = NodeOptions(
        folder / mine["name"] / "chunks", chunk_bytes=scene["chunk_bytes"], shape=shape,
        uplink_limit_bytes_per_s=scene["pace"] * mine["up"],
    )  # fmt: skip
    node, server = BroadcastNode(credentials, options), tls.new_server()
    node.add_to_server(server)
    host, port = mine["address"].rsplit(":", 1)
    tls.bind_server(server, f"{host}:{port}", tls.server_credentials(credentials))
    await server.start()
    await node.start()
    peer_ids = scene["peer_ids"]
    node.set_publisher(peer_ids[0], scene["nodes"][0]["address"])
    made = make_plan(scene, peer_ids)
    node.set_plan(made)
    wanted = len(made.neighbours(identity.peer_id))
    while len(node.stats().links) < wanted:
        await asyncio.sleep(0.05)
    print("READY", flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    cpu_before = _cpu_s()
    gc.freeze()
    try:
        result = await (_publish(node, scene) if index == 0 else _receive(node))
    except TimeoutError:
        result = {"done_at": None}
    stats = node.stats()
    result |= {
        "name": mine["name"], "cpu_s": _cpu_s() - cpu_before, "sent": stats.sent_chunk_bytes,
        "received": stats.received_chunk_bytes, "duplicates": stats.duplicate_bytes, "pulled": stats.pulled_chunks,
        "topology": made.topology, "predicted_s": made.predicted_all_s,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)  # stay and relay until all are done
    late = node.stats()
    print(
        json.dumps({"sent": late.sent_chunk_bytes, "duplicates": late.duplicate_bytes, "cpu_s": _cpu_s() - cpu_before}),
        flush=True,
    )
    await node.stop()
    await server.stop(0)
    return result


async def _publish(node: BroadcastNode, scene: dict[str, Any]) -> dict[str, Any]:
    source = Path(scene["source"]).read_bytes()
    blocks = [source[i : i + BLOCK_BYTES] for i in range(0, len(source), BLOCK_BYTES)]
    begun_at = time.monotonic()
    await node.publish(KEYFRAME, iter(blocks), lambda: "print", len(source))
    return {"begun_at": begun_at, "encoded_at": time.monotonic()}


async def _receive(node: BroadcastNode) -> dict[str, Any]:
    digest = hashlib.sha256()
    first_at = 0.0
    async with asyncio.timeout(300):
        async for step in node.progress():
            match step:
                case ArtifactBegun():
                    first_at = time.monotonic()
                case BlockArrived():
                    digest.update(step.payload)
                case ArtifactSealed():
                    break
    return {"done_at": time.monotonic(), "first_at": first_at, "sha256": digest.hexdigest()}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
