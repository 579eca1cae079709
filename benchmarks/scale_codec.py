"""What a merged delta takes by the share of weights that differ from the base: by the codec, and at least by any that is lossless.

    python -m benchmarks.scale_codec      prints what it found as one JSON line

Weights as a model has them (normal, 0.02), moved by a random walk in float32 and rounded to bf16, as masters are. The bound is the
entropy of which weights changed, given the old exponent of each, and of which way: a coder that knows the shares takes as much.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from benchmarks.scale_newcomer import delta_bytes
from echo2.base.ids import Version
from echo2.weights import DeltaHeader, encode_keyframe

WEIGHTS, SIZE = 2_000_000, 0.02
DRIFTS = (1e-6, 1.3e-6, 5e-6, 1.4e-5)


def entropy_bits(shares: Tensor) -> Tensor:
    held = shares.clamp(1e-12, 1 - 1e-12)
    return -(held * held.log2() + (1 - held) * (1 - held).log2())


def bound_bytes(old: Tensor, new: Tensor) -> float:
    """Of flat bf16 tensors."""
    exponents = (old.view(torch.int16).long() >> 7) & 0xFF
    changed = (old.view(torch.int16) != new.view(torch.int16)).double()
    counts = torch.bincount(exponents, minlength=256).double()
    shares = torch.bincount(exponents, weights=changed, minlength=256) / counts.clamp(min=1)
    return float((counts * entropy_bits(shares)).sum() + changed.sum()) / 8


def main() -> None:
    torch.manual_seed(0)
    masters, found = SIZE * torch.randn(WEIGHTS), []
    old = masters.bfloat16()
    whole = len(b"".join(encode_keyframe({"w": old.view(2000, -1)}, DeltaHeader(Version(0), fingerprint_key=1))))
    for drift in DRIFTS:
        new = (masters + drift * torch.randn(WEIGHTS)).bfloat16()
        coded = delta_bytes({"w": old.view(2000, -1)}, {"w": new.view(2000, -1)}, 0, 1)
        share = float((old.view(torch.int16) != new.view(torch.int16)).double().mean())
        found.append({"changed": share, "coded": coded / whole, "bound": bound_bytes(old, new) / whole})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
