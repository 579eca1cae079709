"""The engine's side of vLLM's weights: sends published weights through shared memory to all of vLLM's processes.

A keyframe goes in rounds of some tensors each, so that shared memory holds only a part of it at a time. Guarantees: an update
reaches every process or none; a tensor with elements that no rank holds is refused by name, and a part that several ranks hold
counts once and must have the same sum on each; with an adapter, the base is in place and proven to be the learner's before anything
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2.base.errors import EngineError, ResourceError, VersionMismatch
from echo2.base.rollout import RoutingShape, packed
from echo2.base.staged import StagedVersion, TensorUpdate
from echo2.base.units import format_bytes
from echo2.cost_model.sizing import ROUND_BYTES
from echo2.weights.elements import bits_of
from echo2.weights.fingerprint import MODULUS
from echo2.worker.engines.adapter import AdapterSpec
from echo2.worker.engines.engine import UpdateCheck
from echo2.worker.engines.vllm.weight_map import Patch

Covers = Sequence[tuple[str, int, str]]
"""For each tensor: its name, how many of its elements a rank holds, and a text that is equal on ranks that hold the same ones."""
Sums = Sequence[tuple[int, int]]
"""For each tensor: its header's term of the fingerprint, and the sum over the elements that a rank holds."""


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Which ranks hold the same part of a tensor: for each tensor, groups of rank numbers."""

    holders: tuple[tuple[tuple[int, ...], ...], ...]

    def fingerprint(self, sums: Sequence[Sums]) -> int | None:
        """The fingerprint from the sums of every rank; None if ranks differ in a part that they share."""
        total = 0
        for at, groups in enumerate(self.holders):
            total += sums[0][at][0]
            for group in groups:
                if len({tuple(sums[rank][at]) for rank in group}) > 1:
                    return None
                total += sums[group[0]][at][1]
        return total % MODULUS


def joined(shapes: Mapping[str, tuple[int, ...]], covers: Sequence[Covers]) -> RankGroups:
    """Groups the ranks by the parts that they hold; EngineError, naming the tensor, unless together they hold all of it."""
    holders = []
    for at, (name, shape) in enumerate(shapes.items()):
        groups: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for rank, cover in enumerate(covers):
            _, count, part = cover[at]
            groups.setdefault(part, []).append(rank)
            counts[part] = count
        expected, placed = math.prod(shape), sum(counts.values())
        if placed != expected:
            raise EngineError(f"tensor {name}: the model's loader places {placed} of its {expected} elements")
        holders.append(tuple(tuple(ranks) for ranks in groups.values()))
    return RankGroups(tuple(holders))


STREAM, POSITION = "echo2_stream", "echo2_position"
"""Keys of the arguments that vLLM passes along with a request: the seed of its random numbers, and how many tokens were sampled
before this request."""
PROMPT_FILE = "echo2_prompt_file"
"""Key of the path that a prompt's experts are written to, for a request whose experts are wanted."""
ADAPTER_ID = 1  # vLLM's number for the only adapter
RAW_LOGPROB_ID = -1
"""Marks, in place of a token id, the entry with the raw model's log-probability of the sampled token; below it are its experts."""
NO_FINGERPRINT = -1  # no sum is negative
Entry = tuple[str, str, int, int, int]
"""A patch in a file: name, dtype, offset in bytes, number of positions or -1 (whole tensor), number of values."""
_SIGNED: dict[str, np.dtype[np.signedinteger]] = {"bfloat16": np.dtype(np.int16), "float32": np.dtype(np.int32)}
Rpc = Callable[..., Awaitable[list[Any]]]
Shapes = dict[str, tuple[int, ...]]


