"""Many swaps under load: nothing leaks, nothing gets stuck."""

import asyncio
import contextlib
import random
from pathlib import Path

import numpy as np
import pytest

from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.engine import SwapMode
from tests.contract.engine_rig import VOCAB_COUNT, Collected, Rig, Staged, tiny_config
from tests.patience import WAIT_S

SWAP_COUNT = 200
SLOPE_BYTES_PER_SWAP_MAX = 16 << 10


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def swaps_under_load(swap_count: int) -> tuple[float, int, int]:
    """Bytes of resident memory a swap, sequences that ended, sequences that did not end after the last swap."""
    rig = Rig("embedded", tiny_config("qwen3"), lambda config: EmbeddedEngine(config, slot_count=16))
    rng = random.Random(0)
    live: list[Collected] = []
    finished = 0

    def top_up() -> None:
        nonlocal finished
        finished += sum(sequence.finish_reason is FinishReason.LENGTH for sequence in live)
        live[:] = [sequence for sequence in live if sequence.finish_reason is FinishReason.UNFINISHED]
        while len(live) < 32:
            prompt = [rng.randrange(VOCAB_COUNT) for _ in range(rng.randint(1, 30))]
            live.append(rig.submit(rig.request(prompt, SamplingParams(max_new_tokens=rng.randint(1, 120)))))

    def change(version: int) -> Staged:
        updates = []
        for tensor in rig.keyframe(version % 2).tensors:
            places = np.arange(version % 7, len(tensor.bits), 50, dtype=np.int64)
            updates.append(TensorUpdate(tensor.name, tensor.dtype, tensor.shape, places, tensor.bits[places]))
        return Staged(Version(version), Version(version - 1), updates)

    async def body() -> list[int]:
        memory = []
        for version in range(1, swap_count + 1):
            top_up()
            before = rig.engine.stats().sampled_tokens
            await rig.engine.swap(change(version), list(SwapMode)[version % 3])
            await rig.wait(lambda before=before: rig.engine.stats().sampled_tokens > before + 16)  # type: ignore[misc]
            memory.append(resident_bytes())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(rig.finish(*live), WAIT_S)
        return memory

    memory = rig.run(body)
    stuck = sum(sequence.finish_reason is FinishReason.UNFINISHED for sequence in live)
    rig.close()
    settled = np.array(memory[swap_count // 4 :], np.float64)
    return float(np.polyfit(np.arange(len(settled)), settled, 1)[0]), finished, stuck


@pytest.mark.soak
def test_two_hundred_swaps_under_load_leak_nothing_and_stick_nowhere() -> None:
    slope, finished, stuck = swaps_under_load(SWAP_COUNT)
    print(f"{SWAP_COUNT} swaps, {finished} sequences, resident memory grows by {slope:.0f} bytes a swap")
    assert slope < SLOPE_BYTES_PER_SWAP_MAX
    assert finished > SWAP_COUNT // 4
    assert not stuck
