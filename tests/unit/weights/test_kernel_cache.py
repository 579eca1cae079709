"""Compiled kernels are of these sources, and lie where every process of this installation finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.weights import jit


def test_the_folder_changes_with_the_codecs_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (jit.CODEC / "encode.py").is_file(), "the codec's sources lie there"
    monkeypatch.setattr(jit, "CODEC", tmp_path)
    (tmp_path / "bits.py").write_text("one = 1\n")
    before = jit.kernel_folder()
    (tmp_path / "bits.py").write_text("one = 2\n")
    assert jit.kernel_folder() != before


def test_kernels_lie_beside_the_sources_where_these_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit.kernel_folder().parent == jit.CODEC / "__pycache__", "an empty home compiles nothing anew"
