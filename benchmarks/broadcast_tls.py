"""The yardstick on the same links: one asyncio process of bench_broadcast that only moves bytes over TLS.

`python -m benchmarks.broadcast_tls FOLDER INDEX`: the same orders on stdin and lines on stdout as broadcast_peer. The
seed writes the source to one asyncio TLS connection per worker; workers hash what comes and keep nothing. So its CPU per
byte is what Python, TLS and the emulated path cost when nothing is stored, checked, planned or passed on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from benchmarks import priority
from benchmarks.broadcast_peer import cpu_s, line, rss_mib

PIECE_BYTES = 64 << 10


def _context(folder: Path, purpose: int) -> ssl.SSLContext:
    """A key and a certificate as the nodes of a run have them."""
    credentials = json.loads((folder / "credentials.json").read_text())
    (folder / "pair.pem").write_text(credentials["tls_key_pem"] + credentials["certificate_pem"])
    context = ssl.SSLContext(purpose)
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        context.load_cert_chain(folder / "pair.pem")
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def run(folder: Path, index: int) -> None:
    scene = json.loads((folder / "scene.json").read_text())
    if scene["is_lifted"]:
        priority.lift()
    mine = scene["nodes"][index]
    work = _Seed(folder, scene) if index == 0 else _Worker(folder, scene, mine)
    await work.connect()
    print("READY", flush=True)
    await line()
    before = cpu_s()
    result = await work.work()
    print(json.dumps(result | {"name": mine["name"], "topology": "star"}), flush=True)
    await line()
    last = {
        "sent": scene["size_bytes"] * (len(scene["nodes"]) - 1) if index == 0 else 0,
        "received": scene["size_bytes"] if index else 0, "duplicates": 0, "pulled": 0, "trouble": "",
        "cpu_s": cpu_s() - before, "rss_mib": rss_mib(),
    }  # fmt: skip
    print(json.dumps(last), flush=True)


class _Seed:
    def __init__(self, folder: Path, scene: dict[str, Any]) -> None:
        self._folder, self._scene = folder, scene
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> None:
        context = _context(self._folder / self._scene["nodes"][0]["name"], ssl.PROTOCOL_TLS_CLIENT)
        for node in self._scene["nodes"][1:]:
            host, port = node["address"].rsplit(":", 1)
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
                except OSError:  # it does not listen yet
                    await asyncio.sleep(0.1)
                else:
                    self._writers.append(writer)
                    break

    async def work(self) -> dict[str, Any]:
        source, begun_at = (self._folder / "source").read_bytes(), time.monotonic()
        await asyncio.gather(*(self._write(writer, source) for writer in self._writers))
        return {"begun_at": begun_at}

    async def _write(self, writer: asyncio.StreamWriter, source: bytes) -> None:
        for at in range(0, len(source), PIECE_BYTES):
            writer.write(source[at : at + PIECE_BYTES])
            await writer.drain()


class _Worker:
    def __init__(self, folder: Path, scene: dict[str, Any], mine: dict[str, Any]) -> None:
        self._folder, self._mine, self._size_bytes = folder, mine, scene["size_bytes"]
        self._reader: asyncio.Future[asyncio.StreamReader] = asyncio.get_running_loop().create_future()
        self._held: list[asyncio.StreamWriter] = []

    async def connect(self) -> None:
        host, port = self._mine["address"].rsplit(":", 1)
        context = _context(self._folder / self._mine["name"], ssl.PROTOCOL_TLS_SERVER)

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._held.append(writer)
            self._reader.set_result(reader)

        self._server = await asyncio.start_server(take, host, int(port), ssl=context)
        await self._reader

    async def work(self) -> dict[str, Any]:
        reader, digest, received = await self._reader, xxhash.xxh3_128(), 0
        while received < self._size_bytes:
            piece = await reader.read(1 << 18)
            if not piece:
                raise RuntimeError(f"expected {self._size_bytes} bytes of the seed, got {received}")
            digest.update(piece)
            received += len(piece)
        return {"done_at": time.monotonic(), "digest": digest.hexdigest()}


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
