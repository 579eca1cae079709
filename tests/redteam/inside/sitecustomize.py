"""Python loads this at the start of a daemon whose PYTHONPATH has this folder: on SIGUSR2 it says what the daemon holds.

The bytes that are allocated and not freed, by glibc's own count, go to `$LIVE_BYTES_IN/<process>`. What a process has in RAM
is another matter: of what is freed, the allocator keeps whole pages where a part is still in use, and takes them again later.
"""

import ctypes
import gc
import os
import signal
from pathlib import Path


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _say(*_: object) -> None:
    was_set_aside = gc.get_freeze_count() > 0  # the coordinator's pauses are short so
    gc.unfreeze()
    gc.collect()
    if was_set_aside:
        gc.freeze()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    path = Path(os.environ["LIVE_BYTES_IN"]) / str(os.getpid())
    path.with_suffix(".new").write_text(str(found.uordblks + found.hblkhd))
    path.with_suffix(".new").rename(path)


if "LIVE_BYTES_IN" in os.environ:
    signal.signal(signal.SIGUSR2, _say)
