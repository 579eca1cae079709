"""The vLLM engine: vLLM's AsyncLLM behind the protocol of `engines.engine`, with updates scattered into live weights.

Guarantees: those of the protocol; an option that the model or the device does not support is refused by name before vLLM starts. It
needs no fork of vLLM and no second copy of the weights on the device: an extension of vLLM's worker (extension.py) maps published
tensors to live parameters once, with vLLM's own loader, and then writes only what changed, while generation is paused between two
steps. Does not support what docs/vllm.md lists as refused. One task per sequence reads vLLM's stream; it wakes on tokens, and waits
while the outbox is full.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.rng import derived_seed
from echo2.base.rollout import ROUTING_KEY, FinishReason, Routing, RoutingShape
from echo2.base.staged import StagedVersion
from echo2.cost_model.sizing import Fit, Quantisation, exact_positions
from echo2.worker.engines.adapter import CONFIG_KEY, AdapterSpec, adapter_spec, load_base
from echo2.worker.engines.engine import EngineStats, GenerateRequest, SwapMode, TokenChunk, refuse_bad_request
from echo2.worker.engines.outbox import LINGER_S, Outbox, SampledToken
from echo2.worker.engines.vllm.vllm_weights import (
    ADAPTER_ID,
    POSITION,
    PROMPT_FILE,
    STREAM,
    VllmWeights,
    expert_dtype,
    routing_rows,
)
from echo2.worker.options import WorkerOptions

GPU_MEMORY_SHARE = 0.9  # share of a GPU's memory that vLLM may use
CPU_CACHE_GIB = 1  # small models only run so, in tests and demos
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM supports; an adapter gets the next larger one
_FP8 = "fp8_per_channel"
"""vLLM's name of a rounding with one scale per row of a matrix, and one per token for the activations."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The fields of a model's config that announce experts, whose layers cannot be rounded."""
_STATES = ("state_size", "ssm_state_size")  # those that, as all that begin with mamba_, announce Mamba's layers


@dataclass(frozen=True, slots=True)
class BaseOfAdapter:
    """For a learner that publishes an adapter: the adapter's spec, and the folder or hub id of its base model."""

    spec: AdapterSpec
    base_path: str


