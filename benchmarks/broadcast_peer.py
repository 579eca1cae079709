"""One node process of bench_broadcast: `python -m benchmarks.broadcast_peer FOLDER INDEX`.

Reads FOLDER/scene.json, connects, says READY, waits for GO on stdin, then publishes (index 0) or receives, and prints
what it saw as one JSON line; relays on until STOP, then prints its last counters. Method `star` makes workers not
relay: the seed sends everything to everyone; `all alike`: the plan does not weigh them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from benchmarks import priority
from benchmarks.broadcast_scene import PAUSE_S
from echo2.base.errors import DiskFull
from echo2.base.ids import Version
from echo2.base.units import LinkShape
from echo2.broadcast import uplink
from echo2.broadcast.artifact import UNSEALED_DELTA_SHARE, ArtifactId
from echo2.broadcast.catch_up import ArtifactBegun, ArtifactSealed, BlockArrived
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.broadcast.plan import BroadcastPlan, NodeLink
from echo2.broadcast.trees import Needs, plan, star, weighted_plan
from echo2.trust import tls

BLOCK_BYTES = 4 << 20
KEYFRAME = ArtifactId(Version(0))


def make_plan(scene: dict[str, Any]) -> BroadcastPlan:
    links = [
        NodeLink(
            peer_id, node["name"], () if node["is_natted"] else (node["address"],), node["up"], node["down"],
            node["rtt_s"],
        )
        for peer_id, node in zip(scene["peer_ids"], scene["nodes"], strict=True)
    ]  # fmt: skip
    if scene["method"] == "star":
        return BroadcastPlan(1, tuple(links), star(links), "star")
    chunk_bytes = scene["chunk_bytes"] or 128 << 10
    size_bytes = scene["size_bytes"] // scene["versions"]
    if scene["method"] == "all alike":
        return plan(links, 1, size_bytes, chunk_bytes)
    needs = Needs(tuple(node["weight"] for node in scene["nodes"][1:]), scene["share"])
    return weighted_plan(links, needs, 1, size_bytes, chunk_bytes)


async def run(folder: Path, index: int) -> None:
    scene = json.loads((folder / "scene.json").read_text())
    if scene["is_lifted"]:
        priority.lift()
    if not scene["is_bbr_offered"]:
        refuse_bbr()
    mine = scene["nodes"][index]
    identity = tls.load_or_create_identity(folder / mine["name"])
    credentials = tls.load_credentials(folder / mine["name"], identity)
    assert credentials is not None
    shape = LinkShape(mine["up"], mine["down"], mine["rtt_s"]) if scene["is_shaped"] else LinkShape()
    options = NodeOptions(
        folder / mine["name"] / "chunks", chunk_bytes=scene["chunk_bytes"] or 1 << 20, shape=shape,
        host=mine["address"].rpartition(":")[0].strip("[]"), port=int(mine["address"].rpartition(":")[2]),
    )  # fmt: skip
    node = BroadcastNode(credentials, options)
    node.listen()
    await node.start()
    seed = scene["nodes"][0]
    node.set_publisher(scene["peer_ids"][0], "" if seed["is_natted"] else seed["address"])
    made = make_plan(scene)
    node.set_plan(made)
    wanted = len(made.neighbours(identity.peer_id))
    while len(node.stats().links) < wanted:
        await asyncio.sleep(0.05)
    print("READY", flush=True)
    await line()
    cpu_before = cpu_s()
    gc.freeze()
    result = await (_publish(node, folder / "source", scene) if index == 0 else _receive(node, scene))
    print(json.dumps(result | {"name": mine["name"], "topology": made.topology}), flush=True)
    await line()  # stays and relays until all are done
    stats = node.stats()
    last = {
        "sent": stats.sent_chunk_bytes, "received": stats.received_chunk_bytes, "duplicates": node.session.duplicates_bytes,
        "pulled": node.session.pulled_chunks, "trouble": str(node.exchange.error or ""),
        "cpu_s": cpu_s() - cpu_before, "rss_mib": rss_mib(),
        "connections": sum(link.connections for link in stats.links),
    }  # fmt: skip
    print(json.dumps(last), flush=True)
    await node.stop()


def refuse_bbr() -> None:
    """This process is answered as by a kernel that lets it choose no congestion control. The option belongs to the machine,
    not to a namespace, so it is not the kernel that is asked to refuse."""
    set_option = uplink._set
    uplink._set = lambda fd, option, *how: option != uplink._TCP_CONGESTION and set_option(fd, option, *how)


async def line() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def _publish(node: BroadcastNode, path: Path, scene: dict[str, Any]) -> dict[str, Any]:
    """A keyframe and its deltas: one version's bytes each or, if only the second is measured, all of them both times."""
    source = path.read_bytes()
    size = len(source) // scene["versions"]
    parts = [source] * 2 if scene["is_second"] else [source[i : i + size] for i in range(0, len(source), size)]
    begun_at = time.monotonic()
    for version, part in enumerate(parts):
        if version and scene["is_second"]:
            await asyncio.sleep(PAUSE_S)
            begun_at = time.monotonic()
        artifact = ArtifactId(Version(version), Version(version - 1) if version else None)
        weights_bytes = int(size / (UNSEALED_DELTA_SHARE if version else 1))
        blocks = (part[i : i + BLOCK_BYTES] for i in range(0, len(part), BLOCK_BYTES))
        await node.publish(artifact, blocks, lambda: "print", weights_bytes)
    return {"begun_at": begun_at}


async def _receive(node: BroadcastNode, scene: dict[str, Any]) -> dict[str, Any]:
    digest, sealed_at = xxhash.xxh3_128(), list[float]()
    try:
        async for step in node.progress():
            match step:
                case ArtifactBegun() if scene["is_second"]:
                    digest = xxhash.xxh3_128()
                case BlockArrived():
                    digest.update(step.payload)
                case ArtifactSealed():
                    sealed_at.append(time.monotonic())
                    if len(sealed_at) == (2 if scene["is_second"] else scene["versions"]):
                        break
                case _:
                    pass
    except DiskFull:
        return {}  # the node tells of it
    return {"done_at": sealed_at[-1], "sealed_at": sealed_at, "digest": digest.hexdigest()}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
