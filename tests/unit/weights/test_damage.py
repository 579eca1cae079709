import random
import struct

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings, strategies as st

from echo2.base.errors import DeltaFormatError, EchoError, FingerprintMismatch
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DeltaHeader,
    FrameReader,
    HostWeights,
    encode_delta,
    fingerprint,
)
from echo2.weights.block import decode_sparse, decode_steps
from echo2.weights.container import (
    BlockFrame,
    Method,
    TensorTable,
    container_id_of,
    encode_block_frame,
    encode_end,
    encode_header,
    parse_frame,
)
from echo2.weights.elements import ELEMENT_TYPES, TensorSpec, blocks_of
from tests.unit.weights.models import KEY, decoded, delta_header, gaussian_pair

FEW = settings(max_examples=150)


def example(setting: CodecSetting) -> tuple[HostWeights, list[bytes]]:
    old, new = gaussian_pair(share=0.1)
    host = HostWeights.from_tensors(old, Version(41), KEY)
    return host, list(encode_delta(old, new, delta_header(host, 42, block_elements=2000), setting))


EXAMPLES = {setting: example(setting) for setting in CodecSetting}


def damaged(host: HostWeights, frames: list[bytes]) -> EchoError:
    """The error that a damaged container ends in; the host must not have changed."""
    with pytest.raises(EchoError) as caught:
        decoded(host, frames)
    assert host.version == 41 and fingerprint(host.tensors(), KEY) == host.fingerprint()
    return caught.value


@FEW
@given(setting=st.sampled_from(list(CodecSetting)), data=st.data())
def test_a_flipped_missing_or_repeated_byte_is_refused(setting: CodecSetting, data: st.DataObject) -> None:
    host, frames = EXAMPLES[setting]
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[which]
    at = data.draw(st.integers(0, len(frame) - 1))
    kind = data.draw(st.sampled_from(["flipped", "missing", "repeated"]))
    if kind == "flipped":
        bad = frame[:at] + bytes([frame[at] ^ (1 << data.draw(st.integers(0, 7)))]) + frame[at + 1 :]
    elif kind == "missing":
        bad = frame[:at] + frame[at + 1 :]
    else:
        bad = frame[: at + 1] + frame[at:]
    damaged(host, [*frames[:which], bad, *frames[which + 1 :]])


def test_damage_is_told_with_version_block_and_tensor() -> None:
    host, frames = EXAMPLES[CodecSetting.DENSE]
    flipped = frames[3][:-1] + bytes([frames[3][-1] ^ 1])
    for instead, problem in (([flipped], ""), ([], "has not come")):
        error = damaged(host, [*frames[:3], *instead, *frames[4:]])
        for part in ("version 42", "block 2", "tensor model.", problem):
            assert part in str(error)


@FEW
@given(setting=st.sampled_from(list(CodecSetting)), seed=st.integers(0, 1 << 32))
def test_payloads_with_a_right_digest_and_wrong_contents_are_refused_or_bounded(
    setting: CodecSetting, seed: int
) -> None:
    """A sender that lies on purpose: any payload decodes to positions inside the block, or raises."""
    host, frames = EXAMPLES[setting]
    rng = random.Random(seed)
    parsed = parse_frame(rng.choice([frame for frame in frames[1:-1] if len(frame) > 36]))
    assert isinstance(parsed, BlockFrame)
    block = blocks_of(host.table.specs, 2000)[parsed.index]
    payload = bytearray(parsed.payload)
    for _ in range(rng.randint(1, 4)):
        payload[rng.randrange(len(payload))] = rng.randrange(256)
    try:
        changes = decode_sparse(memoryview(payload), block, host.segments(block))
        changes.settle(block, KEY)
    except DeltaFormatError:
        return
    positions = changes.positions()
    assert positions.size == changes.count == changes.steps().size
    assert (np.diff(positions.astype(np.int64)) > 0).all()
    assert positions.size == 0 or int(positions[-1]) < block.element_count


