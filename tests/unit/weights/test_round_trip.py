"""The codec: every bit comes back, by blocks, merged, by sections and on a device alike; its fingerprint; its golden containers."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, LimitExceeded, StateError
from echo2.base.ids import Version
from echo2.base.staged import FORMAT_VERSION, TensorUpdate
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DeltaHeader,
    FrameReader,
    HostWeights,
    apply_updates,
    compose,
    encode_delta,
    encode_keyframe,
    encode_sections,
    fingerprint,
    fingerprint_tensor,
    parse_frame,
    section_blocks,
    section_fingerprint,
    table_of,
)
from echo2.weights.block import encode_block
from echo2.weights.container import BlockFrame, Method
from echo2.weights.elements import ELEMENT_TYPES, TensorSpec, bits_of, blocks_of, element_type_of, flat_bits
from echo2.weights.fingerprint import (
    MODULUS,
    _sum_on_device,
    column_coefficients,
    header_term,
    row_coefficients,
    whole_fingerprint,
)
from echo2.weights.host import encode_block_on_device
from echo2.weights.marks import Finds
from tests.unit.weights.models import (
    KEY,
    Weights,
    decoded,
    delta_header,
    gaussian_pair,
    random_tensor,
    same_bits,
    with_changes,
)

SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0])
TENSORS = st.lists(st.tuples(st.sampled_from(ELEMENT_TYPES), SHAPES, SHARES), min_size=0, max_size=6)


def holds(host: HostWeights, weights: Weights) -> bool:
    """Whether the host's bits are those of the weights, and its fingerprint says so."""
    held = host.tensors()
    same = host.fingerprint() == fingerprint(held, KEY) == fingerprint(weights, KEY) and held.keys() == weights.keys()
    return same and all(same_bits(held[name], tensor) for name, tensor in weights.items())


@settings(max_examples=25)
@given(
    tensors=TENSORS, seed=st.integers(0, 1 << 32), reach=st.sampled_from([1, 2, 100]),
    block_elements=st.sampled_from([1, 7, 300, 5000, 1 << 20]), setting=st.sampled_from(list(CodecSetting)),
)  # fmt: skip
def test_a_keyframe_and_a_delta_give_back_every_bit(tensors, seed, reach, block_elements, setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor(rng, element, shape) for i, (element, shape, _) in enumerate(tensors)}
    new = {f"t{i}": with_changes(rng, old[f"t{i}"], share, reach) for i, (_, _, share) in enumerate(tensors)}
    host = HostWeights.empty()
    whole = DeltaHeader(target_version=Version(3), fingerprint_key=KEY, block_elements=block_elements)
    host.commit(decoded(host, list(encode_keyframe(old, whole))[::-1]))
    assert host.version == 3 and holds(host, old)
    frames = encode_delta(old, new, delta_header(host, 4, block_elements=block_elements), setting)
    shuffled = list(frames)
    random.Random(seed).shuffle(shuffled)
    host.commit(decoded(host, shuffled))
    assert host.version == 4 and holds(host, new) and frames.fingerprint == host.fingerprint()


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.03, 0.06, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("size", [63, 64, 65, 140_001])
def test_changes_come_back_however_dense_they_are_and_however_far_apart(
    setting: CodecSetting, share: float, size: int
) -> None:
    """The first half changes by up to `reach`, then nothing up to the last element: a gap longer than any usual one."""
    rng = np.random.default_rng(size)
    for reach in (1, 300):
        old = {"w": torch.from_numpy(rng.normal(0, 0.02, size)).bfloat16()}
        new = {"w": with_changes(rng, old["w"], share, reach)}
        new["w"][size // 2 : -1] = old["w"][size // 2 : -1]
        host = HostWeights.from_tensors(old, Version(0), KEY)
        host.commit(decoded(host, list(encode_delta(old, new, delta_header(host, 1), setting))))
        assert holds(host, new)


@pytest.mark.parametrize("setting", CodecSetting)
def test_threads_and_chunk_borders_change_nothing(setting: CodecSetting) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, block_elements=1000)
    alone = b"".join(encode_delta(old, new, header, setting))
    with ThreadPoolExecutor(2) as executor:
        assert b"".join(encode_delta(old, new, header, setting, executor)) == alone
    reader, decoder = FrameReader(), ContainerDecoder(host)
    counts, frames = set(), []
    for at in range(0, len(alone), 61):
        for frame in reader.feed(alone[at : at + 61]):
            frames.append(frame)
            decoder.feed(frame)
        counts.add(len(frames))
    assert b"".join(frames) == alone and len(counts) > 5, "each block is staged as soon as it is whole"
    again = ContainerDecoder(host)
    again.feed(frames[0])
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(again.feed, frames[1:]))
    assert again.finish().fingerprint == decoder.finish().fingerprint
    assert holds(host, old), "nothing is changed before the commit"
    host.commit(again.finish())
    assert holds(host, new)


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_a_staged_version_updates_live_tensors_and_is_put_in_place_and_taken_back(
    setting: CodecSetting, share: float
) -> None:
    rng = np.random.default_rng(3)
    old = {"w": (torch.randn(90, 100) * 0.02).bfloat16(), "whole": torch.zeros(50, dtype=torch.int32)}
    new = {"w": with_changes(rng, old["w"], share, 3), "whole": torch.from_numpy(rng.integers(0, 1 << 30, 50)).int()}
    host = HostWeights.from_tensors(old, Version(0), KEY)
    staged = decoded(host, list(encode_delta(old, new, delta_header(host, 1, block_elements=1000), setting)))

    def updated() -> Weights:
        live = {name: tensor.clone() for name, tensor in old.items()}
        updates = list(staged.updates())
        assert all(update.indices is not None and (np.diff(update.indices) > 0).all() for update in updates)
        apply_updates(live, updates)
        return live

    assert fingerprint(updated(), KEY) == fingerprint(new, KEY)
    for weights in (new, old):
        for part in staged.exchange_parts():
            staged.exchange(part, host)
        assert fingerprint(host.tensors(), KEY) == fingerprint(weights, KEY)
    host.commit(staged)
    assert holds(host, new)
    with pytest.raises(AssertionError, match="committed"):
        updated()