def _language_part(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def refuse_unsupported(config: Mapping[str, object], quantisation: Quantisation, adapter: BaseOfAdapter | None) -> None:
    """Raises ConfigError for a model that vLLM's workers could not follow, or could not round in this way."""
    fields = _language_part(config)
    # vLLM multiplies by views of a matrix of latent attention, which an adapter or rounding would make copies.
    if (rank := fields.get("kv_lora_rank")) and (adapter is not None or quantisation is not Quantisation.NONE):
        raise ConfigError(
            f"model: vLLM's workers follow changes of latent attention (kv_lora_rank {rank!r}) only in whole weights that are not "
            "rounded; expected no adapter and worker.quantisation none, or --worker.engine embedded"
        )
    # vLLM keeps -exp(A_log) of Mamba's layers, from which the published values cannot be read back for the fingerprint.
    state = next((field for field in fields if field.startswith("mamba_") or field in _STATES), "")
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if state and not (isinstance(kinds, list) and all("attention" in str(kind) for kind in kinds)):
        raise ConfigError(
            f"model: vLLM's workers do not follow changes of Mamba's layers ({state} {fields[state]!r}); expected a model without "
            "them, or --worker.engine embedded"
        )
    if quantisation is Quantisation.NONE:
        return
    option = f"worker.quantisation: {quantisation.value}"
    if quantisation is Quantisation.BF16:
        raise ConfigError(f"{option} is the embedded engine's; for vLLM, which computes in bf16, expected none or fp8")
    if adapter is not None:
        raise ConfigError(f"{option} is for whole weights, but the learner publishes an adapter alone; expected none")
    for field in _EXPERTS:
        if fields.get(field):
            raise ConfigError(f"{option} is not for models with experts ({field} {fields[field]!r}); expected none")


def refuse_on_cpu(config: Mapping[str, object]) -> None:
    """Raises ConfigError if there is no GPU and vLLM's CPU kernels would only approximate the model."""
    if not is_cpu():
        return
    fields = _language_part(config)
    if "linear_attention" in str(fields.get("layer_types")):
        raise ConfigError(
            "model: vLLM's CPU kernels compute linear attention (layer_types) in bf16 alone, its workers there in float32; "
            "expected a GPU, or --worker.engine embedded"
        )
    if cap := fields.get("attn_logit_softcapping"):
        raise ConfigError(
            f"model: vLLM's CPU kernels cap the scores of attention roughly (attn_logit_softcapping {cap!r}), which moves "
            "probabilities by up to a hundredth; expected a GPU, or --worker.engine embedded"
        )


def refuse_device(quantisation: Quantisation) -> None:
    """Raises ConfigError if the GPU has no fp8 matrix products. A CPU computes fp8, slowly, which suffices for trials."""
    if quantisation is Quantisation.NONE or is_cpu():
        return
    from vllm.platforms import current_platform

    if not current_platform.supports_fp8():
        raise ConfigError(
            f"worker.quantisation: {quantisation.value} needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell) "
            f"or an MI300, got {current_platform.get_device_name()}; expected none"
        )


@contextmanager
def only_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """Processes started within the context see only these GPUs, numbered among those visible now; empty: all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        yield
        return
    names = visible.split(",") if visible else []
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu].strip() if names else str(gpu) for gpu in gpus)
    try:
        yield
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def is_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def environment() -> dict[str, str]:
    """Environment variables for vLLM; the caller keeps any that the operator has set."""
    common = {
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the default on GPUs, whose samplers are others than those that extension.py replaces
    }  # fmt: skip
    if not is_cpu():
        return common
    cpu = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return common | cpu


STOP_TIMEOUT_S = 9.0  # within the 10 s that `Engine.stop` promises
APPLY_TIMEOUT_S = 300.0  # bounds every call to vLLM's processes; loading a large keyframe takes longest
_log = logging.getLogger("echo2.worker")
_EXTENSION = "echo2.worker.engines.vllm.extension.WorkerExtension"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


@dataclass(slots=True)
class _Stream:
    """One sequence at vLLM. `parameters`: vLLM's own; `count`: tokens received so far; `is_known`: vLLM has accepted it."""

    request: GenerateRequest
    parameters: Any = None
    task: asyncio.Task[None] | None = None
    count: int = 0
    is_known: bool = False
    is_aborted: bool = False
    prompt_file: Path | None = None  # where vLLM's process writes the experts of its prompt


class VllmEngine:
    """One vLLM instance. `gpus`: which of the visible GPUs to use; with several, vLLM is tensor parallel (on a CPU, over as
    many processes); empty: vLLM chooses. `quantisation`: with fp8 vLLM rounds linear layers, again for each published version.
    `linger_s`: how long tokens of unfinished sequences wait to be handed out together. `draft_tokens`: tokens that vLLM drafts
    from repetitions in the same sequence and verifies in one step; 0: none."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        slot_count: int = 64,
        context_tokens: int = 0,
        gpus: Sequence[int] = (),
        adapter: BaseOfAdapter | None = None,
        quantisation: Quantisation = Quantisation.NONE,
        linger_s: float = 0.0,
        draft_tokens: int = 0,
    ) -> None:
        refuse_unsupported(config, quantisation, adapter)
        self._config, self._quantisation = config, quantisation
        fields = _language_part(config)  # GPT-2 has its own word for its positions
        positions = int(str(fields.get("max_position_embeddings") or fields.get("n_positions", 0)))
        limit = exact_positions(positions, fields.get("rope_parameters"), str(config.get("model_type")))
        self._context_tokens = context_tokens or limit
        if not 2 <= self._context_tokens <= limit:
            raise ConfigError(f"context_tokens: expected 2 to the model's {limit}, got {context_tokens}")
        self._vocab_count = int(str(fields["vocab_size"]))
        self.version: Version | None = None
        if config.get(ROUTING_KEY) and draft_tokens:
            raise ConfigError(f"worker.draft_tokens: expected 0, as learner.replay_routing is set, got {draft_tokens}")
        self.slot_count, self._gpus = slot_count, tuple(gpus)
        self.draws_by_seed = not draft_tokens  # with drafts, vLLM draws acceptance from its own random generator
        self._llm: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="echo2-vllm-")
        self._outbox = Outbox(linger_s=linger_s)
        self._room = asyncio.Event()
        self._epoch = 0
        self._streams: dict[str, _Stream] = {}
        self._draft_tokens, self._adapter = draft_tokens, adapter
        self._weights = VllmWeights(
            self._rpc,
            str(self._config.get("model_type")),
            None if adapter is None else adapter.spec,
            is_rounded=quantisation is not Quantisation.NONE,
        )
        self._swap_order = asyncio.Lock()
        self._tells_routing, self._routing = bool(config.get(ROUTING_KEY)), RoutingShape(0, 0, 0)
        self._expert_bytes = self._prompt_count = 0  # of a token; of prompts whose experts were asked for
        self._sampled_tokens = 0

    async def start(self) -> None:
        if self._llm is not None:
            raise EngineError("the vLLM engine was started before; make a new one")
        self._outbox.bind(asyncio.get_running_loop(), self._room.set)
        # In threads: starting takes up to minutes, and heartbeats must go on. What is refused comes first.
        await asyncio.to_thread(refuse_on_cpu, self._config)
        adapter = self._adapter
        base = None if adapter is None else await asyncio.to_thread(load_base, adapter.base_path, adapter.spec)
        making = asyncio.ensure_future(asyncio.to_thread(self._make_llm))
        try:
            self._llm = await asyncio.shield(making)
            for answer in await self._rpc("echo2_report_both_logprobs"):
                if answer:
                    raise EngineError(answer.removeprefix("error: "))
            if self._tells_routing:
                self._routing = RoutingShape(*(await self._rpc("echo2_routing_shape"))[0])
                self._expert_bytes = self._routing.routers * self._routing.chosen * expert_dtype(self._routing).itemsize
            if adapter is not None and base is not None:
                await self._weights.lay_base(base.parameters, adapter.spec)
        except BaseException:
            if not making.done():
                _log.info("vLLM is still starting; once it has, its processes are ended")
            with suppress(Exception):
                self._llm = await making
            await self.stop()
            raise

    def _make_llm(self) -> Any:
        for name, value in environment().items():
            os.environ.setdefault(name, value)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            refuse_device(self._quantisation)
        except ImportError as error:
            raise ConfigError(f"the vLLM engine needs the package vllm: {error}") from error
        folder = Path(self._folder.name)
        data: Any = {key: value for key, value in self._config.items() if key not in (CONFIG_KEY, ROUTING_KEY)}
        if data.get("model_type") == "cohere2":  # whose windows vLLM makes longer by one than transformers
            data["sliding_window"] -= 1
        if data.get("model_type") == "deepseek_v3":  # transformers' modules do so whatever the config says, vLLM's ask
            data |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        (folder / "config.json").write_text(json.dumps(data))
        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",  # weights arrive by swap
            max_model_len=self._context_tokens,
            max_num_seqs=self.slot_count,
            gpu_memory_utilization=GPU_MEMORY_SHARE,
            enforce_eager=is_cpu(),
            logprobs_mode="processed_logprobs",
            worker_extension_cls=_EXTENSION,
            disable_log_stats=True,
            tensor_parallel_size=max(1, len(self._gpus)),
            distributed_executor_backend="mp" if len(self._gpus) > 1 else None,
            **self._arguments(),
        )
        try:
            with only_gpus(self._gpus):
                return AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    def _arguments(self) -> dict[str, Any]:
        """vLLM's arguments for rounding, drafting and an adapter. ConfigError if the adapter's rank is too large."""
        arguments: dict[str, Any] = {"dtype": "bfloat16"}
        if self._quantisation is Quantisation.FP8:
            arguments["quantization"] = _FP8
        elif is_cpu():
            arguments["dtype"] = "float32"
        if is_cpu():
            # For latent attention vLLM prefers a kernel that repacks its weights and computes in bf16 alone.
            arguments["attention_backend"] = "CPU_MLA" if self._config.get("kv_lora_rank") else None
        else:
            arguments["moe_backend"] = "triton"  # others repack weights
        if self._tells_routing:
            arguments |= {"additional_config": {ROUTING_KEY: True}, "max_logprobs": -1}
        if self._draft_tokens:
            arguments["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": self._draft_tokens, "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }  # fmt: skip
        if self._adapter is not None:
            wanted = self._adapter.spec.rank
            rank = next((size for size in _LORA_RANKS if size >= wanted), None)
            if rank is None:
                raise ConfigError(f"adapter: expected a rank of at most {_LORA_RANKS[-1]} for vLLM, got {wanted}")
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        return arguments

    async def stop(self) -> None:
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
        self._streams.clear()
        self._outbox.close()
        if self._llm is not None:
            # Its reader of outputs would take the end of vLLM's process for a failure, and log an EngineDeadError.
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.to_thread(self._llm.shutdown)
        self._weights.close()
        self._folder.cleanup()

    def submit(self, request: GenerateRequest) -> None:
        refuse_bad_request(request, self._context_tokens, self._vocab_count)
        stream = _Stream(request)
        if self._tells_routing and not request.token_ids and not self._is_sharing(request):
            self._prompt_count += 1
            stream.prompt_file = Path(self._folder.name, f"prompt-{self._prompt_count}")
        stream.parameters = self._parameters(stream)
        self._outbox.open(request.request_id)
        self._streams[request.request_id] = stream
        if self.version is not None:
            self._begin(stream)

    async def next_chunks(self) -> Sequence[TokenChunk]:
        return await self._outbox.take()

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None or stream.is_aborted:
            return
        stream.is_aborted = True
        if stream.task is None:  # no version yet
            self._end(stream, FinishReason.ABORTED)
        elif stream.is_known:  # else its task aborts it as soon as vLLM has accepted it
            await self._llm.abort(request_id)

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        async with self._swap_order:
            if staged.parent is not None and staged.parent != self.version:
                raise EngineError(
                    f"version {staged.version}: expected a change of live version {self.version}, got {staged.parent}"
                )
            await self._weights.stage(staged)
            try:
                stood_still_s = await self._apply(staged.version, mode)
            except EngineError:
                raise
            except Exception as error:  # anything, where vLLM's process has ended
                raise EngineError(f"vLLM failed in the swap to version {staged.version}: {error!r}") from error
            await self._weights.settle(is_kept=True)
        for stream in list(self._streams.values()):
            if stream.task is None:
                self._begin(stream)
        return stood_still_s

    async def fingerprint(self, key: int) -> int:
        return await self._weights.fingerprint(key)

    def stats(self) -> EngineStats:
        running = sum(stream.count > 0 for stream in self._streams.values())
        return EngineStats(running, len(self._streams) - running, self._sampled_tokens)

    async def _apply(self, version: Version, mode: SwapMode) -> float:
        waits, began = mode is SwapMode.FINISH_FIRST, time.monotonic()
        await self._llm.pause_generation(mode="wait" if waits else "keep", clear_cache=mode is not SwapMode.KEEP_KV)
        began = time.monotonic() if waits else began
        try:
            await self._weights.apply()
            try:
                await self._llm.update_weight_version(str(version))
            except Exception:
                await self._weights.settle(is_kept=False)
                raise
            self.version = version
            self._epoch += 1
        finally:
            await self._llm.resume_generation()
        return time.monotonic() - began

    async def _rpc(self, method: str, *arguments: object) -> list[Any]:
        try:
            return list(await self._llm.collective_rpc(method, timeout=APPLY_TIMEOUT_S, args=arguments))
        except Exception as error:
            raise EngineError(f"vLLM failed in {method}: {error}") from error

    def _begin(self, stream: _Stream) -> None:
        stream.task = asyncio.create_task(self._follow(stream))

    async def _follow(self, stream: _Stream) -> None:
        request = stream.request
        tokens = [*request.prompt_token_ids, *request.token_ids]
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"echo2-{self._epoch}"}
        reason = FinishReason.ABORTED
        try:
            outputs = await self._llm.add_request(
                request.request_id, prompt, stream.parameters, lora_request=self._lora_request()
            )
            stream.is_known = True
            if stream.is_aborted:
                await self._llm.abort(request.request_id)
            is_finished = False
            while not is_finished:
                output = outputs.get_nowait() or await outputs.get()
                completion, is_finished = output.outputs[0], output.finished
                self._put(stream, completion)
                if is_finished:
                    reason = _REASONS.get(completion.finish_reason, FinishReason.ABORTED)
                while self._outbox.is_full:
                    self._room.clear()
                    await self._room.wait()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM may raise anything; the consumer must hear of it
            self._outbox.close(EngineError(f"request {request.request_id}: vLLM failed: {error!r}"))
        self._end(stream, reason)

    def _is_sharing(self, request: GenerateRequest) -> bool:
        """Whether another of its group is at work: one of a group tells its prompt's experts."""
        return any(each.request.prefix_key == request.prefix_key for each in self._streams.values())

    def _put(self, stream: _Stream, completion: Any) -> None:
        versions = self._versions(stream, completion)
        is_greedy = stream.request.sampling.temperature == 0.0
        draws: list[list[float]] = []
        if completion.token_ids:
            flat = completion.logprobs
            draws = [flat.logprobs[begin:end] for begin, end in zip(flat.start_indices, flat.end_indices, strict=True)]
        routing = self._routing_of(stream, [values[2:] for values in draws])
        sampled = []
        for token_id, values, version, rows in zip(completion.token_ids, draws, versions, routing, strict=True):
            raw, logprob = min(values[1], 0.0), 0.0 if is_greedy else min(values[0], 0.0)
            sampled.append(
                SampledToken(stream.request.request_id, version, FinishReason.UNFINISHED, token_id, logprob, raw, rows)
            )
        stream.count += len(sampled)
        self._sampled_tokens += len(sampled)
        self._outbox.put(sampled)

    def _routing_of(self, stream: _Stream, numbers: list[list[float]]) -> list[Routing]:
        """The routing of a sequence's new tokens, from the numbers of three bytes that vLLM's process sent with each."""
        shape, prompt, path = self._routing, b"", stream.prompt_file
        size = self._expert_bytes
        if stream.count == 0 and path is not None and path.exists():
            raw = path.read_bytes()
            is_whole = len(raw) == size * (len(stream.request.prompt_token_ids) - 1)
            prompt = routing_rows(raw, shape) if raw and is_whole else b""
        each = (b"".join(int(number).to_bytes(3, "little") for number in row)[:size] for row in numbers)
        rows = [routing_rows(raw, shape) if raw else b"" for raw in each]
        return [Routing(prompt if at == 0 else b"", row) for at, row in enumerate(rows)]

    def _versions(self, stream: _Stream, completion: Any) -> list[Version]:
        """The version of each new token, from the version labels that vLLM keeps per sequence."""
        new = range(stream.count, stream.count + len(completion.token_ids))
        if not new:
            return []
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            processor = self._llm.output_processor
            (internal_id,) = processor.external_req_ids[stream.request.request_id]
            state = processor.request_states[internal_id]
            # Else vLLM holds those of all tokens to the end.
            state.logprobs_processor.logprobs = type(completion.logprobs)()
            starts = state.weight_version_starts
        return [Version(int([name for name, start in starts if start <= at][-1])) for at in new]

    def _end(self, stream: _Stream, reason: FinishReason) -> None:
        request_id = stream.request.request_id
        self._streams.pop(request_id, None)
        if stream.prompt_file is not None:
            stream.prompt_file.unlink(missing_ok=True)
        self._outbox.put([SampledToken(request_id, self.version or Version(0), reason)])

    def _lora_request(self) -> Any:
        """vLLM's reference to the adapter that the extension has registered; None without one. vLLM never reads its path."""
        if self._adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", ADAPTER_ID, "/in/memory")

    def _parameters(self, stream: _Stream) -> Any:
        """Raises EngineError for what vLLM refuses or changes, such as a temperature below 0.01."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, sampling = stream.request, stream.request.sampling
        prompt_file = {} if stream.prompt_file is None else {PROMPT_FILE: str(stream.prompt_file)}
        length = len(request.prompt_token_ids) + len(request.token_ids)
        try:
            parameters = VllmSamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=min(sampling.max_new_tokens - len(request.token_ids), self._context_tokens - length),
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                # With drafts, a continuation starts a new random stream: vLLM's cannot be entered in the middle.
                seed=derived_seed(sampling.seed, request.request_id, len(request.token_ids))
                if self._draft_tokens
                else None,
                extra_args={STREAM: sampling.seed, POSITION: len(request.token_ids)} | prompt_file,
                # beside the token's own: the raw one, and experts, three bytes each
                logprobs=1 - (-self._expert_bytes // 3),
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except Exception as error:
            raise EngineError(f"request {request.request_id}: vLLM refuses it: {error}") from error
        if parameters.temperature != sampling.temperature:
            text = f"expected a temperature that vLLM keeps, got {sampling.temperature}, for which it takes"
            raise EngineError(f"request {request.request_id}: {text} {parameters.temperature}")
        return parameters


def make(config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]) -> VllmEngine:
    adapter = adapter_spec(config)
    return VllmEngine(
        config,
        slot_count=fit.sequences,
        context_tokens=fit.sequence_tokens,
        gpus=gpus,
        quantisation=Quantisation(options.config.worker.quantisation),
        linger_s=LINGER_S,
        draft_tokens=options.config.worker.draft_tokens,
        adapter=None if adapter is None else BaseOfAdapter(adapter, options.config.model.path),
    )
