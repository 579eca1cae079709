"""Builds the engine for the learner's model, or one per GPU.

Guarantees: a model that the engine does not know, or that does not fit the machine, is refused by name before anything
is fetched. Leaves to others: starting it, weights.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch

from echo2 import weights as delta
from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.units import format_bytes
from echo2.cost_model.sizing import FORMER_SHARE, Fit, RunLengths, model_size, worker_fit
from echo2.worker.engine import Engine
from echo2.worker.findings import Finding
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime.engines.several import SeveralEngines
from echo2.worker.runtime.machine import WorkerMachine, check_room, look, memory_total_bytes, memory_used_bytes, reach

CONFIG_BYTES_MAX = 1 << 20
_log = logging.getLogger("echo2.worker")


def parse_model_config(raw: bytes) -> dict[str, object]:
    """The transformers config that the learner sent."""
    if not 2 <= len(raw) <= CONFIG_BYTES_MAX:
        raise MalformedMessage(f"model_config_json: expected 2 to {CONFIG_BYTES_MAX} bytes, got {len(raw)}")
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise MalformedMessage(f"model_config_json: expected JSON, got something else ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise MalformedMessage("model_config_json: expected an object with a model_type")
    return config


def warm_up(choice: EngineChoice) -> None:
    """Loads the code that the engine needs, while the worker still waits for others; the codec's goes on beside it.

    Where the codec was never compiled that takes tens of seconds, which no end of the worker waits for.
    """
    threading.Thread(target=delta.warm_up, args=(torch.bfloat16,), name="codec", daemon=True).start()
    if choice is EngineChoice.EMBEDDED:
        importlib.import_module(MAKERS[choice])


def fit_engine(
    choice: EngineChoice,
    config: dict[str, object],
    options: WorkerOptions,
    machine: WorkerMachine,
    longest_tokens: int = 0,
    published_bytes: int = 0,
    *,
    is_audited: bool = True,
) -> Fit:
    """By the model's size, the run's longest sequence and the machine's memory; ResourceError where it cannot fit.

    `published_bytes`: what the learner publishes; 0 where it does not say: the model in bf16. `is_audited`: the learner may ask
    for scores under former versions.
    """
    size = model_size(config)
    is_on_gpus = choice is EngineChoice.VLLM and bool(machine.gpus)
    at_work = machine if is_on_gpus else replace(machine, gpus=())
    run = RunLengths(longest_tokens, options.slot_count, options.context_tokens_max, options.quantisation)
    gpus = [gpu.memory_bytes for gpu in at_work.gpus]
    fit = worker_fit(size, gpus, machine.memory_bytes, run, published_bytes)
    masters_bytes = fit.engine_count * size.masters_bytes(options.quantisation) if is_on_gpus else 0
    on_host = published_bytes or size.gpu_weight_bytes
    spare = check_room(at_work, size, on_host, options.folder, masters_bytes)
    former = int(FORMER_SHARE * on_host)
    if is_audited and spare < former:
        _log.info(
            "former versions are not kept, and nothing is scored under them: expected %s of memory for them, %s are left",
            format_bytes(former), format_bytes(spare),
        )  # fmt: skip
    return replace(fit, keeps_former=is_audited and spare >= former, loads_base=spare >= on_host)


def make_engine(choice: EngineChoice, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine:
    """The engine, not started. May take seconds: run it in a thread."""
    if fit.engine_count == 1:
        gpus = range(fit.tensor_parallel) if fit.tensor_parallel > 1 else range(0)
        return _one_engine(choice, config, options, fit, gpus)
    width = fit.tensor_parallel
    shares = [range(number * width, (number + 1) * width) for number in range(fit.engine_count)]
    return SeveralEngines([_one_engine(choice, config, options, fit, gpus) for gpus in shares])


MAKERS = {
    EngineChoice.EMBEDDED: "echo2.worker.runtime.engines.embedded",
    EngineChoice.VLLM: "echo2.worker.runtime.engines.vllm",
}
"""An engine is a module with a class of the protocol `Engine` and a function `make`, and a line here. It is loaded when it
is chosen: each costs seconds, and its library may not be installed."""


def _one_engine(
    choice: EngineChoice, config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]
) -> Engine:
    try:
        module: MakesEngine = cast(MakesEngine, importlib.import_module(MAKERS[choice]))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine: expected {choice.value}, but {error.name} is not installed; choose the embedded one"
        ) from None
    return module.make(config, options, fit, gpus)


class MakesEngine(Protocol):
    """A module of `MAKERS`."""

    def make(self, config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]) -> Engine:
        """An engine, not started. `config`: of the model; `gpus`: which of them it uses, none: the engine's choice."""
        ...


class Engines(Protocol):
    """This machine, and how engines are made on it."""

    def look(self, folder: Path) -> WorkerMachine: ...

    def memory_bytes(self) -> tuple[int, int]:
        """Used and there in all."""
        ...

    def warm_up(self, choice: EngineChoice) -> None: ...

    def fit(
        self,
        choice: EngineChoice,
        config: dict[str, object],
        options: WorkerOptions,
        machine: WorkerMachine,
        longest_tokens: int = 0,
        published_bytes: int = 0,
        *,
        is_audited: bool = True,
    ) -> Fit: ...

    def make(self, choice: EngineChoice, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine: ...

    async def reach(self, addresses: list[str]) -> Finding: ...


class MachineEngines:
    """The machine itself and its real engines."""

    look = staticmethod(look)
    warm_up = staticmethod(warm_up)
    fit = staticmethod(fit_engine)
    make = staticmethod(make_engine)
    reach = staticmethod(reach)

    def memory_bytes(self) -> tuple[int, int]:
        return memory_used_bytes(), memory_total_bytes()


ENGINES: Engines = MachineEngines()
