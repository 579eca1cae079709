"""The machine: its GPUs, memory, disk, price, provider and preemption notices, and the engine that fits it.

Guarantees: a missing tool or device is reported as absent, never an error; each finding names the thing checked, what was found
and, if that is bad, what was expected; findings go to the log and to `echo-worker status`, what makes work impossible raises
ResourceError. A preemption notice is acted on once; a service that does not answer does not count as a notice (most clouds also
send SIGTERM, which works without this).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import address_of, format_bytes
from echo2.broadcast.artifact import store_bytes_min
from echo2.cost_model.sizing import CPU_CACHE_SHARE, ModelSize, Quantisation, handover_bytes

DRIVER_MIN = 525  # the oldest NVIDIA driver that any CUDA 12 build runs on; builds for CUDA 13 need 580
DRIVER_CUDA_13 = 580  # NVIDIA's table of drivers for CUDA 13
SKEW_S_MAX = 5.0
"""More skew than this is worth a warning: lease deadlines are corrected by the skew, but the validity of certificates is not."""
FREE_MEMORY_MIN = 1 << 30  # Python, torch and buffers before any model


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    text: str
    is_good: bool | None = True  # None: it cannot be told here
    advice: str = ""  # what to do about it; even a good finding may have some

    def line(self) -> str:
        return f"{self.what}: {self.text}"


def advertised_finding(advertised: str, seen_host: str, is_reachable: bool) -> Finding:
    """Whether this worker answers at the address it advertises. `seen_host`: the source address that the relay sees for this
    machine, where it dialled the advertised port."""
    host, _, port = advertised.rpartition(":")
    dialled = address_of(seen_host, int(port))
    if is_reachable and dialled == advertised:
        text = f"{advertised} answers as this worker"
    elif is_reachable:
        text = f"this worker answers at {dialled}; {advertised} was named, but its connections come from {seen_host}: peers are "
        text += f"told {dialled}"
    else:
        note = "" if dialled == advertised else f" (connections of this machine come from {seen_host}, not from {host})"
        text = (
            f"{advertised}: expected this worker to answer, nothing with its certificate answered at {dialled}{note}; it works "
            f"as a hidden worker. Map that port to worker.port, open it in the firewall, or leave --advertise out"
        )
    return Finding("advertised address", text, is_good=is_reachable)


def gpu_finding(names: str, memory_bytes: int, driver: str) -> Finding:
    """`driver`: its version; empty: there is no GPU."""
    if not driver:
        return Finding("GPU", "none; the engine works on the CPU")
    major = int(driver.partition(".")[0]) if driver.partition(".")[0].isdigit() else 0
    text = f"{names}, {format_bytes(memory_bytes)} of memory, driver {driver}"
    if major < DRIVER_MIN:
        return Finding("GPU", f"{text}: expected a driver of at least {DRIVER_MIN}", is_good=False)
    if major < DRIVER_CUDA_13:
        return Finding("GPU", f"{text}, too old for builds for CUDA 13 (they need {DRIVER_CUDA_13})")
    return Finding("GPU", text)


def memory_finding(total_bytes: int, free_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    missed = "" if free_bytes >= FREE_MEMORY_MIN else f": expected at least {format_bytes(FREE_MEMORY_MIN)} free"
    return Finding("memory", text + missed, is_good=not missed)


def disk_finding(folder: str, free_bytes: int, store_bytes: int) -> Finding:
    missed = "" if free_bytes >= store_bytes else f": expected {format_bytes(store_bytes)} for chunks"
    return Finding("disk", f"{format_bytes(free_bytes)} free at {folder}{missed}", is_good=not missed)


def clock_finding(skew_s: float) -> Finding:
    """`skew_s`: seconds by which the coordinator's clock is ahead of this one."""
    text = f"{abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'} the coordinator's"
    missed = f": expected at most {SKEW_S_MAX:.0f} s; is time synchronised?" if abs(skew_s) > SKEW_S_MAX else ""
    return Finding("clock", text + missed, is_good=not missed)


def rate_finding(tokens_per_s: float, slot_count: int) -> Finding:
    if not tokens_per_s:
        return Finding("rate", "unknown: the engine sampled no token of its first requests; the first lease will tell")
    return Finding("rate", f"{tokens_per_s:.0f} tokens/s with {slot_count} sequences, measured before the first lease")


PRICE_VARIABLE = "ECHO2_PRICE_USD_PER_HOUR"
PRICE_MAX = 1e6  # no machine costs as much: it is a mistyped number


def price_of(flag_usd_per_hour: float, environment: Mapping[str, str]) -> float:
    """USD an hour: the option before the environment; if neither names a price, 0: a machine of one's own is free."""
    text = "" if flag_usd_per_hour else environment.get(PRICE_VARIABLE, "").strip()
    try:
        price = float(text) if text else flag_usd_per_hour
    except ValueError:
        price = -1.0
    if text and not 0 <= price < PRICE_MAX:
        raise ConfigError(f"{PRICE_VARIABLE}: expected USD an hour from 0 to {PRICE_MAX:.0f}, got {text[:40]!r}")
    _log.info("price: %g USD/h (%s)", price, PRICE_VARIABLE if text else "worker.price_usd_per_hour")
    return price


