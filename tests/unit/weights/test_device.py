import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights import CodecSetting, HostWeights, apply_updates, encode_delta, fingerprint
from echo2.weights.block import encode_block
from echo2.weights.elements import ELEMENT_TYPES, bits_of, blocks_of, flat_bits
from echo2.weights.host import encode_block_on_device
from echo2.weights.marks import Finds
from tests.unit.weights.models import KEY, decoded, delta_header, gaussian_pair, random_tensor, with_changes


@settings(max_examples=30)
@given(
    types=st.lists(st.sampled_from(ELEMENT_TYPES), min_size=1, max_size=3), seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.0, 0.02, 0.4, 1.0]), setting=st.sampled_from(list(CodecSetting)),
)  # fmt: skip
def test_device_and_cpu_code_a_block_to_the_same_bytes(types, seed, share, setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor(rng, element, (rng.integers(1, 900),)) for i, element in enumerate(types)}
    new = {name: with_changes(rng, tensor, share, 2) for name, tensor in old.items()}
    for block in blocks_of(HostWeights.from_tensors(old, Version(0)).table.specs, 700):

        def parts(weights: dict[str, torch.Tensor], read) -> list:  # type: ignore[no-untyped-def, type-arg]
            return [read(weights[s.spec.name])[s.start : s.start + s.count] for s in block.segments]  # noqa: B023

        expected = encode_block(block, parts(old, bits_of), parts(new, bits_of), setting, KEY, Finds(block))
        found = encode_block_on_device(block, parts(old, flat_bits), parts(new, flat_bits), setting, KEY)
        assert found == expected


def test_an_index_out_of_range_is_refused_before_writing() -> None:
    live = {"w": torch.zeros(4).bfloat16()}
    update = TensorUpdate("w", "bfloat16", (4,), np.array([1, 4]), np.array([7, 7], np.uint16))
    with pytest.raises(DeltaFormatError, match="tensor w: expected indices below 4"):
        apply_updates(live, [update])
    assert not live["w"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("setting", CodecSetting)
def test_weights_on_a_gpu_give_the_same_container(setting: CodecSetting) -> None:
    old, new = gaussian_pair(rows=3000)
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, block_elements=100_000)
    expected = list(encode_delta(old, new, header, setting))

    def on_gpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = {name: tensor.cuda() for name, tensor in weights.items()}
        moved["lm_head.weight"] = moved["model.embed_tokens.weight"]
        return moved

    assert list(encode_delta(on_gpu(old), on_gpu(new), header, setting)) == expected
    live = on_gpu(old)
    staged = decoded(host, expected)
    apply_updates(live, staged.updates())
    assert fingerprint(live, KEY) == fingerprint(new, KEY)