def test_a_repeated_block_is_harmless_and_one_that_lies_is_refused() -> None:
    host, frames = EXAMPLES[CodecSetting.FAST]
    assert decoded(host, [*frames[:-1], *frames]).version == 42
    parsed = parse_frame(frames[1])
    assert isinstance(parsed, BlockFrame)
    lie = encode_block_frame(
        parsed.container_id, parsed.index, parsed.element_count, parsed.element_code, Method.UNCHANGED, b""
    )
    assert "twice with different bytes" in str(damaged(host, [*frames[:2], lie]))
    assert "expected fingerprint" in str(damaged(host, [frames[0], lie, *frames[2:]]))


def test_frames_of_two_containers_do_not_mix() -> None:
    host, frames = EXAMPLES[CodecSetting.FAST]
    _, others = EXAMPLES[CodecSetting.DENSE]
    assert "another container" in str(damaged(host, [*frames[:2], others[2]]))
    assert "second header" in str(damaged(host, [frames[0], others[0]]))
    bomb = encode_block_frame(container_id_of(frames[0]), 0, 1 << 24, 1, Method.SPARSE, head(1, 0, 3))
    assert "expected 2000 elements of type 1, it claims 16777216" in str(damaged(host, [frames[0], bomb]))


BF16 = ELEMENT_TYPES[0]


def test_a_keyframe_that_claims_terabytes_is_refused_before_allocating_and_one_of_86e9_parameters_is_not() -> None:
    table = TensorTable((TensorSpec("bomb", BF16, (1 << 22, 1 << 20)),), ())
    header = encode_header(DeltaHeader(target_version=Version(1), block_elements=1 << 24), table)
    with pytest.raises(DeltaFormatError, match="table claims 8796093022208"):
        ContainerDecoder(HostWeights.empty()).feed(header)
    table = TensorTable(tuple(TensorSpec(str(n), BF16, (1 << 17, 1 << 16)) for n in range(10)), ())
    ContainerDecoder(HostWeights.empty()).feed(encode_header(DeltaHeader(target_version=Version(0)), table))


