"""When cycles are collected: young ones at each tick, older ones when the process has grown."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from echo2.coordinator.coordinator import SWITCH_S, collected_garbage


@dataclass(eq=False)
class Knot:
    """Garbage that only the collector finds."""

    other: list[Knot] = field(default_factory=list)


def knot() -> Knot:
    made = Knot()
    made.other.append(made)
    return made


def test_young_garbage_goes_at_the_next_tick_older_when_the_process_has_grown_and_all_is_as_before_on_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, peak = sys.getswitchinterval(), SimpleNamespace(ru_maxrss=1000)
    monkeypatch.setattr(resource, "getrusage", lambda _: peak)
    with collected_garbage() as tick:
        young, old = weakref.ref(knot()), knot()
        assert not gc.isenabled() and sys.getswitchinterval() == SWITCH_S and young() is not None
        tick()
        assert young() is None and gc.get_freeze_count() > 0
        seen = weakref.ref(old)
        del old
        tick()
        assert seen() is not None, "it was set aside, and the process has not grown"
        peak.ru_maxrss = 1251
        tick()
        assert seen() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0 and sys.getswitchinterval() == before
