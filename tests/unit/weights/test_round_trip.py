import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, LimitExceeded, StateError
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DeltaHeader,
    FrameReader,
    HostWeights,
    apply_updates,
    encode_delta,
    encode_keyframe,
    fingerprint,
)
from echo2.weights.elements import ELEMENT_TYPES, bits_of
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
