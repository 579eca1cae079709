"""The processes that train one model together: rank 0 leads, the others carry out its commands; first all check that they were
started alike (`check_agreement`).

Guarantees: every rank carries out the same commands in the same order; commands travel as bytes with a JSON head, never
pickled; a single process does not touch torch.distributed, and every collective is the identity. Waits for: in `hear`, rank 0's
next command, at most `IDLE_TIMEOUT_S`; in a collective, the slowest rank, at most `COLLECTIVE_TIMEOUT_S`.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from echo2.base.errors import ConfigError, Unreachable
from echo2.learner.options import LearnerOptions

IDLE_TIMEOUT_S = 86_400.0  # if rank 0 gets no rollouts, and so sends no command, for this long, the other ranks give up
COLLECTIVE_TIMEOUT_S = 1800.0  # a checkpoint of a large model on a slow disk takes minutes


class Ranks:
    """A single process; `DistributedRanks` is one of several."""

    rank = 0
    count = 1
    replicas = 1
    """Copies of the weights. Each is sharded over `shards` consecutive ranks; the first copy starts at rank 0."""
    writers: dist.ProcessGroup | None = None
    encoders: dist.ProcessGroup | None = None
    """Gloo groups of several processes, separate from training's: for writing checkpoints, for the sections of a version."""

    @property
    def shards(self) -> int:
        return self.count // self.replicas

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums host tensors over the ranks, in order of rank, so that all ranks get the same bits."""
        return values

    def largest(self, value: float) -> float:
        return value

    def mesh(self, device_type: str) -> DeviceMesh | None:
        """Device mesh of all ranks: one dimension, or (replica, shard) with several copies; None for a single process."""
        return None

    def meet(self) -> None:
        """Barrier: returns once all ranks have called it."""

    def gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What all ranks say, as JSON, in order of rank. A collective, over the writers' group."""
        return [dict(message)]

    def tell(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        """On rank 0: sends the next command to the other ranks."""

    def hear(self) -> tuple[dict[str, Any], bytes]:
        """On the other ranks: waits for rank 0's next command and returns its head and payload."""
        raise AssertionError("a process on its own has nobody to hear")

    def close(self) -> None:
        pass


class DistributedRanks(Ranks):
    """One of several processes, from torchrun's environment variables. ConfigError unless `replicas` divides their number."""

    def __init__(self, replicas: int = 1) -> None:
        check_replicas(replicas, world_size())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        self._is_owner = not dist.is_initialized()  # the user's own engine may have initialised it
        if self._is_owner:
            dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self.replicas = replicas
        idle = timedelta(seconds=IDLE_TIMEOUT_S)
        self._commands: Any = dist.new_group(backend="gloo", timeout=idle)
        self._sums: Any = dist.new_group(backend="gloo")
        self.writers = dist.new_group(backend="gloo")
        self.encoders = dist.new_group(backend="gloo", timeout=idle)
        self._meshes: dict[str, DeviceMesh] = {}

    def sum(self, values: Tensor) -> Tensor:
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(gathered, values.contiguous(), group=self._sums)
        return torch.stack(gathered).sum(0)  # the same order everywhere, so all ranks get the same bits

    def largest(self, value: float) -> float:
        highest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._sums)
        return float(highest)

    def mesh(self, device_type: str) -> DeviceMesh | None:
        if device_type not in self._meshes:
            self._meshes[device_type] = (
                init_device_mesh(device_type, (self.count,))
                if self.replicas == 1
                else init_device_mesh(device_type, (self.replicas, self.shards), mesh_dim_names=("replica", "shard"))
            )
        return self._meshes[device_type]

    def meet(self) -> None:
        self.sum(torch.zeros(1))

    def gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        text = _as_tensor(json.dumps(message).encode())
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([text.numel()]), group=self.writers)
        padded = torch.zeros(int(torch.stack(sizes).max()), dtype=torch.uint8)
        padded[: text.numel()] = text
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.writers)
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

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
    """The ranks that torchrun started, or a single process if it started none."""
    if world_size() > 1:
        return DistributedRanks(replicas)
    check_replicas(replicas, 1)
    return Ranks()


def check_replicas(replicas: int, count: int) -> None:
    """Raises `ConfigError` unless `replicas` copies of the weights can be spread evenly over `count` ranks."""
    if replicas < 1 or count % replicas:
        fitting = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
        raise ConfigError(
            f"learner.replicas: expected a divisor of the {count} ranks that torchrun started ({fitting}), got {replicas}"
        )


def world_size() -> int:
    return _number("WORLD_SIZE", 1)


def lost_rank(error: RuntimeError) -> Unreachable:
    """What a collective raises once another rank has ended, as an error of ours. Raises any other as it is."""
    if world_size() == 1 or not (isinstance(error, dist.DistError) or re.search("/gloo/|pair closure", str(error))):
        raise error
    text = f"expected the learner's other ranks to take part, got: {str(error).strip().rstrip('.')}"
    return Unreachable(
        f"rank {_number('RANK', 0)}: {text}; torchrun names the rank that ended first, whose own words stand above; the same "
        "command goes on from the newest checkpoint"
    )


