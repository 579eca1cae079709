"""The cache's memory is that of the tokens in use, whatever the context: numpy asks the kernel for huge pages."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from echo2.worker.blocks import BlockPool
from echo2.worker.runtime.engines.forward import CachedDecoder
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from echo2.worker.slots import Fill
from tests.contract.engine_rig import tiny_config

SLOTS, CONTEXT = 16, 8192


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_few_tokens_in_many_slots_of_a_long_context_take_a_few_pages() -> None:
    config = tiny_config("qwen3", head_dim=64, num_key_value_heads=4, max_position_embeddings=CONTEXT)
    weights = LiveWeights(read_shape(config))
    blocks = BlockPool(SLOTS, CONTEXT)
    decoder = CachedDecoder(weights, blocks)
    with torch.inference_mode():
        decoder.warm_up()
        before = resident_bytes()
        for slot in range(SLOTS):
            assert blocks.reserve(slot, 8)
        decoder.fill([Fill(slot, 0, (1, 2, 3, 4, 5, 6, 7)) for slot in range(SLOTS)])
        decoder.decode([8] * SLOTS, list(range(SLOTS)), [7] * SLOTS)
    used = decoder.block_bytes * blocks.touched_count
    assert used < 4 << 20
    assert resident_bytes() - before < used + (8 << 20), "a page for each slot, head and layer is 768 MiB"
