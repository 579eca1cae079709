"""LoRA adapters as sets of their own: beside the base weights, each with its versions, keyframes and deltas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.weights import (
    DeltaHeader,
    HostWeights,
    compose,
    encode_delta,
    encode_keyframe,
)  # fmt: skip
from tests.unit.weights.models import KEY, Weights, decoded, delta_header


def adapter(seed: int) -> Weights:
    """Low-rank factors in float32, as adapters are trained; B begins at zero."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"base_model.model.layers.{i}.q_proj" for i in range(3)]
    out = {f"{name}.lora_A.weight": torch.randn(8, 96, generator=generator) * 0.1 for name in names}
    return {**out, **{f"{name}.lora_B.weight": torch.zeros(64, 8) for name in names}}


def trained(weights: Weights, seed: int) -> Weights:
    """A step in which every element of an adapter moves, as Adam moves float32 weights."""
    rng = np.random.default_rng(seed)
    return {name: t + torch.from_numpy(rng.normal(0, 1e-4, t.shape).astype(np.float32)) for name, t in weights.items()}


def keyframe(weights: Weights, version: int, set_name: str) -> list[bytes]:
    header = DeltaHeader(target_version=Version(version), fingerprint_key=KEY, set_name=set_name)
    return list(encode_keyframe(weights, header))


def test_a_set_takes_no_version_of_another() -> None:
    """Adapters of one shape differ in nothing but their names."""
    weights = adapter(0)
    maths = HostWeights.empty(KEY, "maths")
    maths.commit(decoded(maths, keyframe(weights, 0, "maths")))
    with pytest.raises(DeltaFormatError, match="to version 1 of set poker: expected a version of set 'maths'"):
        decoded(maths, keyframe(weights, 1, "poker"))
    with pytest.raises(DeltaFormatError, match="keyframe to version 1: expected a version of set 'maths'"):
        decoded(maths, keyframe(weights, 1, ""))
    assert maths.version == 0
    one = list(encode_delta(weights, trained(weights, 1), delta_header(maths, 1, set_name="maths")))
    poker = HostWeights.from_tensors(trained(weights, 1), Version(1), KEY, "poker")
    two = list(encode_delta(trained(weights, 1), weights, delta_header(poker, 2, set_name="poker")))
    with pytest.raises(DeltaFormatError, match="expected consecutive deltas"):
        list(compose(one, two))