def head(class_count: int, base: int, count: int) -> bytes:
    return struct.pack("<BBI", class_count, base, count) + plane(0, bytes(-(-count // 8)))


def run(form: int, shift: int, marked: int, body: bytes) -> bytes:
    return struct.pack("<BBI", form, shift, marked) + body


def plane(coding: int, data: bytes) -> bytes:
    return struct.pack("<BI", coding, len(data)) + data


def nested_pairs(depth: int) -> bytes:
    data = plane(0, b"s")
    for _ in range(depth):
        data = plane(2, bytes(16) + data)
    return data


HUGE = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24))
GAPS = struct.pack("<I", 0) + plane(0, bytes([1, 2, 3]))
FAR = struct.pack("<I", 1) + plane(0, bytes([1, 255, 3])) + struct.pack("<I", 1995)
NO_LARGER = NONE = run(0, 0, 0, b"")


CLAIMS = {
    "changes": [
        (struct.pack("<BBI", 1, 0, 2001), "expected 1 to 2000 changes, it claims 2001"),
        (head(1, 0, 3) + run(2, 0, 2001, GAPS), "at most 2000 changes, it claims 2001"),
        (head(1, 0, 3) + run(2, 0, 3, struct.pack("<I", 4)), "at most 3 long gaps, it claims 4"),
        (head(1, 0, 3) + run(2, 0, 3, struct.pack("<I", 0) + plane(1, HUGE)), "of 3 bytes, its frame claims 16777216"),
        (head(1, 0, 3) + run(1, 0, 3, plane(1, HUGE)), "of 250 bytes, its frame claims 16777216"),
        (head(1, 0, 3) + run(1, 0, 3, plane(0, b"\xff" + bytes(249))), "expected 3 changes of 2000, got others"),
        (head(1, 0, 3) + run(2, 25, 3, GAPS), "got form 2, shift 25"),
        (head(1, 0, 3) + run(3, 0, 3, GAPS), "got form 3, shift 0"),
        (head(1, 0, 3) + run(2, 0, 3, GAPS), "bytes of larger changes, got 0"),
        (head(1, 0, 3) + run(2, 0, 3, GAPS) + run(2, 0, 4, b""), "at most 3 larger changes, it claims 4"),
        (head(1, 0, 3) + run(2, 0, 3, GAPS) + NO_LARGER + b"?", "bytes, got"),
        (head(1, 0, 4) + run(2, 0, 3, GAPS) + NO_LARGER, "expected 4 changes, its marks claim 3"),
        (head(8, 0, 4) + run(2, 0, 3, GAPS) + NO_LARGER + 7 * NONE, "expected 4 changes, its classes' marks are others"),
        (head(8, 250, 3), "expected 1 or 8 classes of float8_e4m3fn, got 8 from 250"),
        (head(5, 0, 3), "expected 1 or 8 classes of float8_e4m3fn, got 5 from 0"),
        (struct.pack("<BBI", 1, 0, 3) + nested_pairs(2000), r"signs of 1 bytes, raw or from zstd, .*coding 2"),
        (head(1, 0, 3) + run(2, 0, 3, FAR) + NO_LARGER, "expected 3 changes at gaps within 2000 places"),
    ],
    "steps of all elements": [
        (struct.pack("<BBI", 1, 0, 2001), "expected at most 2000 steps, it claims 2001"),
        (struct.pack("<BBI", 1, 0, 3) + plane(0, b"\xff" * 250), "expected 3 steps of 2000, its marks are others"),
        (struct.pack("<BBI", 1, 0, 3) + plane(0, b"\x01" + bytes(249)), "expected 3 steps of 2000, its marks are others"),
        (struct.pack("<BBI", 1, 0, 2000) + plane(0, bytes(2000)) + b"?", "bytes, got"),
        (struct.pack("<BBI", 5, 0, 3), "expected 1 or 8 classes of float8_e4m3fn, got 5 from 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("of", "payload", "why"), [(of, *claim) for of, claims in CLAIMS.items() for claim in claims])
def test_claims_are_checked_against_what_can_be(of: str, payload: bytes, why: str) -> None:
    fp8 = HostWeights.from_tensors({"w": torch.zeros(2000).to(torch.float8_e4m3fn)}, Version(0))
    block = blocks_of(fp8.table.specs, 2000)[0]
    old = fp8.segments(block)
    with pytest.raises(DeltaFormatError, match=why):
        if of == "changes":
            decode_sparse(memoryview(payload), block, old)
        else:
            decode_steps(memoryview(payload), block.element, old, np.empty_like(old[0]))


@pytest.mark.parametrize(("step", "wrong"), [(1, 0xFFFF), (-1, 0)])
def test_a_host_whose_bits_are_not_the_parents_is_told_and_left_alone(step: int, wrong: int) -> None:
    """Bits that differ where the weights go up by one, all ones, or down: which cannot."""
    old = {"w": torch.full((3000,), 5, dtype=torch.int16).view(torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"].view(torch.int16)[10:13] += step
    host = HostWeights.from_tensors(old, Version(0), KEY)
    frames = list(encode_delta(old, new, delta_header(host, 1, block_elements=2000)))
    host.bits("w")[11] = wrong
    before = host.bits("w").copy()
    staged = decoded(host, frames)
    for take in (lambda: list(staged.updates()), lambda: host.commit(staged)):
        with pytest.raises(FingerprintMismatch, match=r"version 1.*block 0.*tensor w.*not those of the parent"):
            take()
    assert (host.bits("w") == before).all() and host.version == 0


def test_a_frame_that_claims_too_much_or_is_of_another_format_is_refused_while_it_is_read() -> None:
    frame = bytearray(encode_block_frame(1, 0, 1, 1, Method.RAW, b"ab"))
    frame[24:28] = struct.pack("<I", 0xFFFFFFFF)
    with pytest.raises(DeltaFormatError, match="it claims 4294967295"):
        FrameReader().feed(bytes(frame))
    header = bytearray(encode_header(DeltaHeader(target_version=Version(1)), TensorTable((), ())))
    header[8:12] = struct.pack("<I", 0xF0000000)
    with pytest.raises(DeltaFormatError, match="it claims 4026531840"):
        FrameReader().feed(bytes(header))
    with pytest.raises(DeltaFormatError, match="begin with"):
        FrameReader().feed(bytes(64))
    other = bytearray(encode_end(1, 0, 0))
    other[4] = 9
    other[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(other[:-8])))
    with pytest.raises(DeltaFormatError, match="format version 4, got 9"):
        parse_frame(bytes(other))
