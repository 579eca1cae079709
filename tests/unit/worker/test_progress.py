from __future__ import annotations

import io
import logging

import pytest

from echo2.worker.runtime.progress import LINE_EVERY_S, ProgressBars, ProgressLines, progress_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_for_terminals_and_lines_for_all_else() -> None:
    assert isinstance(progress_for(Terminal(), as_json=False), ProgressBars)
    assert isinstance(progress_for(Terminal(), as_json=True), ProgressLines)
    assert isinstance(progress_for(io.StringIO(), as_json=False), ProgressLines)


def test_lines_come_now_and_then_and_name_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "echo2.worker")
    now = [0.0]
    lines = ProgressLines(lambda: now[0])
    for _ in range(10):
        lines.at("download", 1 << 20, 1 << 30)
    assert not caplog.messages, "quick things are not told"
    now[0] = LINE_EVERY_S
    lines.at("download", 2_000_000, 1_000_000_000)
    lines.at("download", 3_000_000, 1_000_000_000)
    lines.at("catch-up", 5, 0)
    assert caplog.messages == ["download: 2.0 MB of 1.0 GB"]


def test_a_bar_is_drawn_and_gone_at_its_end_and_the_log_goes_on_above_it() -> None:
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("echo2")
    logger.addHandler(handler)
    try:
        bars = ProgressBars(terminal)
        bars.at("download", 10_000_000, 40_000_000)
        assert handler.stream is not terminal
        logger.warning("a line meanwhile")
        bars.at("load", 0, 0)
        bars.ended("download")
        bars.ended("load")
        bars.ended("never begun")
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    text = terminal.getvalue()
    assert "download" in text and "a line meanwhile" in text
