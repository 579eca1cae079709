"""The pipes to a contained process: answered, late and broken, also where this process has very many descriptors."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator

import pytest

from echo2.contain.sandbox import _read, _write

HIGH = 1500
"""Above what select takes."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < HIGH + 64:
        pytest.skip(f"this machine gives a process {hard} descriptors at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 64), hard))
    low = os.pipe()
    ends = fcntl.fcntl(low[0], fcntl.F_DUPFD, HIGH), fcntl.fcntl(low[1], fcntl.F_DUPFD, HIGH)
    for end in low:
        os.close(end)
    yield ends
    for end in ends:
        os.close(end)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_written_comes_out_above_the_descriptors_that_select_takes(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert min(pipe) >= HIGH
    _write(writing, b"a request", time.monotonic() + 10)
    assert _read(reading, 9, time.monotonic() + 10) == b"a request"


def test_a_silent_end_is_waited_for_no_longer_than_said(pipe: tuple[int, int]) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        _read(pipe[0], 1, begun + 0.2)
    assert 0.2 <= time.monotonic() - begun < 5.0
