"""An inference engine of the virtual world, behind the engine protocol: real weights and slots, made-up sampling.

Guarantees, as worker/engine requires: every token carries the version that the engine believes its weights to be, and
depends on their actual bits; a swap takes effect between two steps; an aborted sequence returns a last chunk. Faults can
make a swap fail or leave wrong bits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.cost_model.sizing import Fit
from echo2.outside import here
from echo2.sim.tiny_model import SHAPES, VOCABULARY, Pick, fingerprint_of, seeded_pick
from echo2.weights import HostWeights, apply_updates
from echo2.worker.engines.embedded.slots import SlotTable
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest, SwapMode, TokenChunk, refuse_bad_request
from echo2.worker.engines.making import Engines
from echo2.worker.machine import Finding, WorkerMachine
from echo2.worker.options import WorkerOptions

CONTEXT_TOKENS = 512  # longer than any scenario's prompt and completion
PREFILL_TOKENS_MAX = 2048  # several prompts a step
SWAP_S = 0.03  # long enough for a fault to hit it
GIB = 1 << 30  # bytes


@dataclass(slots=True)
class EngineFaults:
    """Faults of a machine: probability that a swap is refused or leaves a wrong bit, and the factor on its step time."""

    refused: float = 0.0
    wrong: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class _Swap:
    staged: StagedVersion
    mode: SwapMode
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SimulatedEngine:
    """The engine. `step_s`: seconds of one decode step over all slots."""

    def __init__(
        self, pick: Pick, draws_by_seed: bool, slot_count: int, step_s: float, faults: EngineFaults, rng: random.Random
    ) -> None:
        self.slot_count, self.draws_by_seed = slot_count, draws_by_seed
        self.version: Version | None = None
        self._pick, self._step_s, self._faults, self._rng = pick, step_s, faults, rng
        self._table = SlotTable(slot_count, CONTEXT_TOKENS)
        self._weights: dict[str, Tensor] = {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()}
        self._bits = 0
        self._swaps: list[_Swap] = []
        self._chunks: list[TokenChunk] = []
        self._work, self._out = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._sampled = 0

    async def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        self._is_stopped = True
        if self._running is not None:
            self._running.cancel()
        self._out.set()

    def submit(self, request: GenerateRequest) -> None:
        refuse_bad_request(request, CONTEXT_TOKENS, VOCABULARY)
        self._table.submit(request)
        self._work.set()

    async def next_chunks(self) -> Sequence[TokenChunk]:
        while not self._chunks and not self._is_stopped:
            self._out.clear()
            await self._out.wait()
        chunks, self._chunks = self._chunks, []
        return chunks

    async def abort(self, request_id: str) -> None:
        if self._table.abort(request_id):
            version = self.version if self.version is not None else Version(0)
            self._give(TokenChunk(request_id, (), (), (), version, FinishReason.ABORTED))

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        swap = _Swap(staged, mode)
        self._swaps.append(swap)
        self._work.set()
        return await swap.done

    async def fingerprint(self, key: int) -> int:
        return HostWeights.from_tensors(self._weights, Version(0), key, copy=False).fingerprint()

    def stats(self) -> EngineStats:
        table = self._table
        return EngineStats(len(table.running), len(table.waiting), self._sampled)

    # ---- steps

    async def _run(self) -> None:
        while True:
            while not self._swaps and not (self.version is not None and (self._table.running or self._table.waiting)):
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self._step_s * self._faults.slowdown)
            swaps, self._swaps = self._swaps, []
            for swap in swaps:
                await self._swap(swap)
            if self.version is not None:
                self._decode(self.version)

    async def _swap(self, swap: _Swap) -> None:
        if self._rng.random() < self._faults.refused:
            swap.done.set_exception(EngineError("the device refused"))
            return
        try:
            apply_updates(self._weights, swap.staged.updates())
        except EngineError as error:
            swap.done.set_exception(error)
            return
        if self._rng.random() < self._faults.wrong:
            self._weights["norm.weight"].view(torch.int16)[self._rng.randrange(12)] ^= 2
        self.version = swap.staged.version
        self._bits = fingerprint_of(self._weights)
        self._table.weights_changed(keep_kv=swap.mode is SwapMode.KEEP_KV)
        await asyncio.sleep(SWAP_S)
        if not swap.done.done():
            swap.done.set_result(SWAP_S)

    def _give(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._out.set()

    def _decode(self, version: Version) -> None:
        self._table.admit()
        self._table.next_copies()
        self._table.filled(self._table.next_fills(PREFILL_TOKENS_MAX))
        self._table.next_copies()
        for sequence in self._table.decodable():
            token, logprob = self._pick(self._bits, sequence.request, sequence.completion_count)
            finish = self._table.extend(sequence, token)
            if finish is not FinishReason.UNFINISHED:
                self._table.release(sequence)
            self._sampled += 1
            request_id = sequence.request.request_id
            self._give(TokenChunk(request_id, (token,), (logprob,), (logprob,), version, finish))


class VirtualEngines(Engines):
    """`Engines` of a virtual machine, which sample tokens by `pick` and claim to draw by the leases' seeds, or not."""

    def __init__(self, slot_count: int, step_s: float, faults: EngineFaults) -> None:
        self._slot_count, self._step_s, self._faults = slot_count, step_s, faults
        self.pick: Pick = seeded_pick
        self.draws_by_seed = True

    def look(self, folder: Path) -> WorkerMachine:
        return WorkerMachine((), 2, 8 * GIB, 100 * GIB, False, 4 * GIB)

    def memory_bytes(self) -> tuple[int, int]:
        return GIB, 8 * GIB

    def warm_up(self, choice: str) -> None:
        pass

    def fit(
        self, choice: str, config: dict[str, object], options: WorkerOptions, machine: WorkerMachine,
        longest_tokens: int = 0, published_bytes: int = 0,
    ) -> Fit:  # fmt: skip
        count, tokens = self._slot_count, CONTEXT_TOKENS
        return Fit(1, 0, count, tokens, count * tokens, f"{count} sequences as made up")

    def make(self, choice: str, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine:
        return SimulatedEngine(self.pick, self.draws_by_seed, fit.sequences, self._step_s, self._faults, here().rng)

    async def reach(self, addresses: list[str]) -> Finding:
        return Finding("reach", "as virtual machines are reached", True)
