"""`echo2 doctor`: checks this machine and says what to do about each problem.

Guarantees: changes nothing, joins no run and uses up no token; each line says what was found and, if it is bad, what was expected
and what to do. Exit code 6 if anything is bad. Waits for: the disk, the coordinator, and its probes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.base.errors import ConfigError, EchoError, PortBusy, ResourceError
from echo2.base.units import format_bytes
from echo2.broadcast.nat.reach import OwnLink, look_at_own_link
from echo2.broadcast.node import port_beside
from echo2.broadcast.reachability import LinkKind, own_reach
from echo2.cli.options import MODULES, config_of, link_text
from echo2.cli.process import wrapped
from echo2.cli.sizing import LearnerMachine, guessed_model_of, learner_line, lengths_of, shortages
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import ModelSize, worker_fit
from echo2.trust.enrolment import check_coordinator
from echo2.trust.identity import JoinLink, Role
from echo2.worker import machine as machines
from echo2.worker.machine import Finding, WorkerMachine

if TYPE_CHECKING:
    from echo2.tasks.task import Prompt

TIMEOUT_S = 5.0  # for nvidia-smi or a connection: what takes longer is broken for a person who waits
DISK_WANTED_BYTES = 8 << 30  # twice a 2-billion model in bf16: chunks
SHOWN_LETTERS = 60  # of a prompt, to know it by
DISK_PROBE_BYTES = 32 << 20  # beyond a disk's own cache of some MiB, yet a second on a slow one
DISK_SLOW_BYTES_PER_S = 20e6  # a 150 Mbit/s downlink: a slower disk would be the limit
WORDS = {True: "ok  ", False: "BAD ", None: "note"}  # a note: what cannot be told here, or is missing only for one role
# By the finding's name.
ADVICE = {
    "GPU": "update the NVIDIA driver",
    "torch": "install the CUDA build of torch in this environment (its own index has it), or vLLM, which brings one",
    "memory": "close what else runs, choose a smaller model, or rent a machine with more",
    "containment": "needed by a learner: allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
    "and newer install the system's package bubblewrap, whose AppArmor profile allows them; in a container, its runtime must)",
    "task": "correct task.name, task.args or the files that they name",
    "rewards": "remove task.trusted_rewards, unless nothing but your own models' text can ever reach this learner",
    "disk": "free space, or point --folder at another disk",
    "folder": "point --folder at one that you may write in",
    "disk speed": "point --folder at a local disk: chunks and the journal are written as they come",
    "clock": "switch time synchronisation on (timedatectl set-ntp true): certificates and leases go by the clock",
}


def run_doctor(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """`echo2 doctor`: prints the findings; raises ResourceError, after all of them, if any is bad."""
    config = config_of(args.config, args.preset, rest)
    folder = args.folder or Path.cwd()
    has_task = bool(args.config) or any(word.startswith("--task.") for word in rest)
    findings = list(_findings(folder, link_text(args.link) if args.link else "", config, has_task))
    if args.json:
        rows = [{"what": f.what, "found": f.text, "is_good": f.is_good, "advice": _advice(f)} for f in findings]
        print(json.dumps(rows, indent=1))
    else:
        for finding in findings:
            print(wrapped(f"{WORDS[finding.is_good]}  {finding.line()}", 6))
            if _advice(finding):
                print(wrapped(f"      {_advice(finding)}", 6))
    bad = [finding.what for finding in findings if finding.is_good is False]
    if bad:
        raise ResourceError(f"doctor: {len(bad)} problem{'' if len(bad) == 1 else 's'}: {', '.join(bad)}")
    return 0


def _advice(finding: Finding) -> str:
    if finding.advice or finding.is_good is not False:
        return finding.advice
    return ADVICE.get(finding.what, "see docs/troubleshooting.md")


def _findings(folder: Path, link: str, config: RunConfig, has_task: bool) -> Iterator[Finding]:
    folder = folder.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder: expected a folder, there or not, got the file {folder}")
    folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    machine = machines.look(folder)
    yield Finding("Python", f"{sys.version.split()[0]} at {sys.executable}")
    yield _packages()
    yield from _containment(config)
    driver = machine.gpus[0].driver if machine.gpus else ""
    yield machines.gpu_finding(machine.gpu_text, sum(gpu.memory_bytes for gpu in machine.gpus), driver)
    yield _torch(bool(machine.gpus))
    yield machines.memory_finding(machine.memory_bytes, machine.free_memory_bytes)
    yield machines.disk_finding(str(folder), machine.free_disk_bytes, DISK_WANTED_BYTES)
    if config.model.path:
        yield from model_findings(machine, config)
    if has_task:
        yield from task_findings(config)
    yield _disk_speed(folder)
    yield _clock()
    if link:
        yield from coordinator_findings(JoinLink.parse(link), config)
    else:
        yield ports_finding(config)
        advice = "give its join link, `--link LINK` or `--link @FILE`; nothing is joined and the link is not used up"
        yield Finding("reach and rates", "not measured: that takes a coordinator to be seen by", None, advice)


def model_findings(machine: WorkerMachine, config: RunConfig) -> Iterator[Finding]:
    """Checks how the run's model fits this machine, as a worker and as its learner."""
    from echo2.learner.training.model_files import checked_path

    path = config.model.path
    try:
        checked_path(path)
        size, origin = guessed_model_of(path)
    except ConfigError as error:
        yield Finding("model", str(error), False, "name the folder that holds config.json, or a hub id")
        return
    try:
        checked_path(path, has_weights=True)
    except ConfigError as error:
        yield Finding("weights", str(error), None, "only the learner's machine needs them")
    is_guess = origin.startswith("a guess")
    lengths = lengths_of(config)
    shape = f"{size.billions:.3g} billion parameters ({origin}), sequences of up to {lengths.of(size)} tokens"
    fetch = f"fetch its shape first: hf download {path} config.json" if is_guess else ""
    yield Finding("model", shape, None if is_guess else True, fetch)
    is_vllm = machines.chosen_engine(config.worker.engine, machine) == "vllm"
    gpus = [gpu.memory_bytes for gpu in machine.gpus] if is_vllm else []
    try:
        yield Finding("worker of it here", worker_fit(size, gpus, machine.memory_bytes, lengths).reason)
    except ResourceError as error:
        advice = "only workers' machines need it; `echo2 plan` lists the kinds that it fits"
        yield Finding("worker of it here", f"none: {error}", None, advice)
    learner = learner_finding(machine, config, size)
    yield replace(learner, is_good=None) if is_guess else learner  # a guess proves nothing, neither way


