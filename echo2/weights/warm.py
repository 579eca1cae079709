"""Compiles all kernels ahead of time, so that no version waits for a compiler.

The first call on a machine compiles every kernel for bf16 and float32 (tens of CPU seconds) and stores the code in the
package's cache folder; later calls, in any process, load it (under a second). Before starting several daemons on one
machine, call it once; otherwise each of them compiles for itself.
"""

from __future__ import annotations

import torch

from echo2.base.ids import Version
from echo2.weights.container import CodecSetting, DeltaHeader
from echo2.weights.decode import ContainerDecoder
from echo2.weights.encode import encode_delta, encode_keyframe
from echo2.weights.host import HostWeights

_ELEMENTS = 2048  # enough for every kernel to run once


def warm_up(*types: torch.dtype) -> None:
    """Runs a toy version through every code path, for each given element type (default: bf16 and float32)."""
    values = torch.arange(_ELEMENTS) / _ELEMENTS
    old = {str(dtype): values.to(dtype) for dtype in types or (torch.bfloat16, torch.float32)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in new.items():
        tensor[::50] = old[name][1::50][: tensor[::50].numel()]
        tensor[:800] = old[name][1:801]  # a block that changes rarely, and one that changes often
    host = HostWeights.empty()
    _pass_on(host, list(encode_keyframe(old, DeltaHeader(target_version=Version(0)))))
    for number, setting in enumerate(CodecSetting):
        header = DeltaHeader(
            target_version=Version(number + 1),
            parent_version=host.version,
            parent_fingerprint=host.fingerprint(),
            setting=setting,
            block_elements=1000,
        )
        source, target = (old, new) if number % 2 == 0 else (new, old)
        _pass_on(host, list(encode_delta(source, target, header)))


def _pass_on(host: HostWeights, frames: list[bytes]) -> None:
    decoder = ContainerDecoder(host)
    for frame in frames:
        decoder.feed(frame)
    host.commit(decoder.finish())
