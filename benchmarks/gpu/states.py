"""The optimiser's three states: a step's time and memory with each, memory beside what the sizing tells, and whether a resumed
learner, and one with its masters on the host, have the bits that they should.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.setup import QWEN3_4B, SMALL, Row, Setup, Shape, not_measured
from benchmarks.gpu.stepping import batch_of, trainer_of
from echo2.base.ids import Version
from echo2.config.run import OptimizerState
from echo2.cost_model.sizing import Checkpointing, LearnerRun, learner_memory
from echo2.learner.options import LearnerLimits
from echo2.learner.publishing.checkpoint import CheckpointStore, put_back, take
from echo2.learner.rollouts.groups import Batch

BITS = Shape("Qwen3 of four layers", 16_384, 1024, 3072, 4, 16, 8, 128, True)
SIZES = (4, 8, 256, 512)
TOLD_RATIO = 1.1


def states() -> list[OptimizerState]:
    found: list[OptimizerState] = ["float32", "host"]
    return [*found, "8bit"] if importlib.util.find_spec("bitsandbytes") else found


def run(setup: Setup) -> Iterator[Row]:
    shape, ends = SMALL if setup.is_small else BITS, dict[str, dict[str, Tensor]]()
    batch: Batch | None = None
    sizes = (4, 4, 24, 16) if setup.is_small else SIZES
    for how in states():
        trainer = trainer_of(setup, shape, "dense", how)
        batch = batch or batch_of(trainer, shape, *sizes)
        trainer.step(batch)
        store = CheckpointStore(setup.folder / how, LearnerLimits(free_bytes_min=0))
        checkpoint = take(trainer, trainer.model.snapshot(), Version(1), {"journal_from": 0})
        store.begin(checkpoint)
        store.save(checkpoint)
        trainer.step(batch)
        ends[how] = trainer.model.snapshot()
        del trainer, checkpoint
        again = trainer_of(setup, shape, "dense", how)
        loaded = store.load_newest(again)
        assert loaded is not None
        put_back(loaded, again)
        again.step(batch)
        name = f"{shape.name}: resumed from a checkpoint with {how} state, the same bits"
        yield Row(name, float(are_equal(again.model.snapshot(), ends[how])), "", 1.0, "higher")
        del again, loaded
    same = float(are_equal(ends["float32"], ends["host"]))
    yield Row(f"{shape.name}: masters on the host, bits of those on the device", same, "", 1.0, "higher")
    if setup.device.type == "cuda":
        yield from _large(setup)


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one)


def _large(setup: Setup) -> Iterator[Row]:
    shape, batch = QWEN3_4B, None
    for how in reversed(states()):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)
        trainer = trainer_of(setup, shape, "auto", how)
        batch = batch or batch_of(trainer, shape, *SIZES)
        trainer.step(batch)
        began = time.perf_counter()
        result = trainer.step(batch)
        name = f"{shape.name}: step with {how} state"
        yield Row(name, result.sampled_tokens / (time.perf_counter() - began), "tokens/s", None, "higher")
        yield Row(f"{name}, of it the update", result.phases_s["optimiser"], "s")
        peak = torch.cuda.max_memory_allocated(setup.device)
        yield Row(f"{name}, peak memory a parameter", peak / shape.parameters, "bytes")
        held = torch.cuda.memory_allocated(setup.device) + 4 * shape.parameters  # the summed gradient is gone by now
        told = learner_memory(
            trainer.model.size, trainer.learner.token_budget, Checkpointing.FULL, gpu_count=1,
            run=LearnerRun(optimizer_state=how),
        )  # fmt: skip
        yield Row(f"{name}, state over what the sizing tells", held / told.state_bytes, "x", TOLD_RATIO)
        del trainer
    if "8bit" not in states():
        yield not_measured(f"{shape.name}: step with 8bit state", "tokens/s", "not installed: bitsandbytes", "higher")
