"""Lets a measured process keep its cores while other programs of the machine want them."""

from __future__ import annotations

import contextlib
import os

REAL_TIME_PRIORITY = 5  # below the emulator's


def lift() -> None:
    """Real-time round robin where that is allowed (root on Linux); else nothing changes."""
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
