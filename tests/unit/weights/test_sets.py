"""LoRA adapters as sets of their own: beside the base weights, each with its versions, keyframes and deltas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    DeltaHeader,
    HostWeights,
    compose,
    encode_delta,
    encode_keyframe,
    fingerprint,
)  # fmt: skip
from tests.unit.weights.models import KEY, Weights, decoded, delta_header, gaussian_pair, same_bits


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


def test_an_adapter_travels_beside_the_base_weights() -> None:
    old, new = gaussian_pair()
    base = HostWeights.from_tensors(old, Version(0), KEY)
    hosts = {name: HostWeights.empty(KEY, name) for name in ("maths", "poker")}
    versions = {name: adapter(seed) for seed, name in enumerate(hosts)}
    for name, host in hosts.items():
        host.commit(decoded(host, keyframe(versions[name], 0, name)))
    for step in range(1, 3):
        for name, host in hosts.items():
            following = trained(versions[name], step)
            header = delta_header(host, step, set_name=name)
            host.commit(decoded(host, list(encode_delta(versions[name], following, header, CodecSetting.DENSE))))
            versions[name] = following
    base.commit(decoded(base, list(encode_delta(old, new, delta_header(base, 1)))))
    assert (base.version, *(host.version for host in hosts.values())) == (1, 2, 2)
    assert fingerprint(base.tensors(), KEY) == fingerprint(new, KEY)
    for name, host in hosts.items():
        assert all(same_bits(host.tensors()[tensor], value) for tensor, value in versions[name].items())


def test_a_set_takes_no_version_of_another() -> None:
    """Adapters of one shape differ in nothing but their names."""
    weights = adapter(0)
    maths = HostWeights.from_tensors(weights, Version(0), KEY, "maths")
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
