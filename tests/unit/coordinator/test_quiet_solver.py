from __future__ import annotations

import os
import threading

import pytest

from echo2.coordinator.planning.pool_plan import quiet_solver


def test_what_is_written_below_python_goes_to_standard_error_in_whatever_order_threads_leave(
    capfd: pytest.CaptureFixture[str],
) -> None:
    first_in, second_in = threading.Event(), threading.Event()

    def first() -> None:
        with quiet_solver():
            first_in.set()
            second_in.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    with quiet_solver():
        second_in.set()
        thread.join(10)
        os.write(1, b"solver\n")
    os.write(1, b"answer\n")
    assert capfd.readouterr() == ("answer\n", "solver\n")
