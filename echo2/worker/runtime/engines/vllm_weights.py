"""The engine's side of vLLM's weights: what is published goes by shared memory to all of vLLM's processes.

Guarantees: an update reaches every process or none; the fingerprint is that of what all of them hold together; with an
adapter, the base is in place and proven to be the learner's before anything else. Leaves to others: pausing generation,
version labels (vllm.py), what happens inside the processes (vllm_extension.py).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2.base.errors import EngineError, VersionMismatch
from echo2.weights.elements import bits_of
from echo2.weights.staged import StagedVersion, TensorUpdate
from echo2.worker.runtime.engines.adapter import AdapterSpec
from echo2.worker.runtime.engines.checking import UpdateCheck
from echo2.worker.runtime.engines.ranks import Ranks, joined
from echo2.worker.runtime.engines.weight_map import Patch

ADAPTER_ID = 1
"""The number under which vLLM knows the one adapter."""
NO_FINGERPRINT = -1
Entry = tuple[str, str, int, int, int]
"""A patch in a file: name, dtype, offset, position count or -1, value count."""
_SIGNED: dict[str, np.dtype[np.signedinteger]] = {"bfloat16": np.dtype(np.int16), "float32": np.dtype(np.int32)}
Rpc = Callable[..., Awaitable[list[Any]]]
Shapes = dict[str, tuple[int, ...]]


class VllmWeights:
    """`rpc` calls a method of the extension in every process and returns their answers."""

    def __init__(self, rpc: Rpc, model_type: str, adapter: AdapterSpec | None) -> None:
        self._rpc = rpc
        self._model_type = model_type
        self._adapter = adapter
        self._check: UpdateCheck | None = None
        self._ranks: Ranks | None = None
        self._updates: list[TensorUpdate] = []
        self._folder = tempfile.TemporaryDirectory(prefix="echo2-patch-", dir=_shared_memory())
        self._path = Path(self._folder.name, "patch")
        self._entries: list[Entry] = []

    def close(self) -> None:
        self._folder.cleanup()

    async def lay_base(self, base: Mapping[str, torch.Tensor], spec: AdapterSpec) -> None:
        """Writes the whole base beneath an adapter, and proves that it is the learner's."""
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        ranks = joined(shapes, await self._answers("echo2_map", _listed(shapes), True))
        updates = [TensorUpdate(name, spec.dtype, shapes[name], None, bits_of(tensor)) for name, tensor in base.items()]
        await asyncio.to_thread(self._write, updates)
        await self._apply(is_base=True)
        await self.settle(is_kept=True, is_base=True)
        found = ranks.fingerprint(await self._answers("echo2_sums", 0, True))
        if found is None or f"{found:016x}" != spec.base_fingerprint:
            raise VersionMismatch(
                f"base model in vLLM: expected the learner's, fingerprint {spec.base_fingerprint}, got {found or 0:016x}"
            )

    async def stage(self, staged: StagedVersion) -> None:
        """Checks a version and puts it where all processes can read it. Touches no weight."""
        check = self._check
        if check is None:
            check = UpdateCheck(self._model_type, await self._mapped(staged))
        self._updates = await asyncio.to_thread(check.checked, staged)
        self._check = check
        await asyncio.to_thread(self._write, self._updates)

    async def apply(self) -> None:
        """Writes what was staged into the live weights of every process, or of none. To be settled afterwards."""
        await self._apply(is_base=False)
        assert self._check is not None, "what is applied was staged"
        self._check.applied(self._updates)

    async def settle(self, *, is_kept: bool, is_base: bool = False) -> None:
        """The processes forget the old values, or put them back."""
        self._updates = []
        self._path.unlink(missing_ok=True)
        await self._answers("echo2_settle", is_kept, is_base)

    async def fingerprint(self, key: int) -> int:
        """Of the published weights, from what is live; none that any weights have where processes disagree."""
        sums = await self._answers("echo2_sums", key, False)
        assert self._ranks is not None, "a fingerprint is asked for after the first keyframe"
        found = self._ranks.fingerprint(sums)
        return NO_FINGERPRINT if found is None else found

    async def _apply(self, *, is_base: bool) -> None:
        try:
            await self._answers("echo2_apply", str(self._path), self._entries, is_base)
        except EngineError:
            await self.settle(is_kept=False, is_base=is_base)
            raise

    async def _mapped(self, staged: StagedVersion) -> Shapes:
        """Has every process build its map for the tensors of the first keyframe."""
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
                whose = f"rank {rank} of {len(answers)}: " if len(answers) > 1 else ""
                raise EngineError(whose + answer.removeprefix("error: "))
        return answers

    def _write(self, updates: Sequence[TensorUpdate]) -> None:
        """Raw positions and bits one after another, for the processes to map, and where each begins."""
        self._entries = []
        with self._path.open("wb") as file:
            for update in updates:
                count = -1 if update.indices is None else len(update.indices)
                self._entries.append((update.name, update.dtype, file.tell(), count, len(update.bits)))
                if update.indices is not None:
                    file.write(np.ascontiguousarray(update.indices).data)
                file.write(np.ascontiguousarray(update.bits).data)


def read_patches(path: Path, entries: Sequence[Entry]) -> list[Patch]:
    """In the process: the patches of a file that the engine wrote."""
    raw = np.memmap(path, np.uint8, "r")
    return [_patch(raw, entry) for entry in entries]


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


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
