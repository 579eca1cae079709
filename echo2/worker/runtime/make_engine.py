"""Builds the engine for the learner's model.

Guarantees: a model that the engine does not know, or that does not fit the machine, is refused by name before anything
is fetched. Leaves to others: starting it, weights.
"""

from __future__ import annotations

import importlib
import json

import torch

from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.ids import Version
from echo2.broadcast.delta import HostWeights
from echo2.worker.engine import Engine
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime.engines.adapter import CONFIG_KEY, Adapter, adapter_spec, load_base

SLOTS_DEFAULT = 32
LINGER_S = 0.1
"""Tokens of growing rollouts reach the desk so often; a rollout's end does so at once."""
CONFIG_BYTES_MAX = 1 << 20


def slots_of(options: WorkerOptions) -> int:
    """How many sequences decode together: as told, else `SLOTS_DEFAULT`."""
    return options.slot_count or SLOTS_DEFAULT


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
    """Loads the code that the engine and the decoder need, while the worker still waits for others."""
    if choice is EngineChoice.EMBEDDED:
        importlib.import_module("echo2.worker.runtime.engines.embedded")
        importlib.import_module("transformers").AutoConfig  # noqa: B018  (lazily loaded: this is what takes seconds)
    HostWeights.from_tensors({"warm": torch.zeros(8, dtype=torch.bfloat16)}, Version(0)).fingerprint()


def make_engine(choice: EngineChoice, config: dict[str, object], options: WorkerOptions) -> Engine:
    """The engine, not started. May take seconds: run it in a thread."""
    adapter = adapter_spec(config)
    if choice is EngineChoice.VLLM:
        if adapter is not None:
            raise ConfigError("engine: the learner publishes a LoRA adapter, which the embedded engine alone applies")
        try:
            module = importlib.import_module("echo2.worker.runtime.engines.vllm")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"engine: expected vLLM, but {error.name} is not installed; choose the embedded one"
            ) from None
        made: Engine = module.VllmEngine(
            config, slot_count=slots_of(options), context_tokens=options.context_tokens_max, linger_s=LINGER_S
        )
        return made
    from echo2.worker.runtime.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(
        {key: value for key, value in config.items() if key != CONFIG_KEY},
        adapter=None if adapter is None else Adapter(load_base(options.model_path, adapter), adapter),
        slot_count=slots_of(options),
        context_tokens=options.context_tokens_max,
        slowdown=options.slowdown,
        linger_s=LINGER_S,
    )
