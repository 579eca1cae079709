"""Compiles the delta codec once, so that a run's processes find it in the cache instead of compiling it at the same time.

Run as a module; ends when the codec has encoded and decoded one small delta of each setting and a keyframe.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import echo2.broadcast

WARM_WITHIN_S = 300.0


def warm_once(cache: Path) -> None:
    """Compiles in a process of its own unless this very code, in this place, was compiled before."""
    stamp = cache / f"codec-{_digest()}"
    if stamp.exists():
        return
    subprocess.run([sys.executable, "-m", "echo2.cli.demo.warm"], check=True, timeout=WARM_WITHIN_S)
    cache.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def is_warm(cache: Path) -> bool:
    """Whether `warm_once` would have nothing to do."""
    return (cache / f"codec-{_digest()}").exists()


def _digest() -> str:
    """Of the codec's source, where it lies, and the compiler's version: what the compiled code depends on."""
    folder = Path(echo2.broadcast.__file__).parent / "delta"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(f"{folder}/{metadata.version('numba')}/{text}".encode()).hexdigest()[:16]


def warm() -> None:
    """One round trip of each kind."""
    import torch

    from echo2.base.ids import Version
    from echo2.broadcast.delta import Decoder, DeltaHeader, HostWeights, Setting, encode_delta, encode_keyframe

    generator = torch.Generator().manual_seed(0)
    before = {"weight": torch.randn(300, 64, generator=generator).bfloat16()}
    base = HostWeights.from_tensors(before, Version(0), 7)
    for share in (0.01, 0.3, 1.0):
        noise = (torch.rand(300, 64, generator=generator) < share) * 1e-3
        after = {"weight": (before["weight"].float() + noise).bfloat16()}
        for setting in (Setting.FAST, Setting.DENSE):
            header = DeltaHeader(
                target_version=Version(1),
                parent_version=base.version,
                parent_fingerprint=base.fingerprint(),
                fingerprint_key=7,
            )
            decoder = Decoder(base)
            for frame in encode_delta(base, after, header, setting):
                decoder.feed(frame)
            decoder.finish()
    list(encode_keyframe(before, DeltaHeader(target_version=Version(1), fingerprint_key=7)))


if __name__ == "__main__":
    warm()
    sys.exit(0)
