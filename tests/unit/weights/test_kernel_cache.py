"""Compiled kernels are of these sources, and lie where every process of this installation finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.weights import kernel_cache


def test_the_folder_changes_with_the_codecs_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (kernel_cache.CODEC / "encode.py").is_file(), "the codec's sources lie there"
    monkeypatch.setattr(kernel_cache, "CODEC", tmp_path)
    (tmp_path / "bits.py").write_text("one = 1\n")
    before = kernel_cache.kernel_folder()
    (tmp_path / "bits.py").write_text("one = 2\n")
    assert kernel_cache.kernel_folder() != before


def test_kernels_lie_beside_the_sources_where_these_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.kernel_folder().parent == kernel_cache.CODEC / "__pycache__", (
        "an empty home compiles nothing anew"
    )
