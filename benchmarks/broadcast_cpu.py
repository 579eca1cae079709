"""CPU cost of a byte over loopback: through our nodes, and as a yardstick over one asyncio TLS connection, nothing else."""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from echo2.base.ids import RunId
from echo2.trust import tls
from echo2.trust.identity import Role, RunAuthority, TlsKey, certificate_request

PIECE = bytes(64 << 10)


def _contexts(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate as the nodes of a run have them."""
    identity, key = tls.load_or_create_identity(folder), TlsKey.generate()
    authority = RunAuthority.create(identity, RunId("cpu"), 1.7e9)
    issued = authority.issue(certificate_request(identity, key), Role.WORKER, 1.7e9)
    (folder / "key.pem").write_bytes(key.to_pem())
    (folder / "certificate.pem").write_bytes(issued.pem)
    return folder / "key.pem", folder / "certificate.pem"


async def _receive(folder: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    finished = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 18):
            pass
        writer.close()
        finished.set()

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await finished.wait()
    server.close()


async def _send(port: int, size_bytes: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    for _ in range(size_bytes // len(PIECE)):
        writer.write(PIECE)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


def cpu_s_per_gib(size_bytes: int = 256 << 20) -> float:
    """CPU seconds of both ends per GiB."""
    with tempfile.TemporaryDirectory() as name:
        _contexts(Path(name))
        command = [sys.executable, "-m", "benchmarks.broadcast_cpu"]
        receiver = subprocess.Popen([*command, "receive", name], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        sender = subprocess.run(
            [*command, "send", port, str(size_bytes)], check=True, capture_output=True, text=True, timeout=120
        )
        used = float(json.loads(sender.stdout)) + float(json.loads(receiver.stdout.readline()))
        receiver.wait(10)
    return used / (size_bytes / 2**30)


def relayed_cpu_s_per_gib(workers: int = 3, mib: float = 192, chunk_kib: int = 0) -> float:
    """CPU seconds of all nodes per GiB that workers received, checked and stored; each relays a share to the others. Chunks are of
    the size that the plan gives so fast links, which is the most that the `lan` preset allows."""
    from benchmarks.broadcast_run import run
    from benchmarks.broadcast_scene import make_scene

    scene = make_scene("homogeneous", workers, scale=20, mib=mib, chunk_kib=chunk_kib)
    return run(scene, "echo2", in_lab=False, is_shaped=False).cpu_s_per_gib(scene)


def _main() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    if sys.argv[1] == "receive":
        asyncio.run(_receive(Path(sys.argv[2])))
    else:
        asyncio.run(_send(int(sys.argv[2]), int(sys.argv[3])))
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), flush=True)


if __name__ == "__main__":
    _main()
