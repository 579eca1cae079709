from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, LimitExceeded, StateError
from echo2.base.ids import Version
from echo2.broadcast.store import FileSpill
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DecodeLimits,
    DeltaHeader,
    FrameReader,
    HostWeights,
    apply_updates,
    encode_delta,
    encode_keyframe,
    fingerprint,
    join_frames,
)  # fmt: skip
from tests.unit.weights.models import (
    ALL_TYPES,
    KEY,
    decoded,
    delta_header,
    gaussian_pair,
    random_tensor,
    same_bits,
    with_changes,
)  # fmt: skip

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0])
TENSORS = st.lists(st.tuples(st.sampled_from(ALL_TYPES), SHAPES, SHARES), min_size=0, max_size=6)


@SLOW
@given(
    tensors=TENSORS, seed=st.integers(0, 1 << 32), reach=st.sampled_from([1, 2, 100]),
    block_elements=st.sampled_from([1, 7, 300, 5000, 1 << 20]), setting=st.sampled_from(list(CodecSetting)),
)  # fmt: skip
def test_a_delta_gives_back_every_bit(tensors, seed, reach, block_elements, setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor(rng, element, shape) for i, (element, shape, _) in enumerate(tensors)}
    new = {f"t{i}": with_changes(rng, old[f"t{i}"], share, reach) for i, (_, _, share) in enumerate(tensors)}
    host = HostWeights.from_tensors(old, Version(3), KEY)
    frames = encode_delta(old, new, delta_header(host, 4, block_elements=max(block_elements, 1)), setting)
    shuffled = list(frames)
    random.Random(seed).shuffle(shuffled)
    host.commit(decoded(host, shuffled))
    host.verify()
    assert host.version == 4
    assert host.fingerprint() == frames.fingerprint == fingerprint(new, KEY)
    assert all(same_bits(host.tensors()[name], tensor) for name, tensor in new.items())


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("share", [0.0005, 0.03, 0.06, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("size", [63, 64, 65, 140_001])
def test_changes_come_back_however_dense_they_are_and_however_far_apart(
    setting: CodecSetting, share: float, size: int
) -> None:
    """The first half changes by up to `reach`, then nothing up to the last element: a gap longer than any usual one."""
    rng = np.random.default_rng(size)
    for reach in (1, 2, 300):
        old = {"w": torch.from_numpy(rng.normal(0, 0.02, size)).bfloat16()}
        new = {"w": with_changes(rng, old["w"], share, reach)}
        new["w"][size // 2 : -1] = old["w"][size // 2 : -1]
        host = HostWeights.from_tensors(old, Version(0), KEY)
        host.commit(decoded(host, list(encode_delta(old, new, delta_header(host, 1), setting))))
        host.verify()
        assert same_bits(host.tensors()["w"], new["w"])


@SLOW
@given(tensors=TENSORS, seed=st.integers(0, 1 << 32), block_elements=st.sampled_from([7, 300, 1 << 20]))
def test_a_keyframe_gives_back_every_bit(tensors, seed, block_elements) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    target = {f"t{i}": random_tensor(rng, element, shape) for i, (element, shape, _) in enumerate(tensors)}
    header = DeltaHeader(target_version=Version(9), fingerprint_key=KEY, block_elements=block_elements)
    host = HostWeights.empty()
    host.commit(decoded(host, list(encode_keyframe(target, header))[::-1]))
    host.verify()
    assert host.version == 9
    assert host.fingerprint() == fingerprint(target, KEY)
    assert set(host.tensors()) == set(target)
    assert all(same_bits(host.tensors()[name], tensor) for name, tensor in target.items())


@pytest.mark.parametrize("setting", CodecSetting)
def test_threads_and_chunk_borders_change_nothing(setting: CodecSetting) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, block_elements=1000)
    alone = join_frames(encode_delta(old, new, header, setting))
    with ThreadPoolExecutor(2) as executor:
        assert join_frames(encode_delta(old, new, header, setting, executor)) == alone
    reader = FrameReader()
    frames = [frame for at in range(0, len(alone), 61) for frame in reader.feed(alone[at : at + 61])]
    assert reader.held_bytes == 0
    assert b"".join(frames) == alone
    decoder = ContainerDecoder(host)
    decoder.feed(frames[0])
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(decoder.feed, frames[1:]))
    host.commit(decoder.finish())
    assert fingerprint(host.tensors(), KEY) == fingerprint(new, KEY)


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("limits", [DecodeLimits(), DecodeLimits(staging_bytes_min=0, staging_share=0.0)])
def test_updates_are_the_same_before_and_after_the_commit(setting: CodecSetting, limits: DecodeLimits) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    decoder = ContainerDecoder(host, limits)
    for frame in encode_delta(old, new, delta_header(host, 1, block_elements=1000), setting):
        decoder.feed(frame)
    staged = decoder.finish()
    for _ in range(2):
        live = {name: tensor.clone() for name, tensor in old.items() if name != "lm_head.weight"}
        for update in staged.updates():
            assert update.indices is not None
            assert (np.diff(update.indices) > 0).all()
            raw = (
                live[update.name]
                .reshape(-1)
                .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[update.bits.itemsize])
            )
            raw.numpy().view(update.bits.dtype)[update.indices] = update.bits
        assert all(same_bits(live[name], new[name]) for name in live)
        host.commit(staged)
    host.verify()