@pytest.mark.parametrize("setting", CodecSetting)
def test_a_failed_commit_leaves_the_old_version(setting: CodecSetting) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    staged = decoded(host, list(encode_delta(old, new, delta_header(host, 1, block_elements=1000), setting)))

    class FailsHalfway:
        """The staged version, of which one part cannot be put in place."""

        def __getattr__(self, name: str) -> object:
            return getattr(staged, name)

        def exchange(self, part: int, live: HostWeights) -> None:
            if part == 5 and not self.failed:
                self.failed = True
                raise MemoryError("part 5")
            staged.exchange(part, live)

        failed = False

    with pytest.raises(MemoryError):
        host.commit(FailsHalfway())  # type: ignore[arg-type]
    assert host.version == 0 and holds(host, old)
    host.commit(staged)
    assert holds(host, new)


def test_tied_tensors_travel_once() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    assert host.table.aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    other = HostWeights.empty()
    staged = decoded(other, list(encode_keyframe(new, DeltaHeader(target_version=Version(1), fingerprint_key=KEY))))
    assert "lm_head.weight" not in {update.name for update in staged.updates()}
    other.commit(staged)
    assert other.table.aliases == host.table.aliases and holds(other, new)
    untied = {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
    assert fingerprint(new, KEY) == fingerprint(untied, KEY)


def test_other_tensors_force_a_keyframe() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    mlp, head = "model.layers.0.mlp.weight", "lm_head.weight"
    changes = {
        "added": {"extra": torch.zeros(3)}, "reshaped": {mlp: new[mlp].reshape(128, -1)}, "retyped": {mlp: new[mlp].half()},
        "retied": {head: new[head].clone()},
    }  # fmt: skip
    others = [
        {name: tensor for name, tensor in new.items() if name != mlp},
        *(new | change for change in changes.values()),
    ]
    for other in others:
        with pytest.raises(DeltaFormatError, match="send a keyframe"):
            encode_delta(old, other, delta_header(host, 1))


def test_the_first_block_leaves_before_the_last_tensor_is_read() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    frames = encode_delta(old, new, delta_header(host, 1, block_elements=1000))
    first = [next(frames), next(frames)]
    new["model.layers.0.mlp.weight"].view(torch.int16)[-1] += 1  # read after the first blocks left
    host.commit(decoded(host, [*first, *frames]))
    assert holds(host, new)


def test_a_wrong_parent_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    other = HostWeights.from_tensors(new, Version(0), KEY)
    elsewhere = HostWeights.from_tensors(old, Version(7), KEY)
    frames = list(encode_delta(old, new, delta_header(host, 1)))
    with pytest.raises(FingerprintMismatch, match="parent's fingerprint"):
        ContainerDecoder(other).feed(frames[0])
    with pytest.raises(StateError, match="it is at 7"):
        ContainerDecoder(elsewhere).feed(frames[0])
    with pytest.raises(AssertionError, match="at this version"):
        elsewhere.commit(decoded(host, frames))
    monkeypatch.setattr("echo2.weights.decode.PENDING_BYTES_MAX", 20)
    waiting = ContainerDecoder(host)
    with pytest.raises(LimitExceeded, match="header within 20 bytes"):
        waiting.feed(frames[1])


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("scene", "of_xor"), [("decayed", 0.9), ("first step", 0.9), ("a third anew", 0.85), ("anew", 1.03)]
)
def test_where_much_moves_a_delta_stays_near_the_shortest_form(
    setting: CodecSetting, dtype: torch.dtype, scene: str, of_xor: float
) -> None:
    """Beside XOR, bytes together, zstd, and never longer than a keyframe by more than 1 %."""
    generator = torch.Generator().manual_seed(1)
    values, other = (torch.randn(300_000, generator=generator) * 0.02 for _ in range(2))
    moved = {
        "decayed": values * 0.99, "first step": values + 1e-4 * other.sign(), "anew": other,
        "a third anew": torch.where(torch.rand(300_000, generator=generator) < 0.3, other, values),
    }[scene]  # fmt: skip
    old, new = {"w": values.to(dtype)}, {"w": moved.to(dtype)}
    host = HostWeights.from_tensors(old, Version(0), KEY)
    frames = list(encode_delta(old, new, delta_header(host, 1), setting))
    flips = (bits_of(old["w"]) ^ bits_of(new["w"])).view(np.uint8).reshape(300_000, -1).T.tobytes()
    size = sum(map(len, frames))
    assert size < of_xor * len(zstandard.ZstdCompressor(level=1).compress(flips))
    assert size < 1.01 * sum(map(len, encode_keyframe(new, DeltaHeader(target_version=Version(1)))))
    host.commit(decoded(host, frames))
    assert holds(host, new)


