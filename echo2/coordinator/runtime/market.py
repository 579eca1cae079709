"""Catalogues of what can be rented: fetched through gpuhunt, kept on this machine with their age.

Guarantees: what was fetched is kept whole or not at all; without a network the kept catalogue is used and its age said, without
one what SkyPilot has fetched, and without that the typical prices that come with the package, which are no offers. Leaves to
others: ranking (cost_model/offers).
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from echo2.base.errors import ConfigError, Unreachable
from echo2.cost_model.catalogue import CPU, GpuType
from echo2.cost_model.kinds import kind_of_name
from echo2.cost_model.offers import MarketOffer, offer_from_row
from echo2.outside import unix_now

FILE = "offers.json"
VENDOR = "nvidia"
TYPICAL = "typical"
TYPICAL_COUNTS = (1, 2, 4, 8)
SKYPILOT_FOLDER = Path("~/.sky/catalogs")
"""Where the package skypilot keeps one CSV file a cloud, in folders v1, v2, ...; it fetches them when it is used."""
_log = logging.getLogger("echo2.market")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`fetched_at`: unix seconds, None of typical prices. `source` says where it is from."""

    offers: tuple[MarketOffer, ...]
    fetched_at: float | None
    source: str

    def age_s(self, now: float) -> float | None:
        return None if self.fetched_at is None else max(0.0, now - self.fetched_at)


def kept_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return home / "echo2" / FILE


def fetch() -> Catalogue:
    """All that gpuhunt knows now. Raises Unreachable where nothing comes, ConfigError where gpuhunt is not installed."""
    try:
        from gpuhunt import Catalog
        from gpuhunt.providers.vastai import VastAIProvider
    except ImportError:
        raise ConfigError(
            "offers: expected the package gpuhunt, which is not here: pip install 'echo2[market]'"
        ) from None
    catalog = Catalog(balance_resources=False, auto_reload=False)
    is_local = "GPUHUNT_CATALOG_DIR" in os.environ  # a folder of catalogues stands for the network
    try:
        if not is_local:
            catalog.load()
            catalog.add_provider(VastAIProvider())
        items = catalog.query(min_gpu_count=1, gpu_vendor=VENDOR)
    except Exception as error:  # noqa: BLE001 - of any of a dozen providers' clients
        raise Unreachable(f"offers: expected a catalogue from gpuhunt, got {type(error).__name__}: {error}") from None
    offers = []
    for item in items:
        try:
            offers.append(
                MarketOffer(
                    item.provider, item.instance_name, item.location, item.gpu_name or "", item.gpu_count,
                    float(item.gpu_memory or 0.0), float(item.price), bool(item.spot),
                )
            )  # fmt: skip
        except ConfigError as error:
            _log.debug("left out: %s", error)
    if not offers:
        raise Unreachable("offers: expected a catalogue from gpuhunt, got one without a single offer of a GPU")
    return Catalogue(tuple(offers), unix_now(), "gpuhunt")


def keep(catalogue: Catalogue, path: Path) -> None:
    """Writes it for later; ConfigError where that is not possible."""
    told: dict[str, object] = {
        "fetched_at": catalogue.fetched_at,
        "source": catalogue.source,
        "offers": [asdict(one) for one in catalogue.offers],
    }
    part = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"offers: expected to keep them in {path}, got: {error.strerror}") from None


def kept(path: Path) -> Catalogue | None:
    """What an earlier call left; None without a file. ConfigError where the file is none of ours."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"offers: {path}: expected a kept catalogue, got: {error}") from None
    rows = told.get("offers") if isinstance(told, Mapping) else None
    fetched_at = told.get("fetched_at") if isinstance(told, Mapping) else None
    is_time = fetched_at is None or (isinstance(fetched_at, int | float) and not isinstance(fetched_at, bool))
    if not isinstance(rows, list) or not is_time or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"offers: {path}: expected a kept catalogue, got something else")
    at = None if fetched_at is None else float(fetched_at)
    return Catalogue(tuple(offer_from_row(row) for row in rows), at, str(told.get("source", "")))


def typical(catalogue: Mapping[str, GpuType]) -> Catalogue:
    """Machines of one to eight GPUs of each kind at the price that comes with the package, so much for each GPU."""
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
    """A catalogue that somebody has kept in a file (`keep`); ConfigError where there is none."""
    found = kept(path)
    if found is None:
        raise ConfigError(f"offers: expected a recorded catalogue at {path}, found no file")
    return found


def of_skypilot(folder: Path, gpus: Mapping[str, GpuType]) -> Catalogue | None:
    """What SkyPilot has fetched for itself, as old as its oldest file; None where it has fetched nothing. A machine whose memory
    a file does not name has that of its kind's data sheet."""
    versions = sorted((one for one in folder.glob("v*") if one.name[1:].isdigit()), key=lambda one: int(one.name[1:]))
    offers: list[MarketOffer] = []
    ages: list[float] = []
    for file in sorted(versions[-1].glob("*/vms.csv")) if versions else ():
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                found = [one for row in csv.DictReader(lines) for one in _of_sky_row(file.parent.name, row, gpus)]
            ages.append(file.stat().st_mtime)
        except (OSError, ValueError, csv.Error) as error:
            _log.warning("offers: %s: expected SkyPilot's catalogue, got: %s", file, error)
            continue
        offers += found
    return Catalogue(tuple(offers), min(ages), "SkyPilot's catalogues") if offers else None


def _of_sky_row(cloud: str, row: Mapping[str, str | None], gpus: Mapping[str, GpuType]) -> Iterator[MarketOffer]:
    """On demand and spot, where there is a price; nothing of rows without a GPU that the catalogue knows."""
    name, count = row.get("AcceleratorName") or "", _positive(row.get("AcceleratorCount"))
    kind = kind_of_name(name, gpus)[0] or kind_of_name(name.removesuffix("-SXM"), gpus)[0]
    if not kind or count is None or count != int(count):
        return
    for column, is_spot in (("Price", False), ("SpotPrice", True)):
        price = _positive(row.get(column))
        if price is None:
            continue
        try:
            yield MarketOffer(
                cloud, row.get("InstanceType") or name, row.get("Region") or "", kind.partition("-")[0], int(count),
                gpus[kind].memory_gib, price, is_spot,
            )  # fmt: skip
        except ConfigError as error:
            _log.debug("left out: %s", error)


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def newest(
    path: Path, gpus: Mapping[str, GpuType], *, must_fetch: bool, may_fetch: bool, age_max_s: float
) -> Catalogue:
    """Fetched where that is asked for or what is kept is older than `age_max_s`; else kept; else SkyPilot's; else typical."""
    found = kept(path)
    age_s = None if found is None else found.age_s(unix_now())
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
    return found or of_skypilot(SKYPILOT_FOLDER.expanduser(), gpus) or typical(gpus)