def test_tied_tensors_travel_once() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    assert host.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    header = DeltaHeader(target_version=Version(1), fingerprint_key=KEY)
    other = HostWeights.empty()
    staged = decoded(other, list(encode_keyframe(new, header)))
    assert "lm_head.weight" not in {update.name for update in staged.updates()}
    other.commit(staged)
    assert other.aliases == host.aliases
    assert same_bits(other.tensors()["lm_head.weight"], new["lm_head.weight"])
    untied = {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
    assert fingerprint(new, KEY) == fingerprint(untied, KEY)


@pytest.mark.parametrize("change", ["added", "removed", "reshaped", "retyped", "retied"])
def test_other_tensors_force_a_keyframe(change: str) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    name = "model.layers.0.mlp.weight"
    match change:
        case "added":
            new["extra"] = torch.zeros(3)
        case "removed":
            del new[name]
        case "reshaped":
            new[name] = new[name].reshape(128, -1)
        case "retyped":
            new[name] = new[name].half()
        case "retied":
            new["lm_head.weight"] = new["lm_head.weight"].clone()
    with pytest.raises(DeltaFormatError, match="send a keyframe"):
        encode_delta(old, new, delta_header(host, 1))


def test_the_first_block_leaves_before_the_last_tensor_is_read() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    frames = encode_delta(old, new, delta_header(host, 1, block_elements=1000))
    first = [next(frames), next(frames)]
    new["model.layers.0.mlp.weight"].view(torch.int16)[-1] += 1  # read after the first blocks left
    rest = list(frames)
    host.commit(decoded(host, first + rest))
    assert fingerprint(host.tensors(), KEY) == fingerprint(new, KEY)


def test_a_wrong_parent_is_refused_on_both_sides() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    other = HostWeights.from_tensors(new, Version(0), KEY)
    elsewhere = HostWeights.from_tensors(old, Version(7), KEY)
    frames = list(encode_delta(old, new, delta_header(host, 1)))
    with pytest.raises(FingerprintMismatch, match="parent's fingerprint"):
        ContainerDecoder(other).feed(frames[0])
    with pytest.raises(StateError, match="it is at 7"):
        ContainerDecoder(elsewhere).feed(frames[0])
    staged = decoded(host, frames)
    with pytest.raises(StateError, match="expected the host at its parent 0"):
        elsewhere.commit(staged)
    with pytest.raises(FingerprintMismatch, match="another fingerprint"):
        other.commit(staged)
    wrong = delta_header(host, 1, target_fingerprint=fingerprint(new, KEY) ^ 1)
    with pytest.raises(FingerprintMismatch, match="changes lead to"):
        list(encode_delta(old, new, wrong))


def test_a_chunk_is_staged_as_soon_as_its_block_is_whole() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    data = join_frames(encode_delta(old, new, delta_header(host, 1, block_elements=1000)))
    reader, decoder = FrameReader(), ContainerDecoder(host)
    staged = []
    for at in range(0, len(data), 100):
        for frame in reader.feed(data[at : at + 100]):
            decoder.feed(frame)
        staged.append(len(decoder.missing_blocks()))
    assert len(set(staged)) > 5
    assert fingerprint(host.tensors(), KEY) == fingerprint(old, KEY)
    host.commit(decoder.finish())
    assert fingerprint(host.tensors(), KEY) == fingerprint(new, KEY)


@pytest.mark.parametrize("limits", [DecodeLimits(), DecodeLimits(staging_bytes_min=0, staging_share=0.0)])
@pytest.mark.parametrize("setting", CodecSetting)
def test_a_failed_commit_leaves_the_old_version(setting: CodecSetting, limits: DecodeLimits) -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    decoder = ContainerDecoder(host, limits)
    for frame in encode_delta(old, new, delta_header(host, 1, block_elements=1000), setting):
        decoder.feed(frame)
    staged = decoder.finish()

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
    assert host.version == 0
    assert fingerprint(host.tensors(), KEY) == fingerprint(old, KEY)
    host.commit(staged)
    assert fingerprint(host.tensors(), KEY) == fingerprint(new, KEY)


def test_frames_before_the_header_wait_within_a_limit() -> None:
    old, new = gaussian_pair()
    host = HostWeights.from_tensors(old, Version(0), KEY)
    frames = list(encode_delta(old, new, delta_header(host, 1, block_elements=1000)))
    decoder = ContainerDecoder(host, DecodeLimits(pending_bytes_max=200))
    with pytest.raises(LimitExceeded, match="header within 200 bytes"):
        for frame in frames[1:]:
            decoder.feed(frame)


@pytest.mark.parametrize("setting", CodecSetting)
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_what_memory_has_no_room_for_waits_on_disk(setting: CodecSetting, share: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    old = {"w": (torch.randn(90, 100) * 0.02).bfloat16(), "whole": torch.zeros(50, dtype=torch.int32)}
    new = {"w": with_changes(rng, old["w"], share, 3), "whole": torch.from_numpy(rng.integers(0, 1 << 30, 50)).int()}
    host = HostWeights.from_tensors(old, Version(0), KEY)
    spill = FileSpill(tmp_path)
    decoder = ContainerDecoder(host, DecodeLimits(staging_bytes_min=0, staging_share=0.0), spill)
    for frame in encode_delta(old, new, delta_header(host, 1, block_elements=1000), setting):
        decoder.feed(frame)
    staged = decoder.finish()
    live = {name: tensor.clone() for name, tensor in old.items()}
    apply_updates(live, staged.updates())
    assert fingerprint(live, KEY) == fingerprint(new, KEY)
    for part in staged.exchange_parts():
        staged.exchange(part, host)
    assert fingerprint(host.tensors(), KEY) == fingerprint(new, KEY)
    for part in staged.exchange_parts():
        staged.exchange(part, host)
    assert fingerprint(host.tensors(), KEY) == fingerprint(old, KEY)
    host.commit(staged)
    host.verify()
    assert host.fingerprint() == fingerprint(new, KEY)
    assert list(tmp_path.iterdir()) == []
