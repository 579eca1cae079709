"""The processes that train one model together: rank 0 leads, the others do what it says.

Guarantees: every rank carries out the same commands in the same order; commands travel as bytes with a JSON head,
never pickled; with one process nothing of torch.distributed is touched and every collective is the identity. Waits for:
in `hear`, the next command of rank 0, at most `IDLE_TIMEOUT_S`; in a collective, the slowest rank, at most
`COLLECTIVE_TIMEOUT_S`. Leaves to others: starting the processes and ending them all when one fails (torchrun), what the
commands mean (team).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from echo2.base.errors import ConfigError

IDLE_TIMEOUT_S = 86_400.0
"""A learner that gets no rollouts for this long is given up by its other ranks."""
COLLECTIVE_TIMEOUT_S = 1800.0


class Ranks:
    """One process on its own; `DistributedRanks` for one of several."""

    rank = 0
    count = 1
    replicas = 1
    """Copies of the weights. Each is spread over `shards` ranks that follow one another; rank 0 is the first of the first copy."""

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the weights is spread."""
        return self.count // self.replicas

    @property
    def shard(self) -> int:
        """Which part of its copy this rank holds."""
        return self.rank % self.shards

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Added up over the ranks, in the order of the ranks; host tensors."""
        return values

    def largest(self, value: float) -> float:
        return value

    def mesh(self, device_type: str) -> DeviceMesh | None:
        """All ranks along one dimension, or copies by shards where there are several copies; None for one process."""
        return None

    @property
    def writers(self) -> dist.ProcessGroup | None:
        """The group in whose collectives checkpoints are written, apart from the training's."""
        return None

    @property
    def encoders(self) -> dist.ProcessGroup | None:
        """The group over which a version's sections come together, apart from the training's; gloo."""
        return None

    def meet(self) -> None:
        """Returns once all ranks have come here."""

    def tell(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        """Rank 0: the next command."""

    def hear(self) -> tuple[dict[str, Any], bytes]:
        """Other ranks: the next command."""
        raise AssertionError("a process on its own has nobody to hear")

    def close(self) -> None:
        pass


class DistributedRanks(Ranks):
    """One of several processes, as torchrun's environment variables say. ConfigError unless `replicas` divides their number."""

    def __init__(self, replicas: int = 1) -> None:
        check_replicas(replicas, world_size())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        self._is_owner = not dist.is_initialized()  # an engine of the user's may have made it
        if self._is_owner:
            dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self.replicas = replicas
        idle = timedelta(seconds=IDLE_TIMEOUT_S)
        self._commands: Any = dist.new_group(backend="gloo", timeout=idle)
        self._sums: Any = dist.new_group(backend="gloo")
        self._writers: Any = dist.new_group(backend="gloo")
        self._encoders: Any = dist.new_group(backend="gloo", timeout=idle)
        self._meshes: dict[str, DeviceMesh] = {}

    def sum(self, values: Tensor) -> Tensor:
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(gathered, values.contiguous(), group=self._sums)
        return torch.stack(gathered).sum(0)  # in one order everywhere: all ranks get the same bits

    def largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._sums)
        return float(found)

    def mesh(self, device_type: str) -> DeviceMesh | None:
        if device_type not in self._meshes:
            self._meshes[device_type] = (
                init_device_mesh(device_type, (self.count,))
                if self.replicas == 1
                else init_device_mesh(device_type, (self.replicas, self.shards), mesh_dim_names=("replica", "shard"))
            )
        return self._meshes[device_type]

    @property
    def writers(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._writers
        return group

    @property
    def encoders(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._encoders
        return group

    def meet(self) -> None:
        self.sum(torch.zeros(1))

    def tell(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        text = json.dumps(head).encode()
        sizes = torch.tensor([len(text), len(payload)])
        dist.broadcast(sizes, 0, group=self._commands)
        dist.broadcast(_as_tensor(text + payload), 0, group=self._commands)

    def hear(self) -> tuple[dict[str, Any], bytes]:
        sizes = torch.zeros(2, dtype=torch.long)
        dist.broadcast(sizes, 0, group=self._commands)
        text, payload = (int(size) for size in sizes)
        buffer = torch.empty(text + payload, dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._commands)
        data = buffer.numpy().tobytes()
        head: dict[str, Any] = json.loads(data[:text])
        return head, data[text:]

    def close(self) -> None:
        if self._is_owner:
            dist.destroy_process_group()


def ranks_of_environment(replicas: int = 1) -> Ranks:
    """What torchrun started this process as; a process that it did not start is on its own."""
    if world_size() > 1:
        return DistributedRanks(replicas)
    check_replicas(replicas, 1)
    return Ranks()


def check_replicas(replicas: int, count: int) -> None:
    """ConfigError unless so many copies of the weights can be spread evenly over so many ranks."""
    if replicas < 1 or count % replicas:
        fitting = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
        raise ConfigError(
            f"learner.replicas: expected a divisor of the {count} ranks that torchrun started ({fitting}), got {replicas}"
        )


def world_size() -> int:
    return _number("WORLD_SIZE", 1)


def own_rank() -> int:
    return _number("RANK", 0)


def local_device(text: str) -> str:
    """The device option of this rank: each of several on one machine gets a GPU of its own."""
    has_own = world_size() > 1 and text in ("auto", "cuda") and torch.cuda.is_available()
    return f"cuda:{_number('LOCAL_RANK', 0)}" if has_own else text


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded; a collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensor: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in host memory, sharded as it was; in another dtype where one is given."""
    part = own_part(tensor.detach()).to(device="cpu", dtype=dtype, copy=True)
    return as_sharded(part, tensor, ranks)


def as_sharded(part: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """`part`, in host memory, as this rank's shard of a tensor laid out as `like`."""
    mesh = ranks.mesh("cpu")
    if not isinstance(like, DTensor) or mesh is None:
        return part
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def own_rows(tensor: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a whole tensor in host memory, laid out as `like`; no collective."""
    if not isinstance(like, DTensor):
        return tensor
    parts = torch.chunk(tensor, ranks.shards, 0)
    part = parts[ranks.shard].clone() if ranks.shard < len(parts) else tensor[:0].clone()
    assert part.shape == own_part(like).shape, "tensors are sharded by rows"
    return as_sharded(part, like, ranks)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}: expected a number, as torchrun sets it, got {text!r}"
        ) from None
