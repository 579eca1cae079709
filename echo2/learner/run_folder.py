"""The learner's folder for a run: used by one learner at a time, always for the same run.

Guarantees: a second learner on the same folder is refused while the first lives (the system releases the lock with the process,
so a kill leaves no stale lock); a folder of another run, model or batch shape is refused with an error that names the difference.
Leaves to others: the contents (journal, checkpoint, metrics).
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from echo2.base.errors import StateError
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.outside import here, unix_now
from echo2.trust.tls import read_secret, write_secret

SECRET_BYTES = 32  # 256 bits
_OF_A_RUN = ("checkpoints/step-????????", "journal/segment-*")


class RunFolder:
    """A run folder, locked from construction to `release`. Raises `StateError` if another learner holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / "learner.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StateError(f"run folder {path}: another learner (process {holder}) works in it") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def check_identity(self, identity: Mapping[str, object], notes: Mapping[str, object] | None = None) -> None:
        """Records the run's identity on the first start and compares it on every later one; raises `StateError` if it differs.

        `notes` are recorded but not compared.
        """
        path = self.path / "run.json"
        wanted = json.loads(json.dumps(dict(identity)))
        if not path.exists():
            if left := self._trained():
                raise StateError(f"{path}: expected it beside {left}, found none; restore it from a backup")
            _write(path, {**wanted, **(notes or {})})
            return
        found = _read(path)
        for name in (name for name in wanted if name in found):
            if found[name] != wanted[name]:
                raise StateError(
                    f"run folder {self.path}: expected {name} {_short(found[name])} as when the run began, got "
                    f"{_short(wanted[name])}; start a new run under another name, or put the option back"
                )
        if wanted.keys() - found.keys():
            _write(path, {**found, **wanted})

    def began(self) -> datetime:
        """When the run began, as recorded by `check_identity`; now if it has not."""
        path = self.path / "run.json"
        recorded = _read(path).get("began") if path.exists() else None
        return datetime.fromisoformat(str(recorded)) if recorded else datetime.fromtimestamp(int(unix_now()), UTC)

    def _trained(self) -> str:
        """Name of a file that only a run that has begun leaves; empty if there is none."""
        left = (path.name for name in _OF_A_RUN for path in sorted(self.path.glob(name)))
        return next(left, "")

    def secret(self) -> bytes:
        """The run's secret random bytes, made once, from which its seeds are derived."""
        path = self.path / "sampling.secret"
        if not path.exists():
            write_secret(path, here().rng.randbytes(SECRET_BYTES))
        found = read_secret(path)
        if len(found) != SECRET_BYTES:
            raise StateError(f"{path}: expected {SECRET_BYTES} bytes, got {len(found)}; restore it from a backup")
        return found

    def release(self) -> None:
        os.close(self._lock)


def _write(path: Path, content: Mapping[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**content, "check": _check_of(content)}, indent=1))
    files = here().files
    files.sync_path(partial)
    files.rename(partial, path)
    files.sync_path(path.parent)


def _read(path: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(path.read_text())
        if found.pop("check", None) != _check_of(found):
            raise ValueError("it differs from what was written")
    except (OSError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path}: expected the run's identity, got something else ({error}); restore it from a backup"
        ) from None
    return found


def _check_of(content: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- batches whose loss or gradient was not finite, as JSON for manual inspection

KEPT_MAX = 16
"""Batches kept per run; later ones are only counted."""


def keep_for_inspection(batch: Batch, folder: Path) -> None:
    """Writes `batch` to not_finite/ in the run folder `folder`, unless `KEPT_MAX` batches are already there.

    Not for the event loop's thread: a batch of 6 million tokens is 300 MB of text and takes a while. It is written piece by piece,
    so that other threads get the GIL."""
    kept = folder / "not_finite"
    kept.mkdir(exist_ok=True)
    if len(list(kept.glob("*.json"))) >= KEPT_MAX:
        return
    target = kept / f"step-{batch.step:08d}.json"
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump({"step": batch.step, "groups": list(map(_readable, batch.groups))}, file)
    partial.rename(target)


def _readable(group: TrainGroup) -> dict[str, object]:
    rollouts = [
        {name: getattr(rollout, name) for name in ("index", "token_ids", "logprobs", "raw_logprobs")}
        for rollout in group.rollouts
    ]
    return {
        "group_id": group.spec.group_id, "prompt_token_ids": group.spec.prompt_token_ids, "rewards": group.rewards,
        "rollouts": rollouts,
    }  # fmt: skip
