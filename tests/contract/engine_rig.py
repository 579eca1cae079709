"""What the engine contract needs: tiny models in several versions, their updates, and a Hugging Face judge."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.worker.engines.embedded.slots import BLOCK_TOKENS, BlockPool
from echo2.worker.engines.engine import Engine, GenerateRequest, SwapMode, TokenChunk
from tests.loops import OwnLoop, Scene, T
from tests.patience import WAIT_S

VOCAB_COUNT = 96
CONTEXT_TOKENS = 256
VERSION_COUNT = 3

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
OTHERS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "sliding_window": 40, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    },
}  # fmt: skip
"""What architectures have that the fused path of the embedded engine does not know."""


def tiny_config(model_type: str, **more: object) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": model_type,
        "architectures": [ARCHITECTURES.get(model_type, "")],
        "vocab_size": VOCAB_COUNT,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": model_type == "qwen3",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config | OTHERS.get(model_type, {}) | more


def make_versions(config: dict[str, object]) -> list[torch.nn.Module]:
    """Policies that are exactly bf16: a base, and versions that each change about 2 % of the one before."""
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
    for parameter in base.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    versions = [base]
    for _ in range(1, VERSION_COUNT):
        newer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
        for old, new in zip(versions[-1].parameters(), newer.parameters(), strict=True):
            changed = torch.rand_like(old) < 0.02
            new.data = torch.where(changed, old.data + 0.2 * torch.randn_like(old), old.data).bfloat16().float()
        versions.append(newer)
    return versions


@dataclass(frozen=True)
class Staged:
    """A staged version made by hand."""

    version: Version
    parent: Version | None
    tensors: Sequence[TensorUpdate]

    def updates(self) -> Iterator[TensorUpdate]:
        return iter(self.tensors)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)


Weights = torch.nn.Module | Mapping[str, torch.Tensor]


def _named(weights: Weights) -> dict[str, torch.Tensor]:
    return dict(weights.named_parameters() if isinstance(weights, torch.nn.Module) else weights)


def keyframe_of(weights: Weights, version: int) -> Staged:
    updates = [TensorUpdate(n, "bfloat16", tuple(t.shape), None, bits_of(t)) for n, t in _named(weights).items()]
    return Staged(Version(version), None, updates)


def fp8_rows(master_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in e4m3 and a scale a row [R, 1], as vLLM rounds while it loads (`fp8_per_channel`): the reference on a CPU."""
    most = torch.tensor(torch.finfo(torch.float8_e4m3fn).max)
    scales = (master_RC.abs().amax(1, keepdim=True).float() / most).clamp_min(1.0 / (most * 512))
    return (master_RC / scales).clamp_(-most, most).to(torch.float8_e4m3fn), scales


def rounded_to_fp8(model: torch.nn.Module) -> torch.nn.Module:
    """The same with the matrices of its layers in fp8; token embeddings and head stay."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, scales = fp8_rows(module.weight.detach().bfloat16())
            module.weight = torch.nn.Parameter(codes.to(module.weight.dtype) * scales)
    return model


def delta_of(old: Weights, new: Weights, parent: int, version: int) -> Staged:
    updates, before = [], _named(old)
    for name, tensor in _named(new).items():
        old_bits, new_bits = bits_of(before[name]), bits_of(tensor)
        places = np.flatnonzero(old_bits != new_bits).astype(np.int64)
        updates.append(TensorUpdate(name, "bfloat16", tuple(tensor.shape), places, new_bits[places]))
    return Staged(Version(version), Version(parent), updates)


@dataclass
class Collected:
    """All that came of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.UNFINISHED


async def generated(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, list[TokenChunk]]:
    """All chunks of each request, until all have ended."""
    chunks: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    open_ones = set(chunks)
    while open_ones:
        for chunk in await engine.next_chunks():
            chunks[chunk.request_id].append(chunk)
            if chunk.finish_reason is not FinishReason.UNFINISHED:
                open_ones.discard(chunk.request_id)
    return chunks


def raw_logprobs(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [completion, vocabulary] by the Hugging Face forward over all tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)


