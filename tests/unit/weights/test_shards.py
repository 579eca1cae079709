from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    DeltaHeader,
    HostWeights,
    encode_delta,
    encode_keyframe,
    encode_sections,
    fingerprint,
    section_blocks,
    section_fingerprint,
    table_of,
)
from echo2.weights.elements import ELEMENT_TYPES
from echo2.weights.fingerprint import whole_fingerprint
from tests.unit.weights.models import KEY, Weights, delta_header, gaussian_pair, random_tensor, with_changes


def in_sections(old: Weights | None, new: Weights, header: DeltaHeader) -> bytes:
    """A container put together from the sections of all shards."""
    table = table_of(new)
    sections = (section_blocks(old, new, header, table, shard) for shard in range(header.shard_count))
    return b"".join(encode_sections(header, table, chain.from_iterable(sections)))


@settings(max_examples=25)
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(ELEMENT_TYPES), st.lists(st.integers(0, 30), max_size=3).map(tuple)), max_size=5
    ),
    seed=st.integers(0, 1 << 32), shards=st.integers(1, 7), setting=st.sampled_from(list(CodecSetting)),
)  # fmt: skip
def test_sections_are_the_bytes_of_the_whole(tensors, seed, shards, setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor(rng, element, shape) for i, (element, shape) in enumerate(tensors)}
    new = {name: with_changes(rng, tensor, 0.1, 2) for name, tensor in old.items()}
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, block_elements=300, shard_count=shards, setting=setting)
    assert in_sections(old, new, header) == b"".join(encode_delta(old, new, header))
    whole = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=300, shard_count=shards)
    assert in_sections(None, new, whole) == b"".join(encode_keyframe(new, whole))
    parts = [section_fingerprint(new, host.table, shard, shards, KEY) for shard in range(shards)]
    assert whole_fingerprint(host.table.specs, KEY, parts) == fingerprint(new, KEY)


def test_sections_that_do_not_fit_are_refused() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, shard_count=2)
    with pytest.raises(DeltaFormatError, match="expected a shard below 2, got 2"):
        section_blocks(old, new, header, host.table, 2)
    with pytest.raises(DeltaFormatError, match="parent in a delta"):
        section_blocks(None, new, header, host.table, 0)
    other = {**new, "model.layers.0.bias": torch.zeros(8)}
    with pytest.raises(DeltaFormatError, match=r"tensor model\.layers\.0\.bias: expected .*send a keyframe"):
        section_blocks(old, other, header, host.table, 0)
