"""`echo2 doctor`: checks this machine and says what to do about each problem.

Guarantees: changes nothing, joins no run and uses up no token; each line says what was found and, if it is bad, what was expected
and what to do. Exit code 6 if anything is bad. Waits for: the disk, and the coordinator as doctor_network says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import ResourceError
from echo2.base.units import format_bytes
from echo2.cli.doctor_network import coordinator_findings, no_link_findings, ports_finding, worker_findings
from echo2.cli.extras import MODULES
from echo2.cli.learner_room import LearnerMachine, shortages
from echo2.cli.link_text import link_text
from echo2.cli.run_shape import fit_rows, guessed_model_of, learner_line, lengths_of
from echo2.config.run import RunConfig
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.cost_model.sizing import ModelSize, worker_fit
from echo2.trust.identity import JoinLink
from echo2.worker.findings import Finding, disk_finding, gpu_finding, memory_finding
from echo2.worker.options import EngineChoice

if TYPE_CHECKING:
    from echo2.worker.runtime.machine import WorkerMachine

TIMEOUT_S = 5.0
DISK_WANTED_BYTES = 8 << 30
DISK_PROBE_BYTES = 32 << 20
DISK_SLOW_BYTES_PER_S = 20e6
PYTHON_MIN = (3, 11)
ADVICE = {
    "Python": "install Python 3.11 or newer and make a new virtual environment with it",
    "GPU": "update the NVIDIA driver",
    "torch": "install the CUDA build of torch in this environment (its own index has it), or vLLM, which brings one",
    "memory": "close what else runs, choose a smaller model, or rent a machine with more",
    "containment": "needed by a learner: allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
    "and newer install the system's package bubblewrap, whose AppArmor profile allows them; in a container, its runtime must)",
    "rewards": "remove task.trusted_rewards, unless nothing but your own models' text can ever reach this learner",
    "disk": "free space, or point --folder at another disk",
    "disk speed": "point --folder at a local disk: chunks and the journal are written as they come",
    "clock": "switch time synchronisation on (timedatectl set-ntp true): certificates and leases go by the clock",
}


def run_doctor(own: argparse.Namespace, config: RunConfig) -> int:
    """Prints the findings; raises ResourceError, after all of them, if any is bad."""
    folder = own.folder or Path.cwd()
    found = list(_findings(folder, link_text(own.link) if own.link else "", config))
    if own.json:
        rows = [{"what": f.what, "found": f.text, "is_good": f.is_good, "advice": _advice(f)} for f in found]
        print(json.dumps(rows, indent=1))
    else:
        for finding in found:
            print(f"{'ok ' if finding.is_good else 'BAD'}  {finding.line()}")
            if _advice(finding):
                print(f"       {_advice(finding)}")
    bad = [finding.what for finding in found if not finding.is_good]
    if bad:
        raise ResourceError(f"doctor: {len(bad)} problem{'' if len(bad) == 1 else 's'}: {', '.join(bad)}")
    return 0


def _advice(finding: Finding) -> str:
    if finding.advice or finding.is_good:
        return finding.advice
    return ADVICE.get(finding.what, "see docs/troubleshooting.md")


def _findings(folder: Path, link: str, config: RunConfig) -> Iterator[Finding]:
    from echo2.worker.runtime.machine import look

    folder = _existing(folder)
    machine = look(folder)
    yield _python()
    yield _packages()
    yield from _containment(config)
    driver = machine.gpus[0].driver if machine.gpus else ""
    yield gpu_finding(machine.gpu_text, sum(gpu.memory_bytes for gpu in machine.gpus), driver)
    yield _torch(bool(machine.gpus))
    yield memory_finding(machine.memory_bytes, machine.free_memory_bytes)
    yield disk_finding(str(folder), machine.free_disk_bytes, DISK_WANTED_BYTES)
    if config.model.path:
        yield from model_findings(machine, config)
    yield _disk_speed(folder)
    yield _clock()
    if link:
        yield from coordinator_findings(JoinLink.parse(link), config)
    else:
        yield ports_finding(config)
        yield from no_link_findings()
    yield from worker_findings()


def model_findings(machine: WorkerMachine, config: RunConfig) -> Iterator[Finding]:
    """Checks how the run's model fits this machine, as a worker and as its learner, and workers on the catalogue's kinds of
    machine."""
    from echo2.worker.runtime.machine import chosen_engine

    size, origin = guessed_model_of(config.model.path)
    lengths = lengths_of(config)
    shape = f"{size.billions:.3g} billion parameters ({origin}), sequences of up to {lengths.of(size)} tokens"
    is_vllm = chosen_engine(EngineChoice(config.worker.engine), machine) is EngineChoice.VLLM
    gpus = [gpu.memory_bytes for gpu in machine.gpus] if is_vllm else []
    try:
        here = worker_fit(size, gpus, machine.memory_bytes, lengths).reason
    except ResourceError as error:
        here = f"no worker: {error}"
    yield Finding("model", f"{shape}; here: {here}")
    yield learner_finding(machine, config, size)
    for name, gpu_count, sequences, *_, instead in fit_rows(size, lengths, built_in_catalogue().values()):
        kind = f"{gpu_count} x {name}" if gpu_count else name
        yield Finding(f"a worker on {kind}", f"{sequences} sequences" if sequences else f"would fit: {instead}")


def learner_finding(machine: WorkerMachine, config: RunConfig, size: ModelSize) -> Finding:
    """Checks whether the learner fits here. Under torchrun it counts the GPUs of all ranks (`WORLD_SIZE`)."""
    here = [] if config.learner.device == "cpu" else [gpu.memory_bytes for gpu in machine.gpus]
    ranks = os.environ.get("WORLD_SIZE", "")
    count = max(len(here), int(ranks)) if here and ranks.isdigit() else len(here)
    room = LearnerMachine(
        count, min(here, default=0), machine.memory_bytes, machine.free_disk_bytes, min(count, len(here))
    )
    needed = learner_line(config, size, count, min(here, default=machine.memory_bytes)).removeprefix("learner: ")
    short = shortages(config, size, room)
    if not short:
        return Finding("learner of it here", needed, is_good=count % config.learner.replicas == 0)
    told = "; ".join(f"{one.what}: {one.text}" for one in short)
    instead = "; ".join(f"for {one.what}: {one.would_fit}" for one in short)
    advice = (
        f"what would fit, {instead}. Only the learner's machine needs it; for a learner of several machines ask with "
    )
    return Finding("learner of it here", f"{needed}. Too little here: {told}", False, advice + "WORLD_SIZE=RANKS set")


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _python() -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < PYTHON_MIN:
        return Finding("Python", f"{text}: expected 3.11 or newer", is_good=False)
    return Finding("Python", text)


def _packages() -> Finding:
    """Lists the roles that this environment has the packages for."""
    roles = ["coordinator"]
    missing = {extra: [m for m in names if importlib.util.find_spec(m) is None] for extra, names in MODULES.items()}
    roles += [role for role, extra in (("learner", "learner"), ("worker", "engine")) if not missing[extra]]
    lacking = [f"{extra} lacks {', '.join(names)}" for extra, names in missing.items() if names]
    engines = "vLLM " + _version_of("vllm") if importlib.util.find_spec("vllm") else "the embedded engine"
    text = f"echo2 {_version_of('echo2')} can be {', '.join(roles)}"
    text += f"; workers use {engines}" if "worker" in roles else ""
    return Finding("packages", "; ".join([text, *lacking]))


def _containment(config: RunConfig) -> Iterator[Finding]:
    """Checks whether a learner here could contain the code that reads completions. Workers and coordinators run no such code."""
    from echo2.contain.runtime.box import bubblewrap, containment_problem
    from echo2.tasks.executing import PLAIN_TASKS, trusted_text

    if config.task.trusted_rewards:
        for name, args in config.task.asked:
            yield Finding("rewards", trusted_text(name, args), is_good=False)
    problem = containment_problem()
    if not problem:
        yield Finding("containment", f"rewards and tools can be contained, by {bubblewrap()}")
    elif config.task.trusted_rewards or all(name in PLAIN_TASKS for name, _ in config.task.asked):
        names = ", ".join(name for name, _ in config.task.asked)
        yield Finding("containment", f"none, and task {names} needs none as configured; {problem}")
    else:
        yield Finding("containment", problem, is_good=False)


def _version_of(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return "of an unknown version"


def _torch(has_gpu: bool) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed; coordinators and operators need none")
    import torch

    if has_gpu and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return Finding("torch", f"{torch.__version__}, {built}: expected it to see the GPU", is_good=False)
    seen = f"sees {torch.cuda.device_count()} GPU" if torch.cuda.is_available() else "on the CPU"
    return Finding("torch", f"{torch.__version__}, {seen}")


def _disk_speed(folder: Path) -> Finding:
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(DISK_PROBE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = DISK_PROBE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        return Finding("disk", f"{folder}: expected to be able to write there, got: {error}", is_good=False)
    text = f"{format_bytes(int(rate))}/s written and synced"
    if rate < DISK_SLOW_BYTES_PER_S:
        return Finding("disk speed", f"{text}: expected at least {DISK_SLOW_BYTES_PER_S / 1e6:.0f} MB/s", is_good=False)
    return Finding("disk speed", text)


def _clock() -> Finding:
    tool = shutil.which("timedatectl")
    said = ""
    if tool is not None:
        command = [tool, "show", "-p", "NTPSynchronized", "--value"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            said = done.stdout.strip()
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if said == "no":
        return Finding("clock", f"{now}, not synchronised: expected time synchronisation", is_good=False)
    return Finding(
        "clock", f"{now}, {'synchronised' if said == 'yes' else 'whether it is synchronised cannot be told here'}"
    )
