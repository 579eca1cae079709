"""Turns checks of the machine into findings, one line each, good or bad. Pure.

Guarantees: each line names the thing checked, what was found and, if that is bad, what was expected. Findings go to the log and
to `echo-worker status`; what makes work impossible is raised elsewhere (ResourceError).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.hosts import joined
from echo2.base.units import format_bytes

DRIVER_MIN = 525
"""The oldest NVIDIA driver that any CUDA 12 build runs on; builds for CUDA 13 need 580."""
DRIVER_CUDA_13 = 580
SKEW_S_MAX = 5.0
"""More skew than this is worth a warning: lease deadlines are corrected by the skew, but the validity of certificates is not."""
FREE_MEMORY_MIN = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    text: str
    is_good: bool = True
    advice: str = ""  # what to do about it; even a good finding may have some

    def line(self) -> str:
        return f"{self.what}: {self.text}"


def advertised_finding(advertised: str, seen_host: str, is_reachable: bool) -> Finding:
    """Whether this worker answers at the address it advertises. `seen_host`: the source address that the relay sees for this
    machine, where it dialled the advertised port."""
    host, _, port = advertised.rpartition(":")
    dialled = joined(seen_host, int(port))
    if is_reachable and dialled == advertised:
        return Finding("advertised address", f"{advertised} answers as this worker")
    if is_reachable:
        text = f"this worker answers at {dialled}; {advertised} was named, but its connections come from {seen_host}"
        return Finding("advertised address", f"{text}: peers are told {dialled}")
    came = "" if dialled == advertised else f" (connections of this machine come from {seen_host}, not from {host})"
    return Finding(
        "advertised address",
        f"{advertised}: expected this worker to answer, nothing with its certificate answered at {dialled}{came}; it works "
        f"as a hidden worker. Map that port to worker.port, open it in the firewall, or leave --advertise out",
        is_good=False,
    )


def gpu_finding(names: str, memory_bytes: int, driver: str) -> Finding:
    """`driver`: its version; empty: there is no GPU."""
    if not driver:
        return Finding("GPU", "none; the embedded engine works on the CPU")
    major = int(driver.partition(".")[0]) if driver.partition(".")[0].isdigit() else 0
    text = f"{names}, {format_bytes(memory_bytes)} of memory, driver {driver}"
    if major < DRIVER_MIN:
        return Finding("GPU", f"{text}: expected a driver of at least {DRIVER_MIN}", is_good=False)
    if major < DRIVER_CUDA_13:
        return Finding("GPU", f"{text}, too old for builds for CUDA 13 (they need {DRIVER_CUDA_13})")
    return Finding("GPU", text)


def memory_finding(total_bytes: int, free_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < FREE_MEMORY_MIN:
        return Finding("memory", f"{text}: expected at least {format_bytes(FREE_MEMORY_MIN)} free", is_good=False)
    return Finding("memory", text)


def disk_finding(folder: str, free_bytes: int, store_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} free at {folder}"
    if free_bytes < store_bytes:
        return Finding(
            "disk", f"{text}: expected {format_bytes(store_bytes)} for chunks (worker.store_bytes)", is_good=False
        )
    return Finding("disk", text)


def clock_finding(skew_s: float) -> Finding:
    """`skew_s`: seconds by which the coordinator's clock is ahead of this one."""
    side = "behind" if skew_s > 0 else "ahead of"
    text = f"{abs(skew_s):.1f} s {side} the coordinator's"
    if abs(skew_s) > SKEW_S_MAX:
        return Finding("clock", f"{text}: expected at most {SKEW_S_MAX:.0f} s; is time synchronised?", is_good=False)
    return Finding("clock", text)


def reach_finding(addresses: list[str], refused: dict[str, str]) -> Finding:
    """`refused`: those of `addresses` that this machine could not connect to itself, with the reason."""
    if not addresses:
        return Finding("reach", "no address to tell peers: it forwards over connections that it opens", is_good=False)
    if refused:
        each = "; ".join(f"{address} ({reason})" for address, reason in refused.items())
        return Finding(
            "reach", f"peers are told {', '.join(addresses)}, but from here it does not answer: {each}", is_good=False
        )
    return Finding("reach", f"peers are told {', '.join(addresses)}")


def rate_finding(tokens_per_s: float, slot_count: int) -> Finding:
    if not tokens_per_s:
        return Finding("rate", "unknown: the engine sampled no token of its first requests; the first lease will tell")
    return Finding("rate", f"{tokens_per_s:.0f} tokens/s with {slot_count} sequences, measured before the first lease")
