"""The embedded engine: PyTorch on one CPU thread, for machines without vLLM. Implements `worker.engines.engine.Engine`.

Models that the fused path does not support run on transformers' own modules, which is slower; a warning says so. Guarantees:
those of the protocol; weights arrive by `swap` only, so nothing is generated before the first version. The asyncio side refuses
bad requests at once; everything else happens in the thread of `StepLoop`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from echo2.base.errors import ConfigError, EchoError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import ROUTING_KEY
from echo2.base.staged import StagedVersion
from echo2.cost_model.sizing import Fit, Quantisation
from echo2.outside.allocator import give_back
from echo2.worker.engines.adapter import CONFIG_KEY, Adapter, AdapterSpec, adapter_spec, load_base
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.live_weights import LiveTensors, LiveWeights, read_shape, why_not_fused
from echo2.worker.engines.embedded.loop import Forward, LiveSwap, StepLoop
from echo2.worker.engines.embedded.slots import BlockPool
from echo2.worker.engines.engine import EngineStats, GenerateRequest, SwapMode, TokenChunk, refuse_bad_request
from echo2.worker.engines.outbox import LINGER_S, Outbox
from echo2.worker.options import WorkerOptions

STOP_TIMEOUT_S = 9.0  # a step takes seconds at most; within the 10 s that `Engine.stop` promises
_log = logging.getLogger("echo2.worker")


def _model_of(
    model: Mapping[str, object], adapter: Adapter | None, quantisation: Quantisation
) -> tuple[LiveTensors, Callable[[BlockPool], Forward]]:
    config = {key: value for key, value in model.items() if key != ROUTING_KEY}
    tells_routing = bool(model.get(ROUTING_KEY, False))
    reason = why_not_fused(config)
    if not reason:
        if tells_routing:
            raise ConfigError("routing: the learner asks for that of a mixture of experts, got a dense model")
        is_narrow = quantisation is Quantisation.BF16
        live = LiveWeights(read_shape(config), adapter, torch.bfloat16 if is_narrow else torch.float32)
        return live, partial(CachedDecoder, live)
    if quantisation is Quantisation.BF16:
        raise ConfigError(f"worker.quantisation: bf16 is for the fused path; expected none ({reason})")
    # Imported here because it imports transformers.
    from echo2.worker.engines.embedded.general import GeneralDecoder, ModuleWeights, StateDecoder

    weights = ModuleWeights(config, adapter, tells_routing=tells_routing)
    _log.warning("generating by transformers' own modules, slower than the fused path: %s", reason)
    return weights, partial(StateDecoder if weights.carries_state else GeneralDecoder, weights)


def refuse_quantisation(quantisation: Quantisation, adapter: AdapterSpec | None) -> None:
    """Raises ConfigError for weights that this engine, this machine or the learner's adapter has not."""
    option = f"worker.quantisation: {quantisation.value}"
    if quantisation is Quantisation.FP8:
        raise ConfigError(f"{option} is vLLM's; for the embedded engine expected none or bf16")
    if quantisation is not Quantisation.BF16:
        return
    if adapter is not None:
        raise ConfigError(f"{option} is for whole weights, but the learner publishes an adapter alone; expected none")
    has = torch.cpu.get_capabilities()
    if not (has.get("amx_bf16") or has.get("avx512_bf16")):
        raise ConfigError(
            f"{option} needs a processor that multiplies it (amx_bf16 or avx512_bf16 among its flags), or is slower than "
            "float32; expected none"
        )


class EmbeddedEngine:
    """Continuous batching over a cache in blocks. `context_tokens` 0 takes the model's; `slowdown` 2 halves the speed.
    `cache_tokens`: cache size for all sequences together; 0: enough for every slot at full length. Tokens leave through
    `outbox`."""

    draws_by_seed = True

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        slot_count: int = 32,
        context_tokens: int = 0,
        cache_tokens: int = 0,
        slowdown: float = 1.0,
        outbox: Outbox | None = None,
        adapter: Adapter | None = None,
        quantisation: Quantisation = Quantisation.NONE,
    ) -> None:
        if slowdown < 1.0:
            raise ConfigError(f"slowdown: expected 1 or more, got {slowdown}")
        self._weights, make_forward = _model_of(config, adapter, quantisation)
        limit = self._weights.context_tokens
        self._context_tokens = context_tokens or limit
        if not 2 <= self._context_tokens <= limit:
            raise ConfigError(f"context_tokens: expected 2 to the model's {limit}, got {context_tokens}")
        self.carries_state, self.slot_count = self._weights.carries_state, slot_count
        self._outbox = outbox or Outbox()
        self._loop = StepLoop(
            self._weights, make_forward, slot_count, self._context_tokens, self._outbox, slowdown, cache_tokens
        )
        self._thread: threading.Thread | None = None
        self._swap_order = asyncio.Lock()

    @property
    def version(self) -> Version | None:
        return self._loop.version

    async def start(self) -> None:
        if self._thread is not None:
            raise EngineError("the embedded engine was started before; make a new one")
        self._outbox.bind(asyncio.get_running_loop(), self._loop.notify)
        self._thread = threading.Thread(target=self._loop.run, name="echo2-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(self._loop.call(lambda: None))
        await asyncio.to_thread(give_back)  # returns memory that timing the matrix products used

    async def stop(self) -> None:
        self._loop.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise EngineError(f"the step loop did not end within {STOP_TIMEOUT_S} s")
        self._outbox.close()

    def submit(self, request: GenerateRequest) -> None:
        refuse_bad_request(request, self._context_tokens, self._weights.vocab_count)
        self._outbox.open(request.request_id)
        try:
            self._loop.call(lambda: self._loop.submit(request))
        except EchoError:
            self._outbox.withdraw(request.request_id)
            raise

    async def next_chunks(self) -> Sequence[TokenChunk]:
        return await self._outbox.take()

    async def abort(self, request_id: str) -> None:
        if self._outbox.is_open(request_id):
            await asyncio.wrap_future(self._loop.call(lambda: self._loop.abort(request_id)))

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        async with self._swap_order:
            updates = await asyncio.to_thread(self._weights.checked, staged)
            swap = LiveSwap(staged.version, staged.parent, updates, mode)
            stood_still_s = await asyncio.wrap_future(self._loop.swap(swap))
            updates.clear()
            await asyncio.to_thread(give_back)
            return stood_still_s

    async def fingerprint(self, key: int) -> int:
        return await asyncio.wrap_future(self._loop.call(lambda: self._weights.fingerprint(key)))

    def stats(self) -> EngineStats:
        return self._loop.stats()


def make(config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]) -> EmbeddedEngine:
    """Makes a worker's embedded engine, not started; it computes on the CPU and ignores `gpus`."""
    quantisation, adapter = Quantisation(options.config.worker.quantisation), adapter_spec(config)
    refuse_quantisation(quantisation, adapter)
    engine = EmbeddedEngine(
        {key: value for key, value in config.items() if key != CONFIG_KEY},
        adapter=None if adapter is None else Adapter(load_base(options.config.model.path, adapter), adapter),
        slot_count=fit.sequences,
        context_tokens=fit.sequence_tokens,
        cache_tokens=fit.cache_tokens,
        slowdown=options.config.worker.slowdown,
        outbox=Outbox(linger_s=LINGER_S),
        quantisation=quantisation,
    )
    if engine.carries_state and options.config.worker.swap_mode == SwapMode.KEEP_KV.value:
        raise ConfigError("worker.swap_mode: keep_kv is not for layers with a state; expected recompute_kv")
    return engine
