import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2 import weights as delta
from echo2.base.ids import Version
from echo2.weights import CodecSetting, DeltaHeader, HostWeights, encode_delta, encode_keyframe, jit, warm_up
from tests.patience import WAIT_S
from tests.unit.weights.models import decoded, delta_header


def compiled_forms() -> dict[str, int]:
    """Of each kernel, for how many kinds of arguments this process has it compiled."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules([str(Path(delta.__file__).parent)]):
        for value in vars(importlib.import_module(f"echo2.weights.{module.name}")).values():
            if hasattr(value, "signatures"):
                found[f"{value.py_func.__module__}.{value.py_func.__name__}"] = value
    return {name: len(kernel.signatures) for name, kernel in found.items()}


def versions_of_every_kind() -> None:
    """From a handful of changed elements to all, in both settings, and a keyframe."""
    generator = torch.Generator().manual_seed(0)
    old = {name: torch.randn(count, generator=generator).bfloat16() for name, count in (("a", 120_000), ("b", 70))}
    for share in (0.0005, 0.01, 0.05, 0.3, 1.0):
        new = {
            name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor * 1.01, tensor)
            for name, tensor in old.items()
        }
        for setting in CodecSetting:
            host = HostWeights.from_tensors(old, Version(0))
            host.commit(decoded(host, list(encode_delta(old, new, delta_header(host, 1, setting=setting)))))
    empty = HostWeights.empty()
    empty.commit(decoded(empty, list(encode_keyframe(old, DeltaHeader(target_version=Version(0))))))


def test_no_version_waits_for_a_compiler_after_warming_up() -> None:
    """In a process that compiled nothing else before."""
    run = subprocess.run([sys.executable, "-m", __name__], check=False, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr


def test_the_folder_changes_with_the_codecs_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (jit.CODEC / "encode.py").is_file(), "the codec's sources lie there"
    monkeypatch.setattr(jit, "CODEC", tmp_path)
    (tmp_path / "bits.py").write_text("one = 1\n")
    before = jit.kernel_folder()
    (tmp_path / "bits.py").write_text("one = 2\n")
    assert jit.kernel_folder() != before


if __name__ == "__main__":
    warm_up(torch.bfloat16)
    before = compiled_forms()
    assert sum(before.values()) > 10, before
    versions_of_every_kind()
    late = {name: count - before[name] for name, count in compiled_forms().items() if count > before[name]}
    assert not late, f"compiled after warming up: {late}"
