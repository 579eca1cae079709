"""Inspects this machine (GPUs, memory, disk, cores) and chooses the engine that fits it.

Guarantees: a missing tool or device is reported as absent, never an error; a failed check says what it expected and what it found.
Leaves to others: what to do about a failed check (the error ends the worker; a bad finding is logged as a warning).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import format_bytes
from echo2.broadcast.room import store_bytes_min
from echo2.cost_model.sizing import CPU_BYTES, CPU_CACHE_SHARE, ModelSize, handover_bytes
from echo2.worker.findings import Finding, disk_finding, gpu_finding, memory_finding, reach_finding
from echo2.worker.options import EngineChoice

DISK_BYTES_MIN = 64 << 20
DISK_WANTED_BYTES = 2 << 30
"""Less free disk than this, or than the store's limit if that is smaller, is worth a warning."""
REACH_S = 3.0
TOOL_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalGpu:
    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class WorkerMachine:
    gpus: tuple[LocalGpu, ...]
    cores: int
    memory_bytes: int
    free_disk_bytes: int
    has_vllm: bool
    free_memory_bytes: int = 0
    shared_memory_bytes: int = 1 << 62

    @property
    def gpu_text(self) -> str:
        """The GPUs as the operator sees them: `2 x NVIDIA H200`, or `cpu`."""
        if not self.gpus:
            return "cpu"
        names = sorted({gpu.name for gpu in self.gpus})
        return " + ".join(f"{sum(g.name == name for g in self.gpus)} x {name}" for name in names)

    def describe(self) -> str:
        gpu_memory = sum(gpu.memory_bytes for gpu in self.gpus)
        gpus = f"{self.gpu_text} ({format_bytes(gpu_memory)}, driver {self.gpus[0].driver})" if self.gpus else "no GPU"
        return (
            f"{gpus}, {self.cores} cores, {format_bytes(self.memory_bytes)} of memory, "
            f"{format_bytes(self.free_disk_bytes)} of disk free, {'with' if self.has_vllm else 'without'} vLLM"
        )


def parse_gpus(text: str) -> tuple[LocalGpu, ...]:
    """Parses nvidia-smi's rows of name, memory in MiB and driver version; skips other rows."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            gpus.append(LocalGpu(fields[0], int(fields[1]) << 20, fields[2]))
    return tuple(gpus)


def local_gpus() -> tuple[LocalGpu, ...]:
    """The GPUs that nvidia-smi lists; none if it is missing or fails. Takes up to `TOOL_S`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def look(folder: Path) -> WorkerMachine:
    """Inspects this machine. Takes up to `TOOL_S`; `folder` is where the worker needs disk."""
    return WorkerMachine(
        gpus=local_gpus(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_total_bytes(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        has_vllm=importlib.util.find_spec("vllm") is not None,
        free_memory_bytes=memory_free_bytes(),
        shared_memory_bytes=shared_memory_bytes(),
    )


def memory_used_bytes() -> int:
    """Resident memory, in bytes, of this process and all its descendants, such as an engine's processes."""
    page, found, left = os.sysconf("SC_PAGE_SIZE"), 0, [str(os.getpid())]
    while left:
        process = Path("/proc", left.pop())
        with contextlib.suppress(OSError):  # the process has ended, or this kernel does not list children
            found += int((process / "statm").read_text().split()[1]) * page
            for thread in (process / "task").iterdir():
                left += (thread / "children").read_text().split()
    return found


def memory_total_bytes() -> int:
    """This machine's memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def memory_free_bytes() -> int:
    """Memory available on this machine, or left within the container's limit if that is less."""
    free = memory_total_bytes()
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) << 10)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, max(0, limit - int(Path("/sys/fs/cgroup/memory.current").read_text())))
    return free


def findings(machine: WorkerMachine, folder: Path, store_bytes: int) -> list[Finding]:
    """The findings that need no connection to others."""
    driver = machine.gpus[0].driver if machine.gpus else ""
    memory = sum(gpu.memory_bytes for gpu in machine.gpus)
    return [
        gpu_finding(machine.gpu_text, memory, driver),
        memory_finding(machine.memory_bytes, machine.free_memory_bytes),
        disk_finding(str(folder), machine.free_disk_bytes, min(store_bytes or DISK_WANTED_BYTES, DISK_WANTED_BYTES)),
    ]


async def reach(addresses: list[str]) -> Finding:
    """Connects to this worker's own addresses, as a peer would. A router may still block peers."""
    refused = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            refused[address] = str(error) or "no answer"
    return reach_finding(addresses, refused)


def chosen_engine(choice: EngineChoice, machine: WorkerMachine) -> EngineChoice:
    """EMBEDDED or VLLM; AUTO takes vLLM if there is a GPU and vLLM is installed. ConfigError if vLLM is chosen but missing."""
    if choice is EngineChoice.AUTO:
        return EngineChoice.VLLM if machine.gpus and machine.has_vllm else EngineChoice.EMBEDDED
    if choice is EngineChoice.VLLM and not machine.has_vllm:
        raise ConfigError("engine: expected vLLM to be installed (pip install 'echo2[worker]'), it is not")
    return choice


def check_room(
    machine: WorkerMachine, size: ModelSize, published_bytes: int, folder: Path, masters_bytes: int = 0
) -> int:
    """Returns the bytes of host memory left over; ResourceError if a keyframe would not fit in memory, /dev/shm or disk.

    With engines on GPUs the host holds the published weights, a version in transit, and the masters of rounded weights. The
    embedded engine's own weights are host memory too; `cost_model.sizing` decides how much of the rest its cache takes.
    """
    own = masters_bytes if machine.gpus else CPU_BYTES * size.parameters
    needed = own + handover_bytes(published_bytes)
    if needed > machine.memory_bytes:
        raise ResourceError(
            f"memory: expected {format_bytes(needed)} while a keyframe of {format_bytes(published_bytes)} is taken, "
            f"this machine has {format_bytes(machine.memory_bytes)}"
        )
    if machine.gpus and machine.shared_memory_bytes < size.round_bytes:
        raise ResourceError(
            f"/dev/shm: expected {format_bytes(size.round_bytes)} free, through which weights go to the engine, got "
            f"{format_bytes(machine.shared_memory_bytes)}; free some, or give the container more (--shm-size)"
        )
    disk = DISK_BYTES_MIN + store_bytes_min(published_bytes)
    if disk > machine.free_disk_bytes:
        raise ResourceError(
            f"disk at {folder}: expected {format_bytes(disk)} free for chunks, "
            f"got {format_bytes(machine.free_disk_bytes)}"
        )
    spare = machine.memory_bytes - needed
    return spare if machine.gpus else int((1.0 - CPU_CACHE_SHARE) * spare)


def shared_memory_bytes() -> int:
    """Free bytes in /dev/shm. Without /dev/shm no limit applies: weights go to the engine through temporary files on disk."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return 1 << 62