CHARS_MAX = 64  # as the wire's NAME; a column of the page


def place_of(declared: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """The declared PROVIDER/REGION; if none is declared, what the variables of RunPod, Vast.ai or SkyPilot say. Each is
    printable and at most `CHARS_MAX` characters; empty: not known."""
    provider, _, region = declared.partition("/")
    if not provider:
        provider, region = _detected_place(environment)
    provider, region = ("".join(c for c in text[:CHARS_MAX] if c.isprintable()) for text in (provider, region))
    return provider, region


def _detected_place(environment: Mapping[str, str]) -> tuple[str, str]:
    if "RUNPOD_POD_ID" in environment:
        return "runpod", environment.get("RUNPOD_DC_ID", "")
    if "VAST_CONTAINERLABEL" in environment:
        return "vast.ai", ""
    with contextlib.suppress(ValueError):
        cluster = json.loads(environment.get("SKYPILOT_CLUSTER_INFO", "{}"))
        if isinstance(cluster, dict):
            return str(cluster.get("cloud") or "").lower(), str(cluster.get("region") or "")
    return "", ""


POLL_S = 2.0  # clouds give 30 s of notice or more
ANSWER_S = 1.5  # the metadata service is on the machine's own network
ANSWER_BYTES_MAX = 4096  # its answers are one line
_log = logging.getLogger("echo2.worker")


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Where to look. A notice is a response with status 200 whose text contains `word` (empty: any text)."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    word: str = ""
    token_url: str = ""  # PUT here first; the answer is sent along in the header `token_header`
    token_header: str = ""


CLOUDS = {
    "aws": NoticeSource(
        "http://169.254.169.254/latest/meta-data/spot/instance-action",
        token_url="http://169.254.169.254/latest/api/token",
        token_header="X-aws-ec2-metadata-token",
    ),
    "gcp": NoticeSource(
        "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
        headers=(("Metadata-Flavor", "Google"),),
        word="TRUE",
    ),
    "azure": NoticeSource(
        "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
        headers=(("Metadata", "true"),),
        word="Preempt",
    ),
}


def source_of(text: str) -> NoticeSource:
    """The source for a cloud's name, or for the http address of a service that answers 200 before a preemption. ConfigError for
    anything else."""
    if text in CLOUDS:
        return CLOUDS[text]
    if text.startswith(("http://", "https://")):
        return NoticeSource(text)
    raise ConfigError(f"preemption notice: expected {', '.join(sorted(CLOUDS))} or an http address, got {text!r}")


async def watch(source: NoticeSource, noticed: Callable[[str], None]) -> None:
    while not await asyncio.to_thread(_is_noticed, source):
        await asyncio.sleep(POLL_S)
    _log.warning("this machine will be taken away, says %s", source.url)
    noticed("preemption notice")
    await asyncio.Event().wait()


def _is_noticed(source: NoticeSource) -> bool:
    """Asks the service; any error, or a status other than 200, is no notice."""
    # Metadata services are link-local: a proxy could not reach this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = dict(source.headers)
    try:
        if source.token_url:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            asked = urllib.request.Request(source.token_url, method="PUT", headers=lifetime)
            with opener.open(asked, timeout=ANSWER_S) as answer:
                headers[source.token_header] = answer.read(ANSWER_BYTES_MAX).decode("ascii", "replace").strip()
        with opener.open(urllib.request.Request(source.url, headers=headers), timeout=ANSWER_S) as answer:
            text = answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
            return answer.status == 200 and source.word in text
    except (OSError, ValueError, HTTPException):
        return False


DISK_BYTES_MIN = 64 << 20  # logs and the identity beside the store
DISK_WANTED_BYTES = 2 << 30  # less free disk than this is worth a warning
REACH_S = 3.0  # a host that does not answer is behind a firewall
TOOL_S = 10.0  # nvidia-smi without its daemon takes seconds


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


@dataclass(frozen=True, slots=True)
class Hardware:
    """What was determined about this machine before the worker joined. `read_memory`: bytes used by this worker, and in all."""

    machine: WorkerMachine
    engine: str
    price_usd_per_hour: float
    provider: str
    region: str
    read_memory: Callable[[], tuple[int, int]]


def parse_gpus(text: str, visible: str | None = None) -> tuple[LocalGpu, ...]:
    """Parses nvidia-smi's rows of name, memory in MiB, driver version and UUID; skips other rows. `visible`: which of them, as
    CUDA_VISIBLE_DEVICES says it: numbers or beginnings of UUIDs, up to the first unknown one. None, or parts of GPUs (MIG): all."""
    gpus: list[tuple[str, LocalGpu]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 3 and fields[1].isdigit():
            gpus.append(("".join(fields[3:]), LocalGpu(fields[0], int(fields[1]) << 20, fields[2])))
    if visible is None or "MIG" in visible:
        return tuple(gpu for _, gpu in gpus)
    chosen: list[LocalGpu] = []
    for name in map(str.strip, visible.split(",")):
        named = [gpu for at, (uuid, gpu) in enumerate(gpus) if name == str(at) or (name and uuid.startswith(name))]
        if not named:
            break
        chosen.append(named[0])
    return tuple(chosen)


def local_gpus() -> tuple[LocalGpu, ...]:
    """The GPUs that nvidia-smi lists and this process may use; none if it is missing or fails. Takes up to `TOOL_S`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if done.returncode == 0 else ()


def look(folder: Path) -> WorkerMachine:
    """Inspects this machine. Takes up to `TOOL_S`; `folder` is where the worker needs disk. What chunks take there counts as free:
    newer ones take their place."""
    free_bytes = shutil.disk_usage(folder).free
    with contextlib.suppress(OSError):  # a worker that is at work there drops some
        free_bytes += sum(path.stat().st_size for path in folder.glob("chunks/*.artifact"))
    return WorkerMachine(
        gpus=local_gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_total_bytes(),
        free_disk_bytes=free_bytes,
        has_vllm=importlib.util.find_spec("vllm") is not None,
        free_memory_bytes=memory_free_bytes(),
        shared_memory_bytes=shared_memory_bytes(),
    )


def memory_used_bytes() -> int:
    """Resident memory, in bytes, of this process and all its descendants, such as an engine's processes."""
    page, total, left = os.sysconf("SC_PAGE_SIZE"), 0, [str(os.getpid())]
    while left:
        process = Path("/proc", left.pop())
        with contextlib.suppress(OSError):  # the process has ended, or this kernel does not list children
            total += int((process / "statm").read_text().split()[1]) * page
            for thread in (process / "task").iterdir():
                left += (thread / "children").read_text().split()
    return total


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


def findings(machine: WorkerMachine, folder: Path) -> list[Finding]:
    driver = machine.gpus[0].driver if machine.gpus else ""
    memory = sum(gpu.memory_bytes for gpu in machine.gpus)
    return [
        gpu_finding(machine.gpu_text, memory, driver),
        memory_finding(machine.memory_bytes, machine.free_memory_bytes),
        disk_finding(str(folder), machine.free_disk_bytes, DISK_WANTED_BYTES),
    ]


async def reach(addresses: list[str]) -> Finding:
    """Connects to this worker's own addresses, as a peer would. A router may still block peers."""
    if not addresses:
        return Finding("reach", "no address to tell peers: it forwards over connections that it opens", is_good=False)
    refused = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            refused.append(f"{address} ({str(error) or 'no answer'})")
    text = f"peers are told {', '.join(addresses)}"
    if refused:
        return Finding("reach", f"{text}, but from here it does not answer: {'; '.join(refused)}", is_good=False)
    return Finding("reach", text)


def chosen_engine(choice: str, machine: WorkerMachine) -> str:
    """The engine's name; `auto` takes vLLM if there is a GPU and vLLM is installed. ConfigError if vLLM is chosen but missing."""
    if choice == "auto":
        return "vllm" if machine.gpus and machine.has_vllm else "embedded"
    if choice == "vllm" and not machine.has_vllm:
        raise ConfigError("engine: expected vLLM to be installed (pip install vllm), it is not")
    return choice


def check_room(
    machine: WorkerMachine,
    size: ModelSize,
    published_bytes: int,
    folder: Path,
    quantisation: Quantisation = Quantisation.NONE,
    engines: int = 1,
    base_bytes: int = 0,
) -> int:
    """Returns the bytes of host memory left over; ResourceError if a keyframe would not fit in memory, /dev/shm or disk. With
    engines on GPUs the host holds the published weights, a version in transit, and the masters of rounded weights. The embedded
    engine's own weights are host memory too; `cost_model.sizing` decides how much of the rest its cache takes. `base_bytes`: of an
    adapter's base, which the engine loads there."""
    weights = engines * size.masters_bytes(quantisation) if machine.gpus else quantisation.cpu_bytes * size.parameters
    needed = weights + base_bytes + handover_bytes(published_bytes)
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
            f"disk at {folder}: expected {format_bytes(disk)} for chunks, got {format_bytes(machine.free_disk_bytes)}"
        )
    spare = machine.memory_bytes - needed
    return spare if machine.gpus else int((1.0 - CPU_CACHE_SHARE) * spare)


def shared_memory_bytes() -> int:
    """Free bytes in /dev/shm. Without /dev/shm no limit applies: weights go to the engine through temporary files on disk."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return 1 << 62