class VllmWeights:
    """`rpc` calls a method of the extension in every process and returns their answers. `is_rounded`: vLLM rounds layers."""

    def __init__(self, rpc: Rpc, model_type: str, adapter: AdapterSpec | None, *, is_rounded: bool = False) -> None:
        self._rpc = rpc
        self._model_type = model_type
        self._adapter = adapter
        self._is_rounded = is_rounded
        self._check: UpdateCheck | None = None
        self._ranks: RankGroups | None = None
        self._updates: list[TensorUpdate] = []
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="echo2-patch-", dir=memory)
        self._path = Path(self._folder.name, "patch")
        self._entries: list[Entry] = []
        self._is_written = False

    def close(self) -> None:
        self._folder.cleanup()

    async def lay_base(self, base: Mapping[str, torch.Tensor], spec: AdapterSpec) -> None:
        """Writes the adapter's whole base model, and proves that it is the learner's; VersionMismatch if it is not."""
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        ranks = joined(shapes, await self._answers("echo2_map", _listed(shapes), True))
        updates = [TensorUpdate(name, spec.dtype, shapes[name], None, bits_of(tensor)) for name, tensor in base.items()]
        await self._apply(updates, is_base=True)
        await self.settle(is_kept=True, is_base=True)
        total = ranks.fingerprint(await self._answers("echo2_sums", 0, True))
        if total is None or f"{total:016x}" != spec.base_fingerprint:
            raise VersionMismatch(
                f"base model in vLLM: expected the learner's, fingerprint {spec.base_fingerprint}, got {total or 0:016x}"
            )

    async def stage(self, staged: StagedVersion) -> None:
        """Checks a version; writes a small one to shared memory. Touches no weight."""
        check = self._check
        if check is None:
            check = UpdateCheck(self._model_type, await self._mapped(staged))
        self._updates = await asyncio.to_thread(lambda: list(check.checked(staged)))
        self._check = check
        self._is_written = sum(map(_bytes_of, self._updates)) <= ROUND_BYTES
        if self._is_written:
            await asyncio.to_thread(self._write, self._updates)

    async def apply(self) -> None:
        """Writes the staged version into the live weights of every process, or of none. Call `settle` afterwards."""
        await self._apply(self._updates, is_base=False)
        assert self._check is not None, "what is applied was staged"
        self._check.applied(self._updates)

    async def settle(self, *, is_kept: bool, is_base: bool = False) -> None:
        """Ends an update: the processes restore the old values (not `is_kept`), or drop them."""
        self._updates = []
        self._path.unlink(missing_ok=True)
        await self._answers("echo2_settle", is_kept, is_base)

    async def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the published weights, from the live ones; NO_FINGERPRINT if processes disagree."""
        sums = await self._answers("echo2_sums", key, False)
        assert self._ranks is not None, "a fingerprint is asked for after the first keyframe"
        total = self._ranks.fingerprint(sums)
        return NO_FINGERPRINT if total is None else total

    async def _apply(self, updates: Sequence[TensorUpdate], *, is_base: bool) -> None:
        try:
            for number, part in enumerate(_rounds(updates)):
                if not self._is_written:
                    await asyncio.to_thread(self._write, part)
                await self._answers("echo2_apply", str(self._path), self._entries, is_base, number > 0)
            if self._is_rounded:  # only after all have written: ranks that share a layer agree on its scales
                await self._answers("echo2_follow")
        except EngineError:
            await self.settle(is_kept=False, is_base=is_base)
            raise
        finally:
            self._is_written = False

    async def _mapped(self, staged: StagedVersion) -> Shapes:
        """Makes every process build its map for the tensors of the first keyframe; returns their shapes."""
        if staged.parent is not None:
            raise EngineError(f"version {staged.version}: expected a keyframe first, got a change of {staged.parent}")
        shapes = {update.name: tuple(update.shape) for update in staged.updates()}
        if self._adapter is None:
            covers = await self._answers("echo2_map", _listed(shapes), False)
        else:
            covers = await self._answers("echo2_map_adapter", _listed(shapes), self._adapter.scale)
        self._ranks = joined(shapes, covers)
        return shapes

    async def _answers(self, method: str, *arguments: object) -> list[Any]:
        answers = await self._rpc(method, *arguments)
        for rank, answer in enumerate(answers):
            if isinstance(answer, str) and answer.startswith("error: "):
                where = f"rank {rank} of {len(answers)}: " if len(answers) > 1 else ""
                raise EngineError(where + answer.removeprefix("error: "))
        return answers

    def _write(self, updates: Sequence[TensorUpdate]) -> None:
        """Writes raw positions and bits one after another to the file that the processes map, and records where each begins."""
        self._entries = []
        try:
            self._path.unlink(missing_ok=True)  # a new file, since processes may still map the old one
            with self._path.open("wb") as file:
                for update in updates:
                    count = -1 if update.indices is None else len(update.indices)
                    self._entries.append((update.name, update.dtype, file.tell(), count, len(update.bits)))
                    if update.indices is not None:
                        file.write(np.ascontiguousarray(update.indices).data)
                    file.write(np.ascontiguousarray(update.bits).data)
        except OSError as error:
            folder = self._path.parent.parent
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            raise ResourceError(
                f"{folder}: expected room for {format_bytes(sum(map(_bytes_of, updates)))} on their way to vLLM's "
                f"processes, got: {error.strerror}; free some, or give the container more (--shm-size)"
            ) from None


def expert_dtype(shape: RoutingShape) -> np.dtype[Any]:
    """The dtype of experts that leave vLLM's process."""
    return np.dtype(np.uint8 if shape.experts <= 256 else np.int16)


def routing_rows(raw: bytes, shape: RoutingShape) -> bytes:
    """The packed rows of experts in that dtype."""
    return packed(np.frombuffer(raw, expert_dtype(shape)).reshape(-1, shape.routers, shape.chosen), shape)


def read_patches(path: Path, entries: Sequence[Entry]) -> Iterator[Patch]:
    """The patches of a file that the engine wrote, read one at a time. Runs inside vLLM's process."""
    raw = np.memmap(path, np.uint8, "r")
    return (_patch(raw, entry) for entry in entries)


def _rounds(updates: Sequence[TensorUpdate]) -> Iterator[Sequence[TensorUpdate]]:
    """The updates in their order, in parts of at most ROUND_BYTES; a larger update is a part of its own."""
    part: list[TensorUpdate] = []
    size = 0
    for update in updates:
        if part and size + _bytes_of(update) > ROUND_BYTES:
            yield part
            part, size = [], 0
        part.append(update)
        size += _bytes_of(update)
    if part:
        yield part


def _bytes_of(update: TensorUpdate) -> int:
    return int(update.bits.nbytes + (0 if update.indices is None else update.indices.nbytes))


def _patch(raw: np.ndarray, entry: Entry) -> Patch:
    name, dtype, offset, position_count, value_count = entry
    positions = None
    if position_count >= 0:
        positions = torch.from_numpy(np.array(raw[offset : offset + 8 * position_count]).view(np.int64))
        offset += 8 * position_count
    signed = _SIGNED[dtype]
    bits = np.array(raw[offset : offset + signed.itemsize * value_count]).view(signed)
    return Patch(name, dtype, positions, torch.from_numpy(bits))


def _listed(shapes: Shapes) -> list[tuple[str, list[int]]]:
    return [(name, list(shape)) for name, shape in shapes.items()]