# ---- deltas that are merged


def containers_of(
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
    first, *others = containers_of(versions)
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
    containers = containers_of(versions, block_elements=500)
    methods = {frame.method for frame in map(parse_frame, containers[1]) if isinstance(frame, BlockFrame)}
    assert methods & {Method.RAW, Method.PLANES}
    host = HostWeights.from_tensors(versions[0], Version(0))
    host.commit(decoded(host, list(compose(*containers))))
    assert fingerprint(host.tensors(), 1) == fingerprint(versions[-1], 1)


def test_what_cannot_be_merged_is_told() -> None:
    versions = walk(5, 3, 0.1)
    a, b, c = containers_of(versions)
    for parts, said in (
        ([a, c], "consecutive"),
        ([a, containers_of(versions, block_elements=100)[1]], "consecutive"),
        ([a, containers_of(walk(6, 2, 0.1))[1]], "version 2: expected its parent to be where the delta before it ends"),
        ([a, [b[0], *b[2:]]], "block 0 of every delta, alike"),
        ([], "expected 1 to 4096 deltas to merge, got 0"),
        ([a, containers_of(versions, CodecSetting.DENSE)[1]], "setting FAST"),
        ([a, b[:-1]], "in order"),
        ([b[1:]], "begins with its header"),
    ):
        with pytest.raises(DeltaFormatError, match=said):
            list(compose(*parts))


# ---- sections of several shards


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


# ---- on a device


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


# ---- fingerprints


def written_out(name: str, tensor: torch.Tensor, key: int) -> int:
    """The definition, element by element, in Python's integers."""
    bits = bits_of(tensor)
    columns = [int(c) for c in column_coefficients(key)]
    rows = [int(r) for r in row_coefficients(key, name, np.arange(bits.size // 4096 + 1, dtype=np.uint64))]
    total = header_term(key, TensorSpec(name, element_type_of(name, tensor), tuple(tensor.shape)))
    for i, value in enumerate(bits.tolist()):
        total += columns[i % 4096] * rows[i // 4096] * value
    return total % MODULUS


@settings(max_examples=30)
@given(
    element=st.sampled_from(ELEMENT_TYPES), count=st.integers(0, 20_000), seed=st.integers(0, 1 << 32),
    key=st.integers(0, MODULUS - 1),
)  # fmt: skip
def test_fingerprint_is_its_definition_on_cpu_and_in_torch(element, count, seed, key) -> None:  # type: ignore[no-untyped-def]
    tensor = random_tensor(np.random.default_rng(seed), element, (count,))
    expected = written_out("w", tensor, key)
    assert fingerprint({"w": tensor}, key) == expected
    bits = torch.from_numpy(bits_of(tensor).view({1: "u1", 2: "i2", 4: "i4", 8: "i8"}[element.bytes]))
    term = header_term(key, TensorSpec("w", element, (count,)))
    assert (term + _sum_on_device("w", bits, element, key)) % MODULUS == expected


def test_names_types_shapes_keys_and_order_matter_as_they_should() -> None:
    a, b = torch.arange(6.0).bfloat16(), torch.ones(3).bfloat16()
    base = fingerprint({"a": a, "b": b}, 1)
    assert base == fingerprint({"b": b, "a": a}, 1)
    assert base == (fingerprint_tensor("a", a, 1) + fingerprint_tensor("b", b, 1)) % MODULUS
    others = [
        fingerprint({"a": a, "c": b}, 1),
        fingerprint({"a": a.reshape(2, 3), "b": b}, 1),
        fingerprint({"a": a.view(torch.float16), "b": b}, 1),
        fingerprint({"a": a, "b": b}, 2),
        fingerprint({"a": a}, 1),
        fingerprint({"a": a.flip(0), "b": b}, 1),
    ]
    assert len({base, *others}) == 7


# ---- golden containers: a change of these files is a change of the format

GOLDEN = Path(__file__).parent / "golden"


def versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two versions made by integer arithmetic alone, so that no library's random numbers matter."""
    count = np.arange(3000, dtype=np.uint64)
    mixed = (count * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    bits = (
        (mixed & np.uint64(0x83FF)) | (((mixed >> np.uint64(10)) % np.uint64(9) + np.uint64(113)) << np.uint64(7))
    ).astype(np.uint16)
    moved = bits.copy()
    moved[mixed % 37 == 0] += 1
    moved[mixed % 41 == 0] -= 3
    moved[5] = 0x7FC1
    old = {
        "a.weight": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(50, 60),
        "b": torch.arange(200),
    }
    new = {
        "a.weight": torch.from_numpy(moved.view(np.int16)).view(torch.bfloat16).reshape(50, 60),
        "b": torch.arange(200) + torch.arange(200) % 3,
    }
    old["tied"], new["tied"] = old["a.weight"], new["a.weight"]
    return old, new


@pytest.mark.parametrize("name", ["fast", "dense", "keyframe"])
def test_golden_containers_decode_and_deltas_are_encoded_to_their_bytes(name: str) -> None:
    (old, new), golden = versions(), (GOLDEN / f"{name}.bin").read_bytes()
    host = HostWeights.empty(KEY) if name == "keyframe" else HostWeights.from_tensors(old, Version(6), KEY)
    if name != "keyframe":
        header = delta_header(host, 7, block_elements=2000)
        assert b"".join(encode_delta(old, new, header, CodecSetting[name.upper()])) == golden
    host.commit(decoded(host, FrameReader().feed(golden)))
    again = HostWeights.from_tensors(new, Version(7), KEY)
    assert host.fingerprint() == again.fingerprint()
    assert host.table.aliases == again.table.aliases


def test_a_new_container_format_is_a_new_protocol() -> None:
    """So a worker of the release before is told at its first message, not by containers that it cannot read."""
    assert (PROTOCOL_VERSION, FORMAT_VERSION) == (2, 4), "raise both, and write both here"
