"""The learner's folder of a run: one learner at a time, and always the same run.

Guarantees: a second learner on the same folder is refused while the first lives (the system drops the lock with the
process, so a kill leaves nothing behind); a folder of another run, model or batch shape is refused with what differs.
Leaves to others: what is inside (journal, checkpoint, metrics).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from echo2.base.errors import StateError


class RunFolder:
    """Locked from construction to `release`."""

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
        """Notes what the run is on the first start; compares on every later one. `notes` are written only."""
        path = self.path / "run.json"
        wanted = json.loads(json.dumps(dict(identity)))
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({**wanted, **(notes or {})}, indent=1))
            partial.replace(path)
            return
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise StateError(f"{path}: expected the run's identity, got something else: {error}") from None
        for name, value in wanted.items():
            if found.get(name) != value:
                raise StateError(
                    f"run folder {self.path}: expected {name} {_short(found.get(name))} as when the run began, got "
                    f"{_short(value)}; start a new run under another name, or put the option back"
                )

    def release(self) -> None:
        os.close(self._lock)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
