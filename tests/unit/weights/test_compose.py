from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.weights import CodecSetting, HostWeights, compose, encode_delta, fingerprint, parse_frame
from echo2.weights.container import BlockFrame, Method
from echo2.weights.elements import ELEMENT_TYPES
from tests.unit.weights.models import Weights, decoded, delta_header, random_tensor, with_changes


def chain(
    versions: list[Weights], setting: CodecSetting = CodecSetting.FAST, block_elements: int = 700
) -> list[list[bytes]]:
    """One container a step, from version 0 on."""
    out = []
    for number, (old, new) in enumerate(pairwise(versions)):
        host = HostWeights.from_tensors(old, Version(number))
        out.append(list(encode_delta(old, new, delta_header(host, number + 1, block_elements=block_elements), setting)))
    return out


def direct(versions: list[Weights], setting: CodecSetting) -> list[bytes]:
    host = HostWeights.from_tensors(versions[0], Version(0))
    header = delta_header(host, len(versions) - 1, block_elements=700)
    return list(encode_delta(versions[0], versions[-1], header, setting))


def walk(seed: int, count: int, share: float, reach: int = 2) -> list[Weights]:
    """Versions of random bf16, fp32 and fp8 tensors; reach 1 makes many changes cancel out."""
    rng = np.random.default_rng(seed)
    shapes = {0: (40, 50), 2: (900,), 4: (33,)}
    versions = [{f"t{i}": random_tensor(rng, ELEMENT_TYPES[i], shape) for i, shape in shapes.items()}]
    for _ in range(count):
        versions.append({name: with_changes(rng, t, share, reach) for name, t in versions[-1].items()})
    return versions


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 32), count=st.integers(1, 6), share=st.sampled_from([0.0, 0.02, 0.3]),
    reach=st.sampled_from([1, 3]),
)  # fmt: skip
def test_composition_equals_direct_encoding_byte_for_byte(seed: int, count: int, share: float, reach: int) -> None:
    """Unless most of a block had changed on the way, which is then listed for all of it: that leads to the same version."""
    versions = walk(seed, count, share, reach)
    first, *others = chain(versions)
    merged, forms = first, set[Method]()
    for other in others:
        merged = list(compose(merged, other))
        forms |= {frame.method for frame in map(parse_frame, [*merged, *other]) if isinstance(frame, BlockFrame)}
    for made in (merged, list(compose(first, *others))):
        if forms - {Method.UNCHANGED, Method.SPARSE}:
            host = HostWeights.from_tensors(versions[0], Version(0))
            host.commit(decoded(host, made))
            assert fingerprint(host.tensors(), 1) == fingerprint(versions[-1], 1)
        else:
            assert made == direct(versions, CodecSetting.FAST)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_composition_with_blocks_of_whole_elements_leads_to_the_same_version(seed: int, share: float) -> None:
    versions = walk(seed, 1, share)
    rng = np.random.default_rng(seed + 1)
    versions.append(
        {name: random_tensor(rng, ELEMENT_TYPES[int(name[1:])], tuple(t.shape)) for name, t in versions[0].items()}
    )
    versions.append({name: with_changes(rng, t, share, 2) for name, t in versions[-1].items()})
    containers = chain(versions, block_elements=500)
    methods = {frame.method for frame in map(parse_frame, containers[1]) if isinstance(frame, BlockFrame)}
    assert methods & {Method.RAW, Method.PLANES}
    host = HostWeights.from_tensors(versions[0], Version(0))
    host.commit(decoded(host, list(compose(*containers))))
    assert fingerprint(host.tensors(), 1) == fingerprint(versions[-1], 1)


def test_what_cannot_be_merged_is_told() -> None:
    versions = walk(5, 3, 0.1)
    a, b, c = chain(versions)
    for parts, said in (
        ([a, c], "consecutive"),
        ([a, chain(versions, block_elements=100)[1]], "consecutive"),
        ([a, chain(walk(6, 2, 0.1))[1]], "version 2: expected its parent to be where the delta before it ends"),
        ([a, [b[0], *b[2:]]], "block 0 of every delta, alike"),
        ([], "expected 1 to 4096 deltas to merge, got 0"),
        ([a, chain(versions, CodecSetting.DENSE)[1]], "setting FAST"),
        ([a, b[:-1]], "in order"),
        ([b[1:]], "begins with its header"),
    ):
        with pytest.raises(DeltaFormatError, match=said):
            list(compose(*parts))