def task_findings(config: RunConfig) -> Iterator[Finding]:
    """Reads the data and draws the first prompt of each task, as the learner will, in the model's tokens if it is in a folder."""
    from echo2.tasks.registry import drawn, is_environment, make_environment_source, make_task
    from echo2.tasks.split import TaskSplit
    from echo2.tasks.task import TaskSpec

    for (name, args), held_out in zip(config.task.asked, config.task.held_out.values(), strict=True):
        spec = TaskSpec(name, args, config.run.seed)
        try:
            if is_environment(spec):
                make_environment_source(spec)
                yield Finding("task", f"{name}: an environment; its first episode is not played here", None)
                continue
            task = make_task(spec)
            TaskSplit(task.size, held_out, config.run.seed)
            first = drawn(name, task.sample, 0)
            tokens = _tokens_of(first.prompt, config)
        except EchoError as error:
            yield Finding("task", f"{name}: {error}", False)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own code
            yield Finding("task", f"{name}: expected its first prompt, got {type(error).__name__}: {error}", False)
        else:
            count = f"{task.size} prompts" if task.size is not None else "prompts without end"
            prompt = textwrap.shorten(str(first.prompt), SHOWN_LETTERS, placeholder=" …")
            answer = textwrap.shorten(str(first.answer), SHOWN_LETTERS, placeholder=" …")
            yield Finding("task", f"{name}: {count}; the first{tokens} is {prompt!r}, its answer {answer!r}")


def _tokens_of(prompt: Prompt, config: RunConfig) -> str:
    """The prompt's length, in words, if the model's tokenizer is in a folder here."""
    if not Path(config.model.path).expanduser().is_dir() or importlib.util.find_spec("transformers") is None:
        return ""
    from echo2.learner.rollouts.prompts import load_tokenizer
    from echo2.tasks.chat_format import ChatFormat, ChatOptions

    how = ChatOptions(config.task.system_prompt, config.task.template_args, config.task.plain_prompts)
    count = len(ChatFormat(load_tokenizer(config.model.path), how).prompt(prompt))
    if count > (most := config.sampling.max_prompt_tokens):
        raise ConfigError(f"the first prompt: expected at most sampling.max_prompt_tokens = {most} tokens, got {count}")
    return f" of {count} tokens"