class Rig(OwnLoop):
    """One engine on one event loop, kept for all tests of a module; every test begins with version 0."""

    def __init__(
        self,
        kind: str,
        config: dict[str, object],
        make: Callable[[dict[str, object]], Engine],
        as_served: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    ) -> None:
        """`as_served`: what the engine makes of a version, such as rounded weights."""
        self.kind, self.config, self.models = kind, config, make_versions(config)
        self._judges = [as_served(copy.deepcopy(model).double()) for model in self.models]
        for judge in self._judges:
            judge.set_experts_implementation("eager")  # the faster ways know no float64
        self._runner = asyncio.Runner()
        self._collected: dict[str, Collected] = {}
        self._news = asyncio.Event()
        self._count = 0

        async def begin() -> Engine:
            engine = make(config)
            await engine.start()
            self._pump = asyncio.create_task(self._consume(engine))
            return engine

        self.engine = self._runner.run(begin())

    def close(self) -> None:
        async def end() -> None:
            await asyncio.wait_for(self.engine.stop(), WAIT_S)
            await asyncio.wait_for(self._pump, WAIT_S)

        self._runner.run(end())
        self._runner.close()

    def run(self, scene: Scene[T]) -> T:
        """Runs a test with version 0 live and no sequence left over."""

        async def whole() -> T:
            await self.engine.swap(self.keyframe(0), SwapMode.RECOMPUTE_KV)
            return await scene()

        return self._runner.run(asyncio.wait_for(whole(), WAIT_S))

    def published(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().bfloat16() for name, tensor in self.models[version].named_parameters()}

    def keyframe(self, version: int) -> Staged:
        return keyframe_of(self.models[version], version)

    def delta(self, version: int) -> Staged:
        return delta_of(self.models[version - 1], self.models[version], version - 1, version)

    def request(
        self, prompt: Sequence[int], sampling: SamplingParams, *, done: Sequence[int] = (), prefix: str | None = None
    ) -> GenerateRequest:
        self._count += 1
        request_id = f"r{self._count}"
        return GenerateRequest(request_id, tuple(prompt), tuple(done), sampling, prefix or request_id)

    def submit(self, request: GenerateRequest) -> Collected:
        self.engine.submit(request)
        self._collected[request.request_id] = Collected()
        return self._collected[request.request_id]

    async def wait(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._news.clear()
            await self._news.wait()

    async def finish(self, *sequences: Collected) -> None:
        await self.wait(lambda: all(s.finish_reason is not FinishReason.UNFINISHED for s in sequences))

    async def generate(self, *requests: GenerateRequest) -> list[Collected]:
        sequences = [self.submit(request) for request in requests]
        await self.finish(*sequences)
        return sequences

    def raw_logprobs(self, version: int, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """Those of the version's judge, in float64."""
        return raw_logprobs(self._judges[version], prompt, completion)

    def worst(self, prompt: Sequence[int], sequence: Collected, done: Sequence[int] = ()) -> float:
        """The largest error of the raw log-probabilities, each token judged under the version that it claims."""
        errors = []
        whole = [*done, *sequence.token_ids]
        for version in set(sequence.versions):
            judged = self.raw_logprobs(version, prompt, whole)[len(done) :]
            for at, claimed in enumerate(sequence.versions):
                if claimed == version:
                    errors.append(abs(float(judged[at, sequence.token_ids[at]]) - sequence.raw_logprobs[at]))
        return max(errors)

    async def _consume(self, engine: Engine) -> None:
        while chunks := await engine.next_chunks():
            for chunk in chunks:
                assert chunk.request_id in self._collected, f"{chunk.request_id}: a chunk after the last"
                sequence = self._collected[chunk.request_id]
                sequence.token_ids += chunk.token_ids
                sequence.logprobs += chunk.logprobs
                sequence.raw_logprobs += chunk.raw_logprobs
                sequence.versions += [chunk.version] * len(chunk.token_ids)
                sequence.finish_reason = chunk.finish_reason
                if chunk.finish_reason is not FinishReason.UNFINISHED:
                    del self._collected[chunk.request_id]
            self._news.set()


async def refused(call: Awaitable[object], error: type[Exception]) -> str:
    """The message with which `call` failed."""
    try:
        await call
    except error as refusal:
        return str(refusal)
    raise AssertionError(f"expected {error.__name__}, got no error")


def full_blocks(slot_count: int, context_tokens: int) -> BlockPool:
    """A cache in which every slot holds all of its blocks, in an order that is not that of their numbers."""
    blocks = BlockPool(slot_count, context_tokens)
    for tokens in range(BLOCK_TOKENS, context_tokens + BLOCK_TOKENS, BLOCK_TOKENS):
        for slot in reversed(range(slot_count)):
            assert blocks.reserve(slot, min(tokens, context_tokens))
    return blocks
