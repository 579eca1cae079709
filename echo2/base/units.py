"""Durations, sizes, rates, money and addresses as people write them (`80ms`, `4MiB`, `300mbit/s`, `[::1]:29400`), parsed; what they
name as `module:name`, loaded."""

from __future__ import annotations

import importlib
import ipaddress
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError

# A number, perhaps with an exponent, and its unit.
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z/%]*)\s*", re.IGNORECASE)

# Seconds in each unit; a bare number is seconds.
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# Bytes in each unit of a rate: bits are decimal, as networks count.
_PER_S = _BYTES | {"bit": 1 / 8, "kbit": 10**3 / 8, "mbit": 10**6 / 8, "gbit": 10**9 / 8}


def parse_duration_s(text: str | float) -> float:
    """Seconds from `80ms`, `2s`, `5min`, `1.5h`; a bare number is seconds."""
    expected = "one of us, ms, s, min, h, d after the number"
    return _parsed(text, "duration", "'80ms', '2s', '5min'", _SECONDS, expected)


def parse_bytes(text: str | float) -> int:
    """Bytes from `4MiB`, `1.5GB`; a bare number is bytes."""
    expected = "one of B, kB, MB, GB, KiB, MiB, GiB after the number"
    return int(_parsed(text, "size", "'4MiB', '1.5GB'", {"": 1, **_BYTES}, expected))


def parse_rate_bytes_per_s(text: str | float) -> float:
    """Bytes per second from `300mbit/s`, `1gbit`, `37.5MB/s`; a bare number is bytes per second."""
    units = _PER_S | {f"{unit}/s": size for unit, size in _PER_S.items()}
    expected = "bit/s or B/s with a prefix, such as 300mbit/s or 37.5MB/s"
    return _parsed(text, "rate", "'300mbit/s', '1gbit', '37.5MB/s'", units, expected)


def _parsed(text: str | float, what: str, examples: str, units: Mapping[str, float], expected: str) -> float:
    if isinstance(text, int | float):
        number = float(text)
    elif (match := _NUMBER_AND_UNIT.fullmatch(text)) is None:
        raise ConfigError(f"{what}: expected a number with a unit such as {examples}, got {text!r}")
    elif (unit := match[2].lower()) not in units:
        raise ConfigError(f"{what}: expected {expected}, got {text!r}")
    else:
        number = float(match[1]) * units[unit]
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{what}: expected a finite number >= 0, got {number}")
    return number


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_line(text: str, chars_max: int) -> str:
    """The text cut to `chars_max`, with blanks for what is not printable: nodes refuse other texts of one another."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:chars_max])


def format_bytes(count: float) -> str:
    """`12.3 MB`, in powers of ten, as links are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Human-readable, to about three significant digits: `12.5 ms`, `208 s`, `11.6 h`."""
    for limit, scale, unit in ((1.0, 1e-3, "ms"), (300.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days" if seconds < float("inf") else "never"


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Limits of the link; 0: not limited. A node delays everything that it sends by half of `rtt_s`."""

    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def is_off(self) -> bool:
        return not (self.uplink_bytes_per_s or self.downlink_bytes_per_s or self.rtt_s)


def imported(path: str, option: str) -> Any:
    """The function or class that `path` names. Raises a `ConfigError` of `option` that says which half was not found."""
    module_name, _, name = path.partition(":")
    if "/" in module_name or module_name.endswith(".py") or not module_name:
        raise ConfigError(f"{option}: expected MODULE:NAME, such as mine:Own for Own in mine.py, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = (
            "; a module is looked for beside the run file and among the packages" if error.name == module_name else ""
        )
        raise ConfigError(f"{option}: expected an importable module {module_name}, got {error}{where}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{option}: expected an importable module {module_name}, got {described(error)}") from error
    member = getattr(module, name, None)
    if not callable(member):
        raise ConfigError(
            f"{option}: expected a function or class {name} in {module_name}, found {type(member).__name__}"
        )
    return member


def described(error: BaseException) -> str:
    """What a user's own code raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "/lib/python" not in frame.filename), frames[-1])
    at = "" if isinstance(error, SyntaxError) else f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{at}"


def address_of(host: str, port: int) -> str:
    """`host:port`; IPv6 addresses get brackets if they have none."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def mapped_address(text: str, option: str) -> tuple[str, int]:
    """Parses an option's public address and port. ConfigError unless it is an IP address with a port of 1024 or above."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        address = None
    is_port = port.isascii() and port.isdigit() and 1024 <= int(port[:6]) < 1 << 16
    if address is None or address.is_unspecified or not is_port:
        raise ConfigError(
            f"{option}: expected the public IP address and the mapped port, 1024 or above, as in 203.0.113.5:41873 or "
            f"[2001:db8::5]:41873, got {text!r}; peers do not dial names, because a name may resolve to another address later"
        )
    return str(address), int(port)


def is_loopback(address: str) -> bool:
    """Whether host or host:port is a loopback address: a run on one machine has no NAT to cross."""
    host = address.strip("[]")
    if host.count(":") == 1 or "]" in host:
        host = host.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