def learner_finding(machine: WorkerMachine, config: RunConfig, size: ModelSize) -> Finding:
    """Checks whether the learner fits here. Under torchrun it counts the GPUs of all ranks (`WORLD_SIZE`)."""
    here = [] if config.learner.device == "cpu" else [gpu.memory_bytes for gpu in machine.gpus]
    ranks = os.environ.get("WORLD_SIZE", "")
    count = max(len(here), int(ranks)) if here and ranks.isdigit() else len(here)
    gpus = (count, min(here, default=0))
    room = LearnerMachine(*gpus, machine.memory_bytes, machine.free_disk_bytes, min(count, len(here)))
    needed = learner_line(config, size, room).removeprefix("learner: ")
    short = shortages(config, size, room)
    if not short:
        return Finding("learner of it here", needed, is_good=count % config.learner.replicas == 0)
    lacking = "; ".join(f"{need.what}: {need.text}" for need in short)
    instead = "; ".join(f"for {need.what}: {need.would_fit}" for need in short)
    advice = (
        f"what would fit, {instead}. Only the learner's machine needs it; for a learner of several machines ask with "
        "WORLD_SIZE=RANKS set"
    )
    return Finding("learner of it here", f"{needed}. Too little here: {lacking}", False, advice)


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
    from echo2.contain.box import bubblewrap, containment_problem
    from echo2.tasks.built_in import PLAIN_TASKS, trusted_text

    if config.task.trusted_rewards:
        for name, args in config.task.asked:
            yield Finding("rewards", trusted_text(name, args), is_good=False)
    names, problem = [name for name, _ in config.task.asked], containment_problem()
    if not problem:
        apart, how = "each run has namespaces of its own", bubblewrap()
        if not how.has_nested:
            apart = (
                "runs share one container, which is replaced after a run that leaves folders: this machine lets nothing inside "
                "bubblewrap make namespaces"
            )
        yield Finding("containment", f"rewards and tools can be contained, by {how.path}; {apart}")
    elif config.task.trusted_rewards or PLAIN_TASKS.issuperset(names):
        yield Finding("containment", f"none, and task {', '.join(names)} needs none as configured; {problem}")
    else:
        yield Finding("containment", problem, is_good=False)


