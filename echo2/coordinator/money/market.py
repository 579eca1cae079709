"""Catalogues of machines that can be rented: fetched through gpuhunt and cached on this machine with their age.

Guarantees: a fetched catalogue is cached atomically. Without a network the cached one is used and its age reported; if there is
none, the typical prices that come with the package, which are not real offers.
"""

from __future__ import annotations

import functools
import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from echo2.base.errors import ConfigError, Unreachable
from echo2.cost_model.machines import CPU, GpuType, MarketOffer, parse_catalogue
from echo2.cost_model.sizing import ModelSize, model_size
from echo2.outside import unix_now

FILE = "offers.json"  # in the cache folder
VENDOR = "nvidia"  # vLLM and our kernels need CUDA
TYPICAL = "typical"  # stands for a provider
TYPICAL_COUNTS = (1, 2, 4, 8)  # GPUs of common machines
_log = logging.getLogger("echo2.market")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A list of offers. `fetched_at`: unix seconds; None for typical prices. `source`: where it comes from, in words."""

    offers: tuple[MarketOffer, ...]
    fetched_at: float | None
    source: str

    def age_s(self, now: float) -> float | None:
        return None if self.fetched_at is None else max(0.0, now - self.fetched_at)


_FILE = TypeAdapter(Catalogue)


def kept_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return home / "echo2" / FILE


class _Failures(logging.Handler):
    """Collects what gpuhunt logs of providers that do not answer, each with two tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage().partition(".")[0])


def fetch() -> Catalogue:
    """Fetches all offers that gpuhunt knows. Unreachable if it gets none, ConfigError if gpuhunt is not installed."""
    try:
        from gpuhunt import Catalog
        from gpuhunt.providers.vastai import VastAIProvider
    except ImportError:
        raise ConfigError("offers: expected the package gpuhunt, which is not here: pip install gpuhunt") from None
    catalog = Catalog(balance_resources=False, auto_reload=False)
    logger, failures = logging.getLogger("gpuhunt"), _Failures()
    logger.addHandler(failures)
    logger.propagate = False
    is_local = "GPUHUNT_CATALOG_DIR" in os.environ  # a folder of catalogues stands for the network
    try:
        if not is_local:
            catalog.load()
            catalog.add_provider(VastAIProvider())
        items = catalog.query(min_gpu_count=1, gpu_vendor=VENDOR)
    except Exception as error:  # noqa: BLE001 - gpuhunt calls the clients of a dozen providers
        raise Unreachable(f"offers: expected a catalogue from gpuhunt, got {type(error).__name__}: {error}") from None
    finally:
        logger.removeHandler(failures)
    if failures.texts:
        _log.warning("offers: %s", "; ".join(failures.texts))
    offers, left_out = [], ""
    for item in items:
        try:
            offers.append(
                MarketOffer(
                    item.provider, item.instance_name, item.location, item.gpu_name or "", item.gpu_count,
                    float(item.gpu_memory or 0.0), float(item.price), bool(item.spot),
                )
            )  # fmt: skip
        except ConfigError as error:
            left_out = left_out or str(error)
    if left_out:
        text = "offers: %d rows of %d are left out, the first because of %s"
        _log.warning(text, len(items) - len(offers), len(items), left_out)
    if not offers:
        raise Unreachable("offers: expected a catalogue from gpuhunt, got one without a single offer of a GPU")
    return Catalogue(tuple(offers), unix_now(), "gpuhunt")


def keep(catalogue: Catalogue, path: Path) -> None:
    """Caches the catalogue in a file, atomically; ConfigError if it cannot be written."""
    part = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_FILE.dump_json(catalogue))
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"offers: expected to keep them in {path}, got: {error.strerror}") from None


def kept(path: Path) -> Catalogue | None:
    """The cached catalogue; None without a file. ConfigError if the file is not a cached catalogue."""
    try:
        return _FILE.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"offers: {path}: expected a kept catalogue, got: {error.strerror}") from None
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        got = f"one whose {field} is not as expected" if field else "another file"
        raise ConfigError(f"offers: {path}: expected a kept catalogue (--record writes one), got {got}") from None


def typical(catalogue: Mapping[str, GpuType]) -> Catalogue:
    """Machines with 1, 2, 4 and 8 GPUs of each kind, at the price per GPU that comes with the package."""
    offers = tuple(
        MarketOffer(
            TYPICAL, gpu.name if count == 1 else f"{count}x{gpu.name}", "", gpu.name.partition("-")[0], count, gpu.memory_gib,
            round(count * gpu.usd_per_hour, 6), False,
        )
        for gpu in catalogue.values()
        if gpu.name != CPU
        for count in TYPICAL_COUNTS
    )  # fmt: skip
    return Catalogue(offers, None, "typical prices of mid 2026 that come with echo2: assumptions, nobody offers them")


def recorded(path: Path) -> Catalogue:
    """A catalogue recorded in a file (with `keep`); ConfigError if there is no file."""
    catalogue = kept(path)
    if catalogue is None:
        raise ConfigError(f"offers: expected a recorded catalogue at {path}, found no file")
    return catalogue


def newest(
    path: Path, gpus: Mapping[str, GpuType], *, must_fetch: bool, may_fetch: bool, age_max_s: float
) -> Catalogue:
    """Fetches a catalogue if `must_fetch`, or if `may_fetch` and the cached one is missing or older than `age_max_s`; else, or if
    that fails, returns the cached one, or typical prices. With `must_fetch`, raises if fetching fails."""
    catalogue = kept(path)
    age_s = None if catalogue is None else catalogue.age_s(unix_now())
    if must_fetch or (may_fetch and (age_s is None or age_s > age_max_s)):
        try:
            fresh = fetch()
        except (Unreachable, ConfigError) as error:
            if must_fetch:
                raise
            _log.warning("%s", error)
        else:
            keep(fresh, path)
            return fresh
    return catalogue or typical(gpus)


@functools.cache
def built_in_catalogue() -> Mapping[str, GpuType]:
    return parse_catalogue(tomllib.loads((files("echo2.cost_model") / "gpus.toml").read_text(encoding="utf-8")))


@functools.cache
def built_in_models() -> Mapping[str, ModelSize]:
    tables = tomllib.loads((files("echo2.cost_model") / "models.toml").read_text(encoding="utf-8"))
    return {name: model_size(table) for name, table in tables.items()}
