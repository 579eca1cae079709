"""The machines file: what earlier runs observed of each kind of machine, as JSON that its owner may read, edit, merge and share.

Guarantees: writes are atomic, and one process writes at a time; a file of another format is refused; invalid records are left out
and their number logged; at most the `RECORDS_MAX` newest records are kept. Leaves to others: what a record means
(cost_model/experience).
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.cost_model.experience import Experience, KindRecord, merged
from echo2.outside import unix_now

FORMAT = 1
RECORDS_MAX = 5_000
FILE_BYTES_MAX = 16 << 20
_log = logging.getLogger("echo2.market")


def place(text: str) -> Path | None:
    """The file's path from the config's text; None if it is empty, which means that nothing is saved."""
    return Path(text).expanduser() if text else None


def read_records(path: Path) -> tuple[KindRecord, ...]:
    """The valid records in the file; empty without a file. ConfigError if the file is too large or is not a machines file."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"machines file {path}: expected at most {FILE_BYTES_MAX >> 20} MiB")
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"machines file {path}: expected JSON, got: {error}") from None
    rows = told.get("records") if isinstance(told, Mapping) else None
    if not isinstance(rows, list) or told.get("format") != FORMAT:
        raise ConfigError(f"machines file {path}: expected format {FORMAT} with a list of records, got something else")
    found, bad = [], ""
    for row in rows[-RECORDS_MAX:]:
        try:
            found.append(_record(row))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            bad = str(error)
    if bad:
        _log.warning("machines file %s: left out %d of %d records: %s", path, len(rows) - len(found), len(rows), bad)
    return tuple(found)


@lru_cache(maxsize=8)
def known(path: Path | None) -> Experience:
    """What earlier runs observed, read once per process; empty without a file."""
    return Experience.of(() if path is None else read_records(path), unix_now())


def add(path: Path, records: Iterable[KindRecord]) -> None:
    """Merges records into the file. ConfigError if it cannot be read or written."""
    records = tuple(records)
    if not records:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            whole = merged(read_records(path), records, RECORDS_MAX)
            part = path.with_suffix(".partial")
            part.write_text(json.dumps({"format": FORMAT, "records": [asdict(one) for one in whole]}, indent=1) + "\n")
            part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"machines file {path}: expected a place that can be written, got: {error.strerror}"
        ) from None


def _record(row: Mapping[str, object]) -> KindRecord:
    texts = [row[name] for name in ("run_id", "kind", "provider")]
    numbers = [row[name] for name in ("unix_s", "hours", "losses")]
    lists = [row.get(name, ()) for name in ("ratios", "joins_s")]
    if not all(isinstance(one, str) for one in texts) or not isinstance(row["is_spot"], bool):
        raise ConfigError("expected texts for run_id, kind and provider and true or false for is_spot")
    if not all(_is_number(one) for one in numbers) or not all(isinstance(one, list | tuple) for one in lists):
        raise ConfigError("expected numbers for unix_s, hours and losses and lists for ratios and joins_s")
    if not all(_is_number(one) for values in lists for one in values):  # type: ignore[attr-defined]
        raise ConfigError("expected numbers in ratios and joins_s")
    unix_s, hours, losses = (float(one) for one in numbers)  # type: ignore[arg-type]
    ratios, joins = (tuple(float(one) for one in values) for values in lists)  # type: ignore[attr-defined]
    run_id, kind, provider = (str(one) for one in texts)
    return KindRecord(run_id, kind, provider, bool(row["is_spot"]), unix_s, ratios, hours, int(losses), joins)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
