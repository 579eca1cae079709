from __future__ import annotations

import multiprocessing
from datetime import timedelta
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from echo2.base.errors import DeltaFormatError, FingerprintMismatch
from echo2.base.ids import Version
from echo2.learner.training.shards import HeldVersions, ShardFollower, ShardLeader
from echo2.weights import (
    CodecSetting,
    DeltaHeader,
    FrameReader,
    HostWeights,
    encode_delta,
    encode_keyframe,
    encode_sections,
    fingerprint,
    join_frames,
    section_blocks,
    section_fingerprint,
    table_of,
)  # fmt: skip
from echo2.weights.fingerprint import whole_fingerprint
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

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Weights = dict[str, torch.Tensor]


def in_sections(old: Weights | None, new: Weights, header: DeltaHeader) -> bytes:
    """A container put together from the sections of all shards."""
    table = table_of(new)
    sections = (section_blocks(old, new, header, table, shard) for shard in range(header.shard_count))
    return join_frames(encode_sections(header, table, chain.from_iterable(sections)))


@SLOW
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(ALL_TYPES), st.lists(st.integers(0, 30), max_size=3).map(tuple)), max_size=5
    ),
    seed=st.integers(0, 1 << 32), shards=st.integers(1, 7), setting=st.sampled_from(list(CodecSetting)),
)  # fmt: skip
def test_sections_are_the_bytes_of_the_whole(tensors, seed, shards, setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_tensor(rng, element, shape) for i, (element, shape) in enumerate(tensors)}
    new = {name: with_changes(rng, tensor, 0.1, 2) for name, tensor in old.items()}
    host = HostWeights.from_tensors(old, Version(0), KEY)
    header = delta_header(host, 1, block_elements=300, shard_count=shards, setting=setting)
    assert in_sections(old, new, header) == join_frames(encode_delta(old, new, header))
    whole = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=300, shard_count=shards)
    assert in_sections(None, new, whole) == join_frames(encode_keyframe(new, whole))
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
    wrong = delta_header(host, 1, shard_count=2, target_fingerprint=1)
    with pytest.raises(FingerprintMismatch, match="changes lead to"):
        in_sections(old, new, wrong)


class Tied(nn.Module):
    """Heights that two ranks share unevenly, one that leaves the second rank nothing, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24 + 7 * i) for i in range(3))
        self.scale = nn.Parameter(torch.full((1, 5), 0.5))
        self.scale_too = nn.Parameter(torch.full((1, 5), 0.5))
        self.head = nn.Linear(24, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("turns", torch.arange(9.0))


def snapshots(seed: int) -> tuple[Weights, Weights]:
    """Whole weights of two versions, alike on every rank, by the names of `Tied`."""
    torch.manual_seed(seed)
    model = Tied().bfloat16()
    old = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    rng = np.random.default_rng(seed)
    new = {name: with_changes(rng, tensor, 0.05, 2) for name, tensor in old.items()}
    for version in (old, new):
        version["head.weight"] = version["embed.weight"]
    return old, new


def sharded(weights: Weights) -> Weights:
    """The same weights under FSDP2, as its state dict shows them."""
    model = Tied().bfloat16()
    model.load_state_dict(weights)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    state: Weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert any(isinstance(tensor, DTensor) for tensor in state.values())
    return state


def lead(leader: ShardLeader, old: Weights, new: Weights, folder: Path) -> None:
    print_old = leader.fingerprint(Version(0), old, KEY)
    for setting in CodecSetting:
        header = DeltaHeader(
            target_version=Version(1), parent_version=Version(0), parent_fingerprint=print_old, fingerprint_key=KEY,
            setting=setting, block_elements=400,
        )  # fmt: skip
        (folder / f"{setting.name}.bin").write_bytes(join_frames(leader.delta(old, new, header)))
    whole = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=400)
    (folder / "keyframe.bin").write_bytes(join_frames(leader.keyframe(new, whole)))
    (folder / "fingerprint").write_text(str(print_old))
    leader.forget_before(Version(1))
    leader.stop()


def run_rank(rank: int, folder: Path) -> None:
    """One of two processes: encodes its rows only; the first writes what came together."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (2,))
    whole_old, whole_new = snapshots(3)
    old, new = sharded(whole_old), sharded(whole_new)
    assert sum(t.to_local().numel() for t in old.values() if isinstance(t, DTensor)) < sum(
        map(torch.numel, old.values())
    )
    group = dist.new_group(backend="gloo")
    if rank == 0:
        lead(ShardLeader(group, 2), old, new, folder)
    else:
        held = HeldVersions()
        held.keep(Version(0), old)
        held.keep(Version(1), new)
        ShardFollower(group, held).serve()
        assert held.versions == [1], "what is forgotten on the first rank is forgotten here"
    columns = {"w": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])}
    with pytest.raises(DeltaFormatError, match="tensor w: expected elements .* of dimension 0"):
        section_fingerprint(columns, table_of(columns), rank, 2, KEY)
    dist.destroy_process_group()


def test_a_sharded_learner_encodes_where_its_weights_lie(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(150)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    old, new = snapshots(3)
    host = HostWeights.from_tensors(old, Version(0), KEY)
    assert int((tmp_path / "fingerprint").read_text()) == host.fingerprint()
    for setting in CodecSetting:
        data = (tmp_path / f"{setting.name}.bin").read_bytes()
        header = delta_header(host, 1, block_elements=400, shard_count=2, setting=setting)
        assert data == join_frames(encode_delta(old, new, header))
        worker = HostWeights.from_tensors(old, Version(0), KEY)
        worker.commit(decoded(worker, FrameReader().feed(data)))
        assert worker.fingerprint() == fingerprint(new, KEY)
        assert all(same_bits(worker.tensors()[name], tensor) for name, tensor in new.items())
    whole = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=400, shard_count=2)
    assert (tmp_path / "keyframe.bin").read_bytes() == join_frames(encode_keyframe(new, whole))