def _version_of(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return "of an unknown version"


def _torch(has_gpu: bool) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed; coordinators and operators need none", None)
    import torch

    if has_gpu and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return Finding("torch", f"{torch.__version__}, {built}: expected it to see the GPU", is_good=False)
    sight = f"sees {torch.cuda.device_count()} GPU" if torch.cuda.is_available() else "on the CPU"
    return Finding("torch", f"{torch.__version__}, {sight}")


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
        return Finding("folder", f"{folder}: expected to be able to write there, got: {error}", is_good=False)
    text = f"{format_bytes(int(rate))}/s written and synced"
    if rate < DISK_SLOW_BYTES_PER_S:
        return Finding("disk speed", f"{text}: expected at least {DISK_SLOW_BYTES_PER_S / 1e6:.0f} MB/s", is_good=False)
    return Finding("disk speed", text)


def _clock() -> Finding:
    answer, command = "", ["timedatectl", "show", "-p", "NTPSynchronized", "--value"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout.strip()
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if answer == "no":
        return Finding("clock", f"{now}, not synchronised: expected time synchronisation", is_good=False)
    if answer == "yes":
        return Finding("clock", f"{now}, synchronised")
    return Finding("clock", f"{now}; whether it is synchronised cannot be told here", None)


RATE_WANTED_BYTES_PER_S = 1e6  # 10 MB of delta in ten seconds
# Option of [coordinator], and what listens there.
PORT_OPTIONS = {"enrol_port": "enrolment", "port": "control streams", "dashboard_port": "dashboard"}
PATHS = {"downlink": "from the coordinator", "uplink": "to the coordinator"}  # how a direction is told
# The one cure that costs nothing comes first.
RATE_ADVICE = (
    "versions come late over such a link: rent another machine, raise S, or see what `echo2 plan` makes of it; if the "
    "coordinator's own link is the slow one, measure again when it is idle"
)


def ports_finding(config: RunConfig) -> Finding:
    """Checks whether a coordinator and a learner of this config could listen on their ports."""
    wanted = {getattr(config.coordinator, option): name for option, name in PORT_OPTIONS.items()}
    relay, learner = config.coordinator.relay_port, config.learner.port
    wanted |= {relay: "relay", port_beside(relay): "byte pipes", learner: "learner", port_beside(learner): "chunks"}
    wanted.pop(0, None)
    busy = []
    for port, name in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                busy.append(f"{port} ({name}): {error.strerror}")
    if busy:
        options = ", ".join([*(f"coordinator.{option}" for option in PORT_OPTIONS), "learner.port"])
        advice = f"stop what listens there, or choose others with {options}"
        text = f"{', '.join(busy)}; expected them to be free for a coordinator and a learner"
        return Finding("ports", text, is_good=False, advice=advice)
    return Finding("ports", f"{', '.join(map(str, wanted))} are free" if wanted else "any free ones will be taken")


def coordinator_findings(link: JoinLink, config: RunConfig) -> Iterator[Finding]:
    """Checks that the coordinator that the link pins answers, its round-trip time, and what it sees of this machine."""
    advice = (
        f"check the address in the link, that the coordinator runs, and the firewall: its ports are {link.port} and "
        f"coordinator.port ({config.coordinator.port} unless the config says otherwise)"
    )
    try:
        host = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)[0][4][0]
        began = time.perf_counter()
        with socket.create_connection((link.host, link.port), timeout=TIMEOUT_S):
            rtt_s = time.perf_counter() - began
        handshake_s = check_coordinator(link, TIMEOUT_S)
    except (OSError, UnicodeError) as error:  # or a name that there cannot be
        text = f"{link.address}: expected an answer within {TIMEOUT_S:.0f} s, got: {getattr(error, 'strerror', None) or error}"
        yield Finding("coordinator", text, is_good=False, advice=advice)
        return
    except EchoError as error:
        yield Finding("coordinator", str(error), is_good=False, advice=advice)
        return
    yield Finding(
        "coordinator",
        f"{link.address} ({host}) is the peer that the link pins; {rtt_s * 1e3:.1f} ms to connect, "
        f"{handshake_s * 1e3:.1f} ms with TLS; its certificate is in force by this machine's clock",
    )
    yield from _own_link_findings(link, config)


def _own_link_findings(link: JoinLink, config: RunConfig) -> Iterator[Finding]:
    ports = {Role.WORKER.value: config.worker.port, Role.LEARNER.value: config.learner.port}
    try:
        probe = asyncio.run(look_at_own_link(link, ports, TIMEOUT_S))
    except PortBusy as error:
        advice = "stop what listens there and look again; a worker that runs tells what it found: `echo-worker status`"
        yield Finding("reach", str(error), is_good=False, advice=advice)
        return
    except EchoError as error:
        advice = "ask the operator for another link: `echo2 link @operator.link` makes one"
        yield Finding("join link", str(error), is_good=False, advice=advice)
        return
    if probe.token_problem:
        advice = "unless this machine has joined with it already, ask the operator for another one"
        text = f"its token lets nobody new in: {probe.token_problem}"
        yield Finding("join link", text, is_good=False, advice=advice)
    else:
        yield Finding("join link", f"its token lets a machine in as {probe.role}")
    yield replace(machines.clock_finding(probe.skew_s), what="clock skew", advice="")
    yield _reach_finding(probe.role, probe)
    yield from _rate_findings(probe)


def _reach_finding(role: str, probe: OwnLink) -> Finding:
    """Judges reachability: a learner must be dialled; a worker works behind any NAT, but peers can then help it less."""
    way = own_reach(probe.seen)
    if way.kind is LinkKind.DIRECT:
        return Finding("reach", str(way))
    option = "learner.port" if role == Role.LEARNER else "worker.port"
    advice = f"to be dialled, open a TCP port to this machine in its firewall or router, give it as --{option} and look again"
    text = f"{way} (tried: {probe.failure})"
    if role == Role.LEARNER:
        return Finding("reach", f"{text}: expected workers to be able to dial a learner", is_good=False, advice=advice)
    return Finding("reach", text, advice=advice)


def _rate_findings(probe: OwnLink) -> Iterator[Finding]:
    for name, rate in (("downlink", probe.downlink_bytes_per_s), ("uplink", probe.uplink_bytes_per_s)):
        if probe.rate_problem:
            yield Finding(name, f"not measured: {probe.rate_problem}", None, "look again in a minute")
        elif rate < RATE_WANTED_BYTES_PER_S:
            wanted = format_bytes(int(RATE_WANTED_BYTES_PER_S))
            text = f"{format_bytes(int(rate))}/s {PATHS[name]}: expected at least {wanted}/s"
            yield Finding(name, text, is_good=False, advice=RATE_ADVICE)
        else:
            yield Finding(name, f"at least {format_bytes(int(rate))}/s {PATHS[name]}, over one connection")
