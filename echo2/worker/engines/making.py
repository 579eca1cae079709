"""Makes the engine for the learner's model: one, or one per GPU or group of GPUs combined into one.

Guarantees: a model that the engine does not support, or that does not fit the machine, is refused by name before anything is
fetched. Of several engines: a group (one `prefix_key`) stays on one engine while any of its sequences run there, so prefixes are
shared; a new group goes to the engine with the fewest sequences per slot. A swap that fails on some engines raises, and the next
one, of whole tensors, brings all to the same version again; until then the fingerprint is -1, which no weights have.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import Sequence
from dataclasses import astuple, replace

import torch

from echo2 import weights as delta
from echo2.base.errors import ConfigError, EngineError, MalformedMessage
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason
from echo2.base.staged import StagedVersion
from echo2.cost_model.sizing import SIZE_KEY, Fit, Quantisation, RunLengths, model_size, worker_fit
from echo2.weights.precision import PRECISIONS
from echo2.worker.engines.adapter import adapter_spec
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest, SwapMode, TokenChunk
from echo2.worker.machine import WorkerMachine, check_room, look, memory_total_bytes, memory_used_bytes, reach
from echo2.worker.options import WorkerOptions

NO_FINGERPRINT = -1  # no sum is negative


class SeveralEngines:
    """Starts the engines one after another: starting one may change the process's environment."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self.slot_count = sum(engine.slot_count for engine in engines)
        self.draws_by_seed = all(engine.draws_by_seed for engine in engines)
        self._home: dict[str, tuple[int, str]] = {}  # request id to engine number and prefix key
        self._groups: dict[str, tuple[int, set[str]]] = {}  # prefix key to engine number and request ids
        self._reading: dict[asyncio.Task[Sequence[TokenChunk]], int] = {}

    @property
    def version(self) -> Version | None:
        versions = {engine.version for engine in self._engines}
        return versions.pop() if len(versions) == 1 else None

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def stop(self) -> None:
        ends = await asyncio.gather(*(engine.stop() for engine in self._engines), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def submit(self, request: GenerateRequest) -> None:
        if request.request_id in self._home:
            raise EngineError(f"request {request.request_id}: expected a new id, got one in use")
        held = [0] * len(self._engines)
        for at, members in self._groups.values():
            held[at] += len(members)
        idlest = min(range(len(held)), key=lambda at: held[at] / self._engines[at].slot_count)
        at, members = self._groups.get(request.prefix_key) or (idlest, set())
        self._engines[at].submit(request)
        members.add(request.request_id)
        self._groups[request.prefix_key] = (at, members)
        self._home[request.request_id] = (at, request.prefix_key)

    async def next_chunks(self) -> Sequence[TokenChunk]:
        for at, engine in enumerate(self._engines):
            if at not in self._reading.values():
                self._reading[asyncio.ensure_future(engine.next_chunks())] = at
        done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
        chunks: list[TokenChunk] = []
        for task in done:
            del self._reading[task]
            chunks += task.result()
        for chunk in chunks:
            if chunk.finish_reason is not FinishReason.UNFINISHED:
                _, prefix_key = self._home.pop(chunk.request_id)
                _, members = self._groups[prefix_key]
                members.discard(chunk.request_id)
                if not members:
                    del self._groups[prefix_key]
        return chunks

    async def abort(self, request_id: str) -> None:
        if request_id in self._home:
            await self._engines[self._home[request_id][0]].abort(request_id)

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        swaps = (engine.swap(staged, mode) for engine in self._engines)
        pauses_s = await asyncio.gather(*swaps, return_exceptions=True)  # all are tried before the first error counts
        for at, error in enumerate(pauses_s):
            if isinstance(error, EngineError):
                raise EngineError(f"engine {at} of {len(self._engines)}: {error}") from error
            if isinstance(error, BaseException):
                raise error
        return max(result for result in pauses_s if isinstance(result, float))

    async def fingerprint(self, key: int) -> int:
        prints = await asyncio.gather(*(engine.fingerprint(key) for engine in self._engines))
        return prints[0] if len(set(prints)) == 1 else NO_FINGERPRINT

    def stats(self) -> EngineStats:
        """Sums over the engines."""
        each = [astuple(engine.stats()) for engine in self._engines]
        return EngineStats(*map(sum, zip(*each, strict=True)))


CONFIG_BYTES_MAX = 1 << 20  # a config with its quantisation has some kilobytes


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


def module_of(choice: str) -> str:
    """The module of an engine, with a class of the protocol `Engine` and a function `make(config, options, fit, gpus)`, which makes
    one without starting it (`gpus`: which to use; empty: the engine chooses). To add an engine, write one and name it among the
    values of `worker.engine` (config/run.py). Only the chosen module is imported: each import costs seconds, and its library may
    not be installed."""
    return f"echo2.worker.engines.{choice}.{choice}_engine"


def warm_up(choice: str) -> None:
    """Loads the engine's code while the worker is still waiting to join; compiles the codec in a thread beside that. The
    codec's first compilation takes tens of seconds; as a daemon thread it does not delay the worker's exit."""
    threading.Thread(target=delta.warm_up, args=(torch.bfloat16,), name="codec", daemon=True).start()
    if choice == "embedded":
        importlib.import_module(module_of(choice))


def fit_engine(
    choice: str,
    config: dict[str, object],
    options: WorkerOptions,
    machine: WorkerMachine,
    longest_tokens: int = 0,
    published_bytes: int = 0,
) -> Fit:
    """Sizes the engine from the model, the run's longest sequence and the machine's memory; ResourceError if it does not fit.
    `published_bytes`: size of what the learner publishes; 0: not told, so the model in bf16 is assumed."""
    size = model_size(config)
    at_work = machine if choice == "vllm" else replace(machine, gpus=())
    quantisation = Quantisation(options.config.worker.quantisation)
    run = RunLengths(longest_tokens, options.config.worker.slots, quantisation=quantisation)
    gpus = [gpu.memory_bytes for gpu in at_work.gpus]
    adapter = adapter_spec(config)
    base_bytes = 0 if adapter is None else PRECISIONS[adapter.dtype].itemsize * size.parameters
    fit = worker_fit(size, gpus, machine.memory_bytes, run, published_bytes + base_bytes)
    on_host = published_bytes or size.gpu_weight_bytes
    spare = check_room(at_work, size, on_host, options.folder, quantisation, fit.engine_count, base_bytes)
    return replace(fit, loads_base=spare >= on_host)


def make_engine(choice: str, config: dict[str, object], options: WorkerOptions, fit: Fit) -> Engine:
    """Makes the engine without starting it. May take seconds: run it in a thread."""
    try:
        module = importlib.import_module(module_of(choice))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine: expected {choice}, but {error.name} is not installed; choose the embedded one"
        ) from None
    model, width = {key: value for key, value in config.items() if key != SIZE_KEY}, fit.tensor_parallel
    if fit.engine_count == 1:
        engine: Engine = module.make(model, options, fit, range(width) if width > 1 else range(0))
        return engine
    shares = [range(number * width, (number + 1) * width) for number in range(fit.engine_count)]
    return SeveralEngines([module.make(model, options, fit, gpus) for gpus in shares])


class Engines:
    """This machine, and how to make engines on it; the simulator has its own."""

    look = staticmethod(look)
    warm_up = staticmethod(warm_up)
    fit = staticmethod(fit_engine)
    make = staticmethod(make_engine)
    reach = staticmethod(reach)

    def memory_bytes(self) -> tuple[int, int]:
        return memory_used_bytes(), memory_total_bytes()


ENGINES = Engines()
