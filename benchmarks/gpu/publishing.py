"""A version's way: differences found where the weights lie, coded, decoded, put into live weights, and the bits compared."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.setup import QWEN3_06B, QWEN3_4B, QWEN3_8B, SMALL, Row, Setup, Shape, not_measured
from echo2.base.ids import Version
from echo2.weights import (
    CodecSetting,
    ContainerDecoder,
    DeltaHeader,
    HostWeights,
    apply_updates,
    encode_delta,
    fingerprint,
    warm_up,
)

CHANGED_SHARE = 0.01
KEY = 7
DELTAS = 20


def weights_of(setup: Setup, shape: Shape) -> dict[str, torch.Tensor]:
    draw = torch.Generator(setup.device).manual_seed(1)
    return {
        name: (0.02 * torch.randn(*size, generator=draw, device=setup.device)).to(torch.bfloat16)
        for name, size in shape.matrices().items()
    }


def changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One element in a hundred moves to its next bf16 value."""
    found = {}
    for number, (name, tensor) in enumerate(weights.items()):
        draw = torch.Generator(tensor.device).manual_seed(1000 * seed + number)
        moved = torch.rand(tensor.shape, generator=draw, device=tensor.device) < CHANGED_SHARE
        found[name] = (tensor.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)
    return found


def header_of(version: int, parent_fingerprint: int) -> DeltaHeader:
    return DeltaHeader(
        target_version=Version(version), parent_version=Version(version - 1), parent_fingerprint=parent_fingerprint,
        fingerprint_key=KEY, setting=CodecSetting.FAST,
    )  # fmt: skip


def run(setup: Setup) -> list[Row]:
    warm_up()
    rows: list[Row] = []
    for shape in (SMALL,) if setup.is_small else (QWEN3_06B, QWEN3_4B, QWEN3_8B):
        wanted = 3 * 2 * shape.parameters  # both versions, and less than one for what is made on the way
        if wanted > setup.free_bytes:
            why = f"{wanted / 1e9:.0f} GB wanted, {setup.free_bytes / 1e9:.0f} GB free"
            rows.append(not_measured(f"{shape.name}: publishing", "GB/s", why, "higher"))
            continue
        rows += _one_version(setup, shape)
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    rows += _many_versions(setup, SMALL if setup.is_small else QWEN3_06B)
    return rows


def _one_version(setup: Setup, shape: Shape) -> list[Row]:
    old = weights_of(setup, shape)
    new = changed(old, 1)
    size = sum(2 * tensor.numel() for tensor in old.values())
    copy_s = _seconds(setup, lambda: {name: tensor.cpu() for name, tensor in new.items()})
    host = HostWeights.from_tensors({name: tensor.cpu() for name, tensor in old.items()}, Version(0), KEY, copy=False)
    header = header_of(1, host.fingerprint())
    frames: list[bytes] = []
    encode_s = _seconds(setup, lambda: frames.extend(encode_delta(old, new, header)))
    decoder = ContainerDecoder(host)
    began = time.perf_counter()
    for frame in frames:
        decoder.feed(frame)
    staged = decoder.finish()
    decode_s = time.perf_counter() - began
    updates = list(staged.updates())
    pause_s = _seconds(setup, lambda: apply_updates(old, updates))
    same = all(torch.equal(old[name].view(torch.int16), new[name].view(torch.int16)) for name in old)
    return [
        Row(f"{shape.name}: copy of all weights to the host", size / copy_s / 1e9, "GB/s", None, "higher"),
        Row(f"{shape.name}: differences on the device and coding", size / encode_s / 1e9, "GB/s", None, "higher"),
        Row(f"{shape.name}: the same over the copy", encode_s / copy_s, "x"),
        Row(f"{shape.name}: delta", sum(map(len, frames)) / size, "of the weights"),
        Row(f"{shape.name}: decoding on the host", size / decode_s / 1e9, "GB/s", None, "higher"),
        Row(f"{shape.name}: pause while live weights are changed", 1e3 * pause_s, "ms"),
        Row(f"{shape.name}: live weights have the learner's bits", float(same), "", 1.0, "higher"),
    ]


def _many_versions(setup: Setup, shape: Shape) -> list[Row]:
    """The fingerprint of live weights after so many deltas, against the learner's."""
    learner = weights_of(setup, shape)
    live = {name: tensor.clone() for name, tensor in learner.items()}
    host = HostWeights.from_tensors({name: tensor.cpu() for name, tensor in learner.items()}, Version(0), KEY)
    for version in range(1, DELTAS + 1):
        newer = changed(learner, version)
        decoder = ContainerDecoder(host)
        for frame in encode_delta(learner, newer, header_of(version, host.fingerprint())):
            decoder.feed(frame)
        staged = decoder.finish()
        apply_updates(live, staged.updates())
        host.commit(staged)
        learner = newer
    same = fingerprint(live, KEY) == fingerprint(learner, KEY) == host.fingerprint()
    return [
        Row(f"{shape.name}: live weights have the learner's bits after {DELTAS} deltas", float(same), "", 1.0, "higher")
    ]


def _seconds(setup: Setup, work: object) -> float:
    """Once: what is measured changes what it works on."""
    setup.wait()
    began = time.perf_counter()
    work()  # type: ignore[operator]
    setup.wait()
    return time.perf_counter() - began
