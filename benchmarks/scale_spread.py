"""A keyframe and a delta of a real model's shape, made block by block from a seed, over three node processes on loopback.

    python -m benchmarks.scale_spread MODEL      prints its rows as one JSON line

One process publishes, three fetch, all through the real node; each fetcher decodes every block as it comes, compares all
its elements with what the seed gives, and adds up the fingerprint: no process ever holds the weights. After it the
publisher's process starts again on its store. Seconds are those of this machine, whose load the row tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.broadcast_peer import line, rss_mib
from echo2.base.ids import RunId, Version
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.catch_up import ArtifactSealed, BlockArrived
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.weights.block import EncodedBlock, decode_sparse, decode_whole, encode_block, encode_whole
from echo2.weights.container import (
    BlockFrame,
    CodecSetting,
    DeltaHeader,
    EndFrame,
    HeaderFrame,
    Method,
    TensorTable,
    parse_frame,
)
from echo2.weights.elements import BLOCK_ELEMENTS, Bits, Block, TensorSpec, blocks_of, element_type_of, sorted_specs
from echo2.weights.encode import Encoding, in_order
from echo2.weights.fingerprint import MODULUS, header_term, sum_bits
from echo2.weights.marks import Finds
from tests.ports import choose_ports

KEYFRAME, DELTA = ArtifactId(Version(0)), ArtifactId(Version(1), Version(0))
FETCHERS, KEY, POOL, CHANGED = 3, 7, 1 << 22, 0.02
RUN = RunId("scale")


class SeededWeights:
    """Version 0 and 1 of a model's shape, any block at any time. Values are cut from one pool of normal draws."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from benchmarks.bench_scale import config_of

        given = config_of(model)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
        element = element_type_of("x", torch.empty(0, dtype=torch.bfloat16))
        specs = (TensorSpec(name, element, tuple(p.shape)) for name, p in made.named_parameters())
        self.table = TensorTable(sorted_specs(specs), ())
        self.blocks = blocks_of(self.table.specs, BLOCK_ELEMENTS)
        self.bytes = 2 * sum(spec.element_count for spec in self.table.specs)
        draws = torch.empty(POOL + BLOCK_ELEMENTS).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
        self._pool = draws.bfloat16().view(torch.int16).numpy().view(np.uint16)
        self.start = sum(header_term(KEY, spec) for spec in self.table.specs) % MODULUS

    def old(self, block: Block) -> list[Bits]:
        begin = (block.index * 7_368_787) % POOL
        whole = self._pool[begin : begin + block.element_count]
        return [whole[s.base : s.base + s.count] for s in block.segments]

    def new(self, block: Block) -> list[Bits]:
        """Two elements in a hundred are one unit larger."""
        rng = np.random.default_rng((1, block.index))
        places = rng.integers(0, block.element_count, int(CHANGED * block.element_count))
        whole = np.concatenate(self.old(block))
        whole[places] += 1
        return [whole[s.base : s.base + s.count] for s in block.segments]

    def step_of(self, block: Block, bits: list[Bits]) -> int:
        pairs = zip(block.segments, bits, strict=True)
        return sum(sum_bits(s.spec.name, part, KEY, s.start) for s, part in pairs) % MODULUS

    def keyframe(self, block: Block) -> EncodedBlock:
        bits = self.old(block)
        method, payload = encode_whole(bits, block.element)
        return EncodedBlock(method, payload, self.step_of(block, bits))

    def delta(self, block: Block) -> EncodedBlock:
        return encode_block(block, self.old(block), self.new(block), CodecSetting.FAST, KEY, Finds(block))

    def encoding(self, header: DeltaHeader, start: int, code: Callable[[Block], EncodedBlock]) -> Encoding:
        coded = in_order(self.blocks, code, ThreadPoolExecutor(2), 2)
        return Encoding(header, self.table, coded, len(self.blocks), start)


class CheckedSink:
    """Decodes frames of one artifact, compares each block with the seed's, and ends with the fingerprint."""

    def __init__(self, weights: SeededWeights) -> None:
        self._weights = weights
        self._found = 0
        self._blocks = 0
        self.is_proven = False

    def take(self, frame: bytes) -> None:
        parsed = parse_frame(frame)
        if isinstance(parsed, HeaderFrame):
            self._found, self._blocks = parsed.header.parent_fingerprint or self._weights.start, 0
        elif isinstance(parsed, EndFrame):
            assert self._blocks == len(self._weights.blocks) == parsed.block_count, "every block came once"
            assert parsed.target_fingerprint == self._found, "the fingerprint is the publisher's"
            self.is_proven = True
        else:
            self._found = (self._found + self._step(parsed)) % MODULUS
            self._blocks += 1

    def _step(self, frame: BlockFrame) -> int:
        block = self._weights.blocks[frame.index]
        if frame.method is Method.SPARSE:
            live = [part.copy() for part in self._weights.old(block)]
            changes = decode_sparse(frame.payload, block, live)
            step = changes.settle(block, KEY)
            assert changes.move(block, live, False) == 0, "no element leaves its range"
            wanted = self._weights.new(block)
        else:
            whole = np.empty(block.element_count, block.element.bits_dtype)
            decode_whole(frame.method, frame.payload, block.element, whole)
            live = [whole[s.base : s.base + s.count] for s in block.segments]
            step, wanted = self._weights.step_of(block, live), self._weights.old(block)
        assert all(np.array_equal(a, b) for a, b in zip(live, wanted, strict=True)), f"block {block.index}: other bits"
        return step


