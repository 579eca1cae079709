"""Weight sets for the tests of this folder: random bits of every element type, and changes like those of training."""

import numpy as np
import torch

from echo2.base.ids import Version
from echo2.weights import ContainerDecoder, DeltaHeader, HostWeights, StagedDelta
from echo2.weights.elements import ElementType, bits_of, tensor_of

KEY = 0x5EED
Weights = dict[str, torch.Tensor]


def random_tensor(rng: np.random.Generator, element: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern: NaN payloads, infinities, denormals, negative zero. Bools stay bools."""
    count = int(np.prod(shape, dtype=np.int64))
    if element.name == "bool":
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.integers(0, 256, count * element.bytes, dtype=np.uint8)
    return tensor_of(raw.view(element.bits_dtype), element, shape)


def with_changes(rng: np.random.Generator, tensor: torch.Tensor, share: float, reach: int) -> torch.Tensor:
    """A copy in which a share of the elements moved by up to `reach` units in the last place."""
    out = tensor.clone().reshape(-1)
    if out.dtype == torch.bool:
        return (out ^ torch.from_numpy(rng.random(out.numel()) < share)).reshape(tensor.shape)
    raw = out.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]).numpy()
    hit = np.flatnonzero(rng.random(raw.size) < share)
    raw[hit] += rng.integers(1, reach + 1, hit.size).astype(raw.dtype) * rng.choice([-1, 1], hit.size).astype(raw.dtype)
    return out.reshape(tensor.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of raw bits, so that NaN equals itself and -0 differs from 0."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits_of(a) == bits_of(b)).all())


def gaussian_pair(
    seed: int = 0, share: float = 0.05, rows: int = 64
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two versions of a small bf16 model with a tied head, norms and a bias."""
    generator = torch.Generator().manual_seed(seed)
    embedding = (torch.randn(rows, 96, generator=generator) * 0.02).bfloat16()
    old = {
        "model.embed_tokens.weight": embedding,
        "model.layers.0.mlp.weight": (torch.randn(rows, 128, generator=generator) * 0.02).bfloat16(),
        "model.layers.0.norm.weight": torch.ones(96).bfloat16(),
        "model.layers.0.bias": torch.randn(7, generator=generator),
        "model.steps": torch.tensor(3),
        "lm_head.weight": embedding,
    }
    rng = np.random.default_rng(seed)
    new = {name: with_changes(rng, tensor, share, 2) for name, tensor in old.items()}
    new["lm_head.weight"] = new["model.embed_tokens.weight"]
    return old, new


def delta_header(host: HostWeights, target: int, **fields: object) -> DeltaHeader:
    """A header for a delta from what the host holds."""
    return DeltaHeader(
        target_version=Version(target),
        parent_version=host.version,
        parent_fingerprint=host.fingerprint(KEY),
        fingerprint_key=KEY,
        **fields,  # type: ignore[arg-type]
    )


def decoded(host: HostWeights, frames: list[bytes]) -> StagedDelta:
    """The staged version of a whole container."""
    decoder = ContainerDecoder(host)
    for frame in frames:
        decoder.feed(frame)
    return decoder.finish()
