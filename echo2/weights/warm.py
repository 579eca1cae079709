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
from echo2.weights.elements import flat_bits
from echo2.weights.encode import encode_delta, encode_keyframe
from echo2.weights.host import HostWeights

_BLOCK = 1000  # elements: enough for every kernel to run once


def warm_up(*types: torch.dtype) -> None:
    """Runs a toy version through every code path, for each given element type (default: bf16 and float32)."""
    place = torch.arange(_BLOCK)
    # Blocks that change everywhere, at some places by much, at some by little, and rarely.
    steps = torch.cat(
        [
            place % 3 + 1,
            *(step * (place % apart == 0) + (place % (10 * apart) == 0) for step, apart in ((300, 3), (1, 3), (1, 90))),
        ]
    )
    values = torch.arange(len(steps)) / len(steps)
    old = {str(dtype): values.to(dtype) for dtype in types or (torch.bfloat16, torch.float32)}
    new = {name: (flat_bits(t) + steps.to(flat_bits(t).dtype)).view(t.dtype) for name, t in old.items()}
    host = HostWeights.empty()
    _pass_on(host, list(encode_keyframe(old, DeltaHeader(target_version=Version(0)))))
    for number, setting in enumerate(CodecSetting):
        header = DeltaHeader(
            target_version=Version(number + 1),
            parent_version=host.version,
            parent_fingerprint=host.fingerprint(),
            setting=setting,
            block_elements=_BLOCK,
        )
        source, target = (old, new) if number % 2 == 0 else (new, old)
        _pass_on(host, list(encode_delta(source, target, header)))


def _pass_on(host: HostWeights, frames: list[bytes]) -> None:
    decoder = ContainerDecoder(host)
    for frame in frames:
        decoder.feed(frame)
    host.commit(decoder.finish())
