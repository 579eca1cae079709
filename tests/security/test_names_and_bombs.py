"""What a peer may name is never a path, what it compresses never grows past its limit, and a join token is kept nowhere."""

import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
import zstandard

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.trust.identity import JoinLink, Role
from echo2.weights import ContainerDecoder, DeltaHeader, HostWeights, encode_keyframe
from echo2.weights.container import Method, container_id_of, encode_block_frame
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, group, options, running

ELEMENTS = 1000
BOMB_BYTES = 1 << 28


def understated(frame: bytes, size: int) -> bytes:
    """The same zstd frame with another content size in its header."""
    descriptor = frame[4]
    width = {0: 1, 1: 2, 2: 4, 3: 8}[descriptor >> 6]
    at = 5 + (0 if descriptor & 0x20 else 1)
    return frame[:at] + size.to_bytes(width, "little") + frame[at + width :]


def bombs() -> dict[str, bytes]:
    zeros = bytes(BOMB_BYTES)
    told = zstandard.ZstdCompressor(level=1).compress(zeros)
    return {
        "its size is told": told,
        "its size is hidden": zstandard.ZstdCompressor(level=1, write_content_size=False).compress(zeros),
        "its size is understated": understated(told, ELEMENTS),
    }


@pytest.mark.parametrize("name", ["its size is told", "its size is hidden", "its size is understated"])
def test_a_compressed_block_that_would_grow_past_its_tensor_is_refused_before_it_grows(name: str) -> None:
    bomb = bombs()[name]
    header = DeltaHeader(target_version=Version(1), fingerprint_key=1)
    first = next(encode_keyframe({"w": torch.zeros(ELEMENTS).bfloat16()}, header))
    decoder = ContainerDecoder(HostWeights.empty())
    decoder.feed(first)
    block = struct.pack("<BI", 1, len(bomb)) + bomb
    frame = encode_block_frame(container_id_of(first), 0, ELEMENTS, 1, Method.PLANES, block)
    tracemalloc.start()
    try:
        with pytest.raises(DeltaFormatError):
            decoder.feed(frame)
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 16, "it was let grow"
    finally:
        tracemalloc.stop()


async def test_what_peers_call_themselves_makes_no_file_outside_the_folder(tmp_path: Path) -> None:
    """Names with paths in them: of a worker, of its engine and card, of a model, of groups and reasons."""
    home = tmp_path / "a" / "b" / "run"
    hostile = "../../../../escaped"
    async with running(options(home, suspect_after=30.0, gone_after=60.0)) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        await learner.hello(model_name=hostile, address=f"{hostile}:9", open_groups=[group(hostile)])
        answer = await worker.hello(name=hostile, gpu=hostile, engine=hostile)
        assert answer.WhichOneof("kind") in ("welcome", "refusal")
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        await worker.until("lease_grant")
        await worker.say(leaving=pb.WorkerLeaving(reason=hostile))
        await learner.say(leaving=pb.LearnerLeaving(reason=hostile))
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents]
    assert not outside, outside
    assert not [path for path in home.rglob("*") if "escaped" in path.name]


async def test_a_join_token_is_in_no_file_but_the_link_and_that_is_its_owners_alone(tmp_path: Path) -> None:
    secrets: list[bytes] = []
    async with running(options(tmp_path)) as daemon:
        for role in (Role.LEARNER, Role.WORKER):
            secrets.append(JoinLink.parse(daemon.links[role.value]).token.encode())
            node = await Node.join(daemon, role)
            await node.hello()
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and any(s in path.read_bytes() for s in secrets)]
    assert holders and all(path.suffix == ".link" for path in holders), holders
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
