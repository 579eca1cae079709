"""Finds what has changed since a page last asked, computed once for all open pages.

Guarantees: a change appears in the answers within `FRESH_S`; a worker's row is rebuilt only when its data has changed, so that
thousands of workers cost little however many pages are open; texts are JSON. Leaves to others: what is shown (state), sending
(app).
"""

from __future__ import annotations

import json
from typing import Any

from echo2.coordinator.runtime.web.state import StateView

FRESH_S = 0.2


class Feed:
    """The newest JSON text of each section and row. `serial`: number of the newest refresh; each page remembers the one that it has
    seen."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._at = float("-inf")
        self._sections: dict[str, tuple[int, str]] = {}
        self._rows: dict[str, tuple[int, str, tuple[Any, ...]]] = {}
        self.serial = 0

    def changes_since(self, seen: int) -> dict[str, str]:
        """JSON texts of the sections that changed after refresh `seen`, by name; changed workers' rows are under `workers`."""
        self._refresh()
        found = {name: text for name, (serial, text) in self._sections.items() if serial > seen}
        rows = [f"{json.dumps(peer)}:{text}" for peer, (serial, text, _) in self._rows.items() if serial > seen]
        if rows:
            found["workers"] = "{" + ",".join(rows) + "}"
        return found

    def _refresh(self) -> None:
        now = self._view.now()
        if now - self._at < FRESH_S:
            return
        self._at = now
        self.serial += 1
        for name, value in self._view.sections().items():
            text = _json(value)
            if name not in self._sections or self._sections[name][1] != text:
                self._sections[name] = (self.serial, text)
        for peer_id, key in self._view.worker_keys():
            known = self._rows.get(peer_id)
            if known is None or known[2] != key:
                self._rows[peer_id] = (self.serial, _json(self._view.worker(peer_id)), key)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