async def node_of(folder: Path, index: int) -> tuple[BroadcastNode, float]:
    """This process's node, started; and how long it took to take over what lay in its store."""
    scene = json.loads((folder / "scene.json").read_text())
    identity = tls.load_or_create_identity(folder / f"n{index}")
    credentials = tls.load_credentials(folder / f"n{index}", identity)
    assert credentials is not None
    port = int(scene["addresses"][index].rpartition(":")[2])
    node = BroadcastNode(credentials, NodeOptions(folder / f"n{index}" / "chunks", port=port))
    node.listen()
    began = time.monotonic()
    await node.start()
    start_s = time.monotonic() - began
    node.set_publisher(scene["peer_ids"][0], scene["addresses"][0])
    return node, start_s


def say(**told: object) -> None:
    print(json.dumps(told), flush=True)


async def publish(folder: Path, model: str) -> None:
    node, _ = await node_of(folder, 0)
    weights = await asyncio.to_thread(SeededWeights, model)
    while len(node.stats().links) < FETCHERS:
        await asyncio.sleep(0.05)
    start = weights.start
    for artifact, code in ((KEYFRAME, weights.keyframe), (DELTA, weights.delta)):
        header = DeltaHeader(
            artifact.version, artifact.parent, None if artifact.parent is None else start, fingerprint_key=KEY
        )
        made, began = weights.encoding(header, start, code), time.monotonic()
        size = await node.publish(artifact, made, lambda made=made: f"{made.fingerprint:016x}", weights.bytes)  # type: ignore[misc]
        start = made.fingerprint
        say(at=began, encode_s=time.monotonic() - began, bytes=size.total_bytes, weights_bytes=weights.bytes)
        await line()
    say(rss_mib=rss_mib())
    await node.stop()


async def fetch(folder: Path, index: int, model: str) -> None:
    node, _ = await node_of(folder, index)
    weights = await asyncio.to_thread(SeededWeights, model)
    sink = CheckedSink(weights)
    async for step in node.progress():
        match step:
            case BlockArrived():
                await asyncio.to_thread(sink.take, step.payload)
            case ArtifactSealed(artifact, _, _):
                assert sink.is_proven, f"{artifact} came out as the seed says"
                sink.is_proven = False
                say(at=time.monotonic(), version=artifact.version)
                if artifact == DELTA:
                    break
            case _:
                pass
    await line()
    say(rss_mib=rss_mib())
    await node.stop()


async def restart(folder: Path) -> None:
    """The publisher's node again, on the store that it left."""
    node, start_s = await node_of(folder, 0)
    say(start_s=start_s, rss_mib=rss_mib(), bytes=node.library.store.used_bytes)
    await node.stop()


# ---- the scene


def lay_out(folder: Path) -> None:
    ports = choose_ports((0,) * (FETCHERS + 1))
    coordinator = Identity.generate()
    authority = RunAuthority.create(coordinator, RUN, time.time())
    peer_ids = []
    for index in range(FETCHERS + 1):
        identity, key = tls.load_or_create_identity(folder / f"n{index}"), TlsKey.generate()
        role = Role.LEARNER if index == 0 else Role.WORKER
        issued = authority.issue(certificate_request(identity, key), role, time.time())
        credentials = tls.Credentials(
            identity, key.to_pem(), issued, authority.certificate_pem, RUN, coordinator.peer_id, "none:1"
        )
        tls.save_credentials(folder / f"n{index}", credentials)
        peer_ids.append(identity.peer_id)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    (folder / "scene.json").write_text(json.dumps({"peer_ids": peer_ids, "addresses": addresses}))


def process(folder: Path, what: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scale_spread", "--inside", str(folder), what, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, f"process {process.args} ended"
    found: dict[str, Any] = json.loads(text)
    return found


def go_on(processes: list[subprocess.Popen[str]]) -> None:
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()


def spread(folder: Path, model: str) -> list[dict[str, Any]]:
    """What each artifact took, then the peaks, then the restart."""
    lay_out(folder)
    fetchers = [process(folder, "fetch", index, model) for index in range(1, FETCHERS + 1)]
    publisher = process(folder, "publish", model)
    everyone = [publisher, *fetchers]
    try:
        rows = []
        for kind in ("keyframe", "delta"):
            left = told(publisher)
            done_at = max(told(each)["at"] for each in fetchers)
            rows.append({"kind": kind, "seconds": done_at - left["at"], **left, "load": os.getloadavg()[0]})
            go_on([publisher])
        peaks = [told(publisher)["rss_mib"]]
        go_on(fetchers)
        peaks += [told(each)["rss_mib"] for each in fetchers]
        for each in everyone:
            each.wait(60)
        again = process(folder, "restart")
        everyone.append(again)
        restarted = told(again)
        again.wait(60)
        return [
            *rows,
            {"kind": "peaks", "publisher": peaks[0], "fetchers": peaks[1:]},
            {"kind": "restart", **restarted},
        ]
    finally:
        for each in everyone:
            if each.poll() is None:
                each.kill()
                each.wait()


def main() -> None:
    if sys.argv[1] != "--inside":
        with tempfile.TemporaryDirectory(dir=os.environ.get("SCALE_FOLDER")) as folder:
            print(json.dumps(spread(Path(folder), sys.argv[1])))
        return
    folder, what, *rest = Path(sys.argv[2]), *sys.argv[3:]
    match what:
        case "publish":
            asyncio.run(publish(folder, rest[0]))
        case "fetch":
            asyncio.run(fetch(folder, int(rest[0]), rest[1]))
        case _:
            asyncio.run(restart(folder))


if __name__ == "__main__":
    main()
