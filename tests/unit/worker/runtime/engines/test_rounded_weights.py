"""Rounded weights: what is live follows from the masters, bit for bit, whatever came and whatever failed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import fingerprint
from echo2.worker.runtime.engines.adapter import Adapter, AdapterSpec
from echo2.worker.runtime.engines.embedded import EmbeddedEngine
from echo2.worker.runtime.engines.forward import CachedDecoder
from echo2.worker.runtime.engines.products import Products
from echo2.worker.runtime.engines.rounded import BLOCK_ELEMENTS, LEVELS, Rounded, rounded_rows
from echo2.worker.runtime.engines.rounded_weights import RoundedWeights
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from echo2.worker.slots import Fill
from tests.contract.engine_rig import (
    Staged,
    delta_of,
    full_blocks,
    keyframe_of,
    make_versions,
    rounded_to_int8,
    tiny_config,
)

CONFIG = tiny_config("llama", attention_bias=True, mlp_bias=True)


def published(model: torch.nn.Module, key: int) -> int:
    return fingerprint({name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}, key)


def live(weights: RoundedWeights) -> list[torch.Tensor]:
    """Copies of everything that the forward reads."""
    found = [weights.final_norm, weights.embedding]
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
        found += [layer.input_norm, layer.mlp_norm]
        found += [
            bias
            for bias in (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias)
            if bias is not None
        ]
    for matrix in matrices:
        assert isinstance(matrix, Rounded)
        found += [matrix.codes, matrix.scales]
    return [tensor.clone() for tensor in found]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@given(st.lists(st.lists(st.floats(width=16), min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_finite_element_is_off_by_half_a_step_at_most(rows: list[list[float]]) -> None:
    master = torch.tensor(rows, dtype=torch.float32).bfloat16()
    codes, scales = rounded_rows(master)
    assert codes.dtype == torch.int8 and int(codes.abs().max()) <= LEVELS
    for row, code, scale in zip(master.float(), codes, scales, strict=True):
        if torch.isfinite(scale):
            assert torch.all((code.float() * scale - row).abs() <= scale * 0.5001)
        else:
            assert not code.any()


def test_a_delta_gives_what_its_keyframe_would_and_touches_only_what_it_names() -> None:
    old, new, _ = make_versions(CONFIG)
    weights, anew = RoundedWeights(read_shape(CONFIG)), RoundedWeights(read_shape(CONFIG))
    weights.apply(weights.checked(keyframe_of(old, 0)))
    before = live(weights)
    weights.apply(weights.checked(delta_of(old, new, 0, 1)))
    anew.apply(anew.checked(keyframe_of(new, 1)))
    assert same(live(weights), live(anew)) and not same(live(weights), before)
    assert weights.fingerprint(5) == anew.fingerprint(5) == published(new, 5)
    name = "model.layers.1.mlp.up_proj.weight"
    (one,) = [tensor for tensor in delta_of(old, new, 0, 1).tensors if tensor.name == name]
    weights.apply(weights.checked(keyframe_of(old, 0)))
    weights.apply(weights.checked(Staged(Version(1), Version(0), [one])))
    changed = [not torch.equal(a, b) for a, b in zip(live(weights), before, strict=True)]
    assert 1 <= sum(changed) <= 2, "the codes of one matrix, and its scales where a largest element changed"


def test_what_is_live_and_does_not_follow_is_another_fingerprint() -> None:
    model = make_versions(CONFIG)[0]
    weights = RoundedWeights(read_shape(CONFIG))
    weights.apply(weights.checked(keyframe_of(model, 0)))
    head, norm = weights.head, weights.layers[2].mlp_norm
    assert isinstance(head, Rounded)
    for place in (head.codes.view(-1)[7:8], head.scales[3:4], norm[:1]):
        place.add_(1)
        assert weights.fingerprint(5) != published(model, 5)
        place.sub_(1)
    weights.apply(weights.checked(keyframe_of(model, 0)))
    assert weights.fingerprint(5) == published(model, 5)


def test_a_failure_in_the_middle_leaves_masters_and_what_follows() -> None:
    old, new, _ = make_versions(CONFIG)
    weights = RoundedWeights(read_shape(CONFIG))
    weights.apply(weights.checked(keyframe_of(old, 0)))
    before = live(weights)
    scatters = weights.checked(delta_of(old, new, 0, 1))
    scatters[-1] = replace(scatters[-1], positions=np.array([1 << 40]), bits=scatters[-1].bits[:1])
    with pytest.raises(EngineError, match=scatters[-1].name):
        weights.apply(scatters)
    assert same(live(weights), before)
    assert weights.fingerprint(1) == published(old, 1)


def test_values_that_are_not_finite_arrive_and_are_proven() -> None:
    model = make_versions(CONFIG)[0]
    weights = RoundedWeights(read_shape(CONFIG))
    weights.apply(weights.checked(keyframe_of(model, 0)))
    odd = np.array([0x7FC1, 0x8000, 0xFF80, 0x7F81], np.uint16)
    for name in ("lm_head.weight", "model.norm.weight"):
        tensor = dict(model.named_parameters())[name]
        update = TensorUpdate(name, "bfloat16", tuple(tensor.shape), np.arange(4, dtype=np.int64), odd)
        weights.apply(weights.checked(Staged(Version(1), Version(0), [update])))
        with torch.no_grad():
            tensor.view(-1)[:4] = torch.from_numpy(odd.astype(np.uint32) << 16).view(torch.float32)
    bits = dict(weights._masters.published())
    assert bits["lm_head.weight"].view(torch.int16).view(-1)[:4].numpy().view(np.uint16).tolist() == odd.tolist()
    assert weights.fingerprint(1) == fingerprint(bits, 1), "all that is live follows from the masters"


def test_float32_is_refused_by_name() -> None:
    model = make_versions(CONFIG)[0]
    weights = RoundedWeights(read_shape(CONFIG))
    staged = keyframe_of(model, 0)
    wide = [replace(tensor, dtype="float32", bits=tensor.bits.astype(np.uint32) << 16) for tensor in staged.tensors]
    with pytest.raises(
        EngineError, match=f"{wide[0].name}: the masters of a rounding engine hold bfloat16, got float32"
    ):
        weights.checked(replace(staged, tensors=wide))


def test_an_adapter_alone_is_refused() -> None:
    base = {name: tensor.detach() for name, tensor in make_versions(CONFIG)[0].named_parameters()}
    adapter = Adapter(base, AdapterSpec(2, 1.0, "bfloat16", "0" * 16))
    with pytest.raises(ConfigError, match="quantisation: int8 is for whole weights"):
        EmbeddedEngine(CONFIG, slot_count=2, adapter=adapter, is_rounded=True)


@pytest.mark.parametrize("row_count", [1, 7, 300])
def test_products_by_blocks_are_those_of_the_widened_matrix(row_count: int) -> None:
    torch.manual_seed(1)
    matrix = Rounded(*rounded_rows(torch.randn(BLOCK_ELEMENTS // 96 + 50, 96)))  # two blocks, the second not full
    bias, rows = torch.randn(matrix.shape[0]), torch.randn(row_count, 96)
    whole = matrix.codes.float() * matrix.scales[:, None]
    assert torch.allclose(Products().product(rows, matrix, bias), rows @ whole.T + bias, atol=1e-4)
    assert torch.allclose(Products().product(rows, matrix[40:]), rows @ whole[40:].T, atol=1e-4)


def test_its_logits_are_those_of_the_rounded_model() -> None:
    model = make_versions(CONFIG)[0]
    weights = RoundedWeights(read_shape(CONFIG))
    weights.apply(weights.checked(keyframe_of(model, 0)))
    decoder = CachedDecoder(weights, full_blocks(1, 64))
    tokens = [5, 9, 2, 33, 7]
    decoder.fill([Fill(0, 0, tuple(tokens[:-1]))])
    got = decoder.decode(tokens[-1:], [0], [4])[0]
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0, -1]
        expected = rounded_to_int8(model)(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(got, exact, atol=1e-3), "rounding is seen"


def test_it_holds_less_than_an_engine_of_float32() -> None:
    shape = read_shape(CONFIG | {"hidden_size": 256, "intermediate_size": 512})
    assert RoundedWeights(shape).nbytes < 0.78 * LiveWeights(shape).nbytes