def local_device(text: str) -> str:
    """The device of this rank for the option `text`: with several ranks, each uses the GPU of its LOCAL_RANK."""
    has_own = world_size() > 1 and text in ("auto", "cuda") and torch.cuda.is_available()
    return f"cuda:{_number('LOCAL_RANK', 0)}" if has_own else text


def pick_device(text: str) -> torch.device:
    """`auto` picks the first CUDA device, or the CPU if there is none. Raises `ConfigError` for a device that is missing."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu or cuda[:n], got {text!r}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: expected one that is here, got {text!r} without a CUDA device")
    return device


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor; a collective if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage; a tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Copies a tensor to host memory, sharded as before."""
    return as_sharded(own_part(tensor.detach()).to("cpu", copy=True), tensor, ranks)


def as_sharded(part: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """Wraps `part`, in host memory, as this rank's shard of a tensor laid out like `like`."""
    mesh = ranks.mesh("cpu")
    if not isinstance(like, DTensor) or mesh is None:
        return part
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def first_row(tensor: Tensor, ranks: Ranks) -> int:
    """Index in the whole tensor of the first row of this rank's shard."""
    if not isinstance(tensor, DTensor):
        return 0
    return min(ranks.shard * -(-tensor.shape[0] // ranks.shards), tensor.shape[0])


def own_rows(tensor: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a whole tensor in host memory, sharded like `like`; not a collective."""
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
        raise ConfigError(f"environment's {name}: expected a number, as torchrun sets it, got {text!r}") from None


# ---- whether all ranks were started with the same configuration

SAMPLE_BYTES, SAMPLES = 64 << 10, 16
"""Bytes per sample, and intervals between evenly spread samples, of each weight file."""
_COMPARED = (
    "steps", "lr", "warmup_steps", "schedule", "weight_decay", "optimizer_state", "advantage", "updates_per_batch",
    "train_on_truncated", "replicas", "replay_routing", "teacher", "loss", "correction", "clip", "kl_coefficient", "token_budget",
    "gradient_checkpointing",
)  # fmt: skip
"""Options of `[learner]` that ranks must share, as rules have resolved them on each machine."""
_HOST, _MODEL = "host", "model"


def check_agreement(options: LearnerOptions, ranks: Ranks) -> None:
    """Raises `ConfigError` on every rank, before one loads the model, if one would train with other options, on another kind of
    device or from another model than rank 0. Of weights it compares the size and samples of each file, not every byte; of a model
    given by hub id, only that id. A collective."""
    if text := difference(ranks.gather(_facts(options))):
        raise ConfigError(text)


def difference(facts: Sequence[Mapping[str, str]]) -> str:
    """Describes the first difference between a rank and rank 0; empty if all agree."""
    first = facts[0]
    for rank, other in enumerate(facts):
        for name in sorted(first.keys() | other.keys()):
            expected, actual = first.get(name, "nothing"), other.get(name, "nothing")
            if name != _HOST and expected != actual:
                return (
                    f"{name} of rank {rank} on {other[_HOST]}: expected {expected}, as on rank 0 on {first[_HOST]}, got "
                    f"{actual}. {'Put the same model on every machine' if name.startswith(_MODEL) else _TO_DO}"
                )
    return ""


_TO_DO = (
    "Give every machine the same configuration; what it leaves to each machine to choose (learner.token_budget = 0, "
    'learner.gradient_checkpointing = "auto") has to be given where machines differ'
)


def _facts(options: LearnerOptions) -> dict[str, str]:
    config = options.config
    facts: dict[str, object] = {f"learner.{name}": getattr(config.learner, name) for name in _COMPARED}
    facts |= {"run": (config.run.name, config.run.seed), "sft": (config.sft.step_count, config.sft.lr)}
    facts |= {
        "weights": (config.model.weights_dtype, config.model.lora_rank),
        "temperature": config.sampling.temperature,
    }
    return {
        _HOST: platform.node() or "a machine without a name",
        "torch": torch.__version__,
        "device": pick_device(local_device(config.learner.device)).type,
        **{name: repr(value) for name, value in facts.items()},
        **dict(_model_facts(config.model.path)),
    }


def _model_facts(path: str) -> Iterator[tuple[str, str]]:
    """One fact per file of the model's folder. An unreadable file is reported as a fact, so that all ranks see the problem."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1
        yield _MODEL, f"no folder {path}" if is_folder else path
        return
    yield _MODEL, "a folder"
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name in ("config.json", "generation_config.json"):
            yield f"{_MODEL} file {file.name}", _sampled(file)


def _sampled(file: Path) -> str:
    try:
        size, digest = file.stat().st_size, xxhash.xxh3_64()
        with file.open("rb") as opened:
            for number in range(SAMPLES + 1):
                opened.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        return f"a file that cannot be read ({error})"
    return f"{size} bytes of sum {digest.hexdigest()}"
