"""The network part of `echo2 doctor`: ports, the coordinator of a join link, this machine's own link, workers that run here.

Guarantees: those of the doctor. Waits for: the coordinator, at most TIMEOUT_S, then link probing (broadcast/runtime/probing), at
most half a minute if no other machine is being measured.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from echo2.base.errors import EchoError, PortBusy
from echo2.base.units import format_bytes
from echo2.broadcast.probing import own_reach
from echo2.broadcast.reachability import LinkKind
from echo2.broadcast.runtime.probing import OwnLink, look_at_own_link
from echo2.config.run import RunConfig
from echo2.trust.identity import JoinLink, Role
from echo2.trust.runtime.enrolling import check_coordinator
from echo2.worker.findings import Finding, clock_finding

TIMEOUT_S = 5.0
RATE_WANTED_BYTES_PER_S = 1e6
WORKER_FACTS = ("can_be_dialled", "relays", "links", "tokens_per_s", "waits_for")
PORT_OPTIONS = {
    "enrol_port": "enrolment",
    "port": "control streams",
    "dashboard_port": "dashboard",
    "relay_port": "relay",
}
PATHS = {"downlink": "from the coordinator", "uplink": "to the coordinator"}
RATE_ADVICE = (
    "versions come late over such a link: rent another machine, raise S, or see what `echo2 plan` makes of it; if the "
    "coordinator's own link is the slow one, measure again when it is idle"
)


def ports_finding(config: RunConfig) -> Finding:
    """Checks whether a coordinator of this config could listen on its ports."""
    wanted = {getattr(config.coordinator, option): name for option, name in PORT_OPTIONS.items()}
    wanted.pop(0, None)
    busy = []
    for port, name in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                busy.append(f"{port} ({name})")
    if busy:
        options = ", ".join(f"coordinator.{option}" for option in PORT_OPTIONS)
        advice = f"stop what listens there, or choose others with {options}"
        text = f"{', '.join(busy)} in use: expected them to be free for a coordinator"
        return Finding("ports", text, is_good=False, advice=advice)
    return Finding("ports", f"{', '.join(map(str, wanted))} are free" if wanted else "any free ones will be taken")


def no_link_findings() -> Iterator[Finding]:
    yield Finding(
        "reach and rates",
        "not measured: that takes a coordinator to be seen by",
        advice="give its join link, `--link LINK` or `--link @FILE`; nothing is joined and the link is not used up",
    )


def coordinator_findings(link: JoinLink, config: RunConfig) -> Iterator[Finding]:
    """Checks that the coordinator that the link pins answers, its round-trip time, and what it sees of this machine."""
    coordinator = config.coordinator
    advice = (
        f"check the address in the link, that the coordinator runs, and the firewall: its ports are {link.port} and "
        f"coordinator.port ({coordinator.port} unless the config says otherwise)"
    )
    try:
        host = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)[0][4][0]
        began = time.perf_counter()
        with socket.create_connection((link.host, link.port), timeout=TIMEOUT_S):
            rtt_s = time.perf_counter() - began
        handshake_s = check_coordinator(link, TIMEOUT_S)
    except OSError as error:
        text = f"{link.address}: expected an answer within {TIMEOUT_S:.0f} s, got: {error}"
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
        found = asyncio.run(look_at_own_link(link, ports, TIMEOUT_S))
    except PortBusy as error:
        advice = "stop what listens there and look again; a worker that runs tells what it found: `echo-worker status`"
        yield Finding("reach", str(error), is_good=False, advice=advice)
        return
    except EchoError as error:
        advice = "ask the operator for another link: `echo2 link @operator.link` makes one"
        yield Finding("join link", str(error), is_good=False, advice=advice)
        return
    if found.token_problem:
        advice = "unless this machine has joined with it already, ask the operator for another one"
        text = f"its token lets nobody new in: {found.token_problem}"
        yield Finding("join link", text, is_good=False, advice=advice)
    else:
        yield Finding("join link", f"its token lets a machine in as {found.role}")
    yield replace(clock_finding(found.skew_s), what="clock skew", advice="")
    yield _reach_finding(found.role, found)
    yield from _rate_findings(found)


def _reach_finding(role: str, found: OwnLink) -> Finding:
    """Judges reachability: a learner must be dialled; a worker works behind any NAT, but peers can then help it less."""
    way = own_reach(found.seen)
    if way.kind is LinkKind.DIRECT:
        return Finding("reach", str(way))
    option = "learner.port" if role == Role.LEARNER else "worker.port"
    advice = f"to be dialled, open a TCP port to this machine in its firewall or router, give it as --{option} and look again"
    text = f"{way} (tried: {found.failure})"
    if role == Role.LEARNER:
        return Finding("reach", f"{text}: expected workers to be able to dial a learner", is_good=False, advice=advice)
    return Finding("reach", text, advice=advice)


def _rate_findings(found: OwnLink) -> Iterator[Finding]:
    for name, rate in (("downlink", found.downlink_bytes_per_s), ("uplink", found.uplink_bytes_per_s)):
        if found.rate_problem:
            yield Finding(name, f"not measured: {found.rate_problem}", advice="look again in a minute")
        elif rate < RATE_WANTED_BYTES_PER_S:
            wanted = format_bytes(int(RATE_WANTED_BYTES_PER_S))
            text = f"{format_bytes(int(rate))}/s {PATHS[name]}: expected at least {wanted}/s"
            yield Finding(name, text, is_good=False, advice=RATE_ADVICE)
        else:
            yield Finding(name, f"at least {format_bytes(int(rate))}/s {PATHS[name]}, over one connection")


def worker_findings() -> Iterator[Finding]:
    """Reports what the workers running on this machine have found out."""
    from echo2.worker.runtime.control import ask_at
    from echo2.worker.runtime.running import running_workers

    try:
        workers = asyncio.run(running_workers())
    except EchoError as error:
        yield Finding("workers", f"not asked: {error}")
        return
    for worker in workers:
        try:
            told = asyncio.run(ask_at(worker.socket, "status", f"worker {worker}"))
        except EchoError as error:
            yield Finding(f"worker {worker.name or worker.folder}", str(error), is_good=False)
            continue
        kept = {key: told[key] for key in WORKER_FACTS if told.get(key)}
        text = "; ".join(f"{key.replace('_', ' ')}: {_shown(value)}" for key, value in kept.items())
        yield Finding(f"worker {worker.name}", text or "runs")


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
