"""How long a test waits for what must come, and how much CPU time it grants."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 600.0
"""A wait ends by state; this bound, minutes for a machine under load, only ends a test that would otherwise hang."""

LOOP, LOOP_S = 200_000, 0.013
"""A plain loop, and what it takes of an idle core of the machine on which the limits were set."""


def _slowness() -> float:
    began = time.process_time()
    for _ in range(LOOP):
        pass
    return max(1.0, (time.process_time() - began) / LOOP_S)


@contextmanager
def cpu_time_within(seconds: float) -> Iterator[None]:
    """The block takes at most so much CPU time of this process; more where a plain loop beside it takes longer, too."""
    slowness, began = _slowness(), time.process_time()
    yield
    spent = time.process_time() - began
    assert spent < seconds * max(slowness, _slowness()), f"{spent} s"
