"""Builds the engine for the learner's model, or one engine per GPU or group of GPUs.

Guarantees: a model that the engine does not support, or that does not fit the machine, is refused by name before anything is
fetched. Leaves to others: starting the engine, weights.
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
    """Parses the transformers config that the learner sent; MalformedMessage if it is too large or not one."""
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
    """Loads the engine's code while the worker is still waiting to join; compiles the codec in a thread beside that.

    The codec's first compilation takes tens of seconds; as a daemon thread it does not delay the worker's exit.
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
    """Sizes the engine from the model, the run's longest sequence and the machine's memory; ResourceError if it does not fit.

    `published_bytes`: size of what the learner publishes; 0: not told, so the model in bf16 is assumed. `is_audited`: the learner
    may request scores under former versions.
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
    """Makes the engine without starting it. May take seconds: run it in a thread."""
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
"""To add an engine, write a module with a class of the protocol `Engine` and a function `make`, and list it here. Only the chosen
module is imported: each import costs seconds, and its library may not be installed."""


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
        """Makes an engine without starting it. `config`: the model's; `gpus`: the GPUs to use; empty: the engine chooses."""
        ...


class Engines(Protocol):
    """This machine, and how to make engines on it; the simulator has an implementation of its own."""

    def look(self, folder: Path) -> WorkerMachine: ...

    def memory_bytes(self) -> tuple[int, int]:
        """Host memory used by this worker, and the total."""
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
