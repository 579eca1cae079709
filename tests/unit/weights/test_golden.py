"""Golden containers: a change of these files is a change of the format."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo2.base.ids import Version
from echo2.base.staged import FORMAT_VERSION
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.weights import CodecSetting, FrameReader, HostWeights, encode_delta
from tests.unit.weights.models import KEY, decoded, delta_header

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
