"""When cycles are collected: young ones at each tick, those set aside seldom or when the process has grown."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import dataclass, field

from echo2.coordinator.runtime.pauses import SWITCH_S, WALK_PAUSE_S_MIN, ShortPauses


@dataclass(eq=False)
class Knot:
    """Garbage that only the collector finds."""

    other: list[Knot] = field(default_factory=list)


def knot() -> Knot:
    made = Knot()
    made.other.append(made)
    return made


@dataclass
class World:
    now_s: float = 0.0
    peak_kb: int = 1000

    def pauses(self) -> ShortPauses:
        return ShortPauses(lambda: self.now_s, lambda: self.peak_kb)


def test_young_garbage_goes_at_the_next_tick_and_nothing_is_collected_between() -> None:
    with World().pauses() as pauses:
        seen = weakref.ref(knot())
        assert not gc.isenabled() and seen() is not None
        pauses.tick()
        assert seen() is None


def test_garbage_that_was_set_aside_goes_when_the_pause_is_over() -> None:
    world = World()
    with world.pauses() as pauses:
        made = knot()
        pauses.tick()
        seen = weakref.ref(made)
        del made
        world.now_s = WALK_PAUSE_S_MIN - 1
        pauses.tick()
        assert seen() is not None
        world.now_s = WALK_PAUSE_S_MIN
        pauses.tick()
        assert seen() is None


def test_garbage_that_was_set_aside_goes_when_the_process_has_grown_by_a_quarter() -> None:
    world = World()
    with world.pauses() as pauses:
        made = knot()
        pauses.tick()
        seen = weakref.ref(made)
        del made
        world.peak_kb = 1251
        pauses.tick()
        assert seen() is None
        kept = knot()
        pauses.tick()
        seen = weakref.ref(kept)
        del kept
        pauses.tick()  # no growth since the last walk
        assert seen() is not None


def test_on_leaving_all_is_as_before() -> None:
    before = sys.getswitchinterval()
    with World().pauses() as pauses:
        pauses.tick()
        assert sys.getswitchinterval() == SWITCH_S and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0 and sys.getswitchinterval() == before
