"""An inference engine on the virtual clock: the real slot table, real weights, made-up sampling.

Guarantees, as worker/engine.py asks: every token carries the version that the engine believes its weights to be, and
depends on the bits that they really are; a swap takes effect between two steps; an aborted sequence gives its last chunk
back. A swap can be made to fail or to go wrong. Leaves to others: which version to swap in (worker/swap).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.base.errors import EngineError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.sim.host import Host
from echo2.sim.tiny_model import SHAPES, VOCABULARY, Sampler, fingerprint_of
from echo2.weights import apply_updates
from echo2.worker.engine import GenerateRequest, SwapMode, TokenChunk, refuse_bad_request
from echo2.worker.slots import SlotSequence, SlotTable

CONTEXT_TOKENS = 512
PREFILL_TOKENS_MAX = 2048
SWAP_S = 0.03


@dataclass(slots=True)
class SwapFaults:
    """How often, of all swaps, one is refused or leaves a wrong bit behind."""

    refused: float = 0.0
    wrong: float = 0.0


class SimEngine:
    """`emit` gets new tokens after each step. `slowdown` may change at any time."""

    def __init__(
        self,
        host: Host,
        sampler: Sampler,
        slot_count: int,
        step_s: float,
        emit: Callable[[Sequence[TokenChunk]], None],
        rng: random.Random,
    ) -> None:
        self.host, self.sampler, self.slot_count, self.step_s, self.emit = host, sampler, slot_count, step_s, emit
        self.slowdown = 1.0
        self.version: Version | None = None
        self.faults = SwapFaults()
        self.table = SlotTable(slot_count, CONTEXT_TOKENS)
        self._weights: dict[str, Tensor] = {name: torch.zeros(s).bfloat16() for name, s in SHAPES.items()}
        self._bits = 0
        self._rng = rng
        self._is_stepping = False
        self._swaps: list[Callable[[], None]] = []
        self._out: list[TokenChunk] = []

    def submit(self, request: GenerateRequest) -> None:
        refuse_bad_request(request, CONTEXT_TOKENS, VOCABULARY)
        self.table.submit(request)
        self._step_soon()

    def abort(self, request_id: str) -> None:
        found = self.table.find(request_id)
        if found is None:
            return
        if isinstance(found, SlotSequence):
            self.table.release(found)
        else:
            self.table.forget_waiting(found)
        version = self.version if self.version is not None else Version(0)
        self._out.append(TokenChunk(request_id, (), (), (), version, FinishReason.ABORTED))
        self._step_soon()

    def swap(
        self, staged: StagedVersion, mode: SwapMode, done: Callable[[float], None], failed: Callable[[str], None]
    ) -> None:
        """At the next step boundary; generation stands still for `SWAP_S`."""

        def act() -> None:
            if self._rng.random() < self.faults.refused:
                failed("the device refused")
                return
            try:
                apply_updates(self._weights, staged.updates())
            except EngineError as error:
                failed(str(error))
                return
            if self._rng.random() < self.faults.wrong:
                self._weights["norm.weight"].view(torch.int16)[self._rng.randrange(12)] ^= 2
            self.version = staged.version
            self._bits = fingerprint_of(self._weights)
            self.table.weights_changed(keep_kv=mode is SwapMode.KEEP_KV)
            self.host.after(SWAP_S, lambda: done(SWAP_S))

        self._swaps.append(act)
        self._step_soon()

    def fingerprint(self) -> int:
        """Of the live weights, from their bits."""
        return fingerprint_of(self._weights)

    @property
    def running(self) -> int:
        return len(self.table.running)

    # ---- steps

    def _step_soon(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.host.after(self.step_s * self.slowdown, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        swaps, self._swaps = self._swaps, []
        for act in swaps:
            act()
        if self.version is not None:
            self._decode(self.version)
        out, self._out = self._out, []
        if out:
            self.emit(out)
        if self._swaps or self._out or self.table.running or (self.table.waiting and self.version is not None):
            self._step_soon()

    def _decode(self, version: Version) -> None:
        self.table.admit()
        self.table.next_copies()
        fills = self.table.next_fills(PREFILL_TOKENS_MAX)
        self.table.filled(fills)
        self.table.next_copies()
        for sequence in self.table.decodable():
            group_id, index = place_of(sequence.request)
            token, logprob = self.sampler.token(self._bits, group_id, index, sequence.completion_count)
            finish = self.table.extend(sequence, token)
            if finish is not FinishReason.UNFINISHED:
                self.table.release(sequence)
            self._out.append(TokenChunk(sequence.request.request_id, (token,), (logprob,), (logprob,), version, finish))


def place_of(request: GenerateRequest) -> tuple[GroupId, int]:
    """Which completion a request is of: the prefix key is the group's name, the id ends in the index."""
    return GroupId(request.prefix_key), int(request.request_id.rpartition("/")[2])
