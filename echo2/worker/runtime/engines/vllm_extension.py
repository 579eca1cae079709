"""Runs inside vLLM's worker process: the weight map, updates in place, the fingerprint, both log-probabilities, draws by the
leases' seeds, scores under former weights.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by collective RPC. Importing this
module stops vLLM's CPU backend from packing linear weights, since a packed copy would go on computing with the old weights; so it
must be imported before the model is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as vllm_ops
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from echo2.base.errors import EchoError, EngineError
from echo2.base.noise import uniform
from echo2.base.rollout import SamplingParams
from echo2.worker.runtime.engines import vllm_scoring
from echo2.worker.runtime.engines.rounded_map import RoundedMap
from echo2.worker.runtime.engines.vllm_adapter import map_adapter, without_adapters
from echo2.worker.runtime.engines.vllm_rounding import map_rounded, rounded_layers
from echo2.worker.runtime.engines.vllm_weights import POSITION, STREAM, Entry, read_patches
from echo2.worker.runtime.engines.weight_map import WeightMap, record_map

vllm_ops._supports_onednn = False

RAW_LOGPROB_ID = -1
"""Marks, in place of a token id, the entry with the raw model's log-probability of the sampled token."""

SUMS_MAX = 1 << 24
"""Cumulative probabilities held at a time: 128 MiB that vLLM's memory planning does not include."""
_BACKENDS_AS_LOADED = ("TRITON", "BATCHED_TRITON")
_NUMBERS_EXACT_MAX = 1 << 24  # float32 represents all integers up to here

Shapes = list[tuple[str, list[int]]]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Replaces vLLM's function of this name, which repeats per-sequence values for each drafted token.

    vLLM's CPU kernel writes to a copy, so that drafts would be verified with uninitialised temperature and top-k.
    """
    counts = torch.diff(cu_num_tokens, prepend=torch.zeros_like(cu_num_tokens[:1]))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


_top_k_top_p = rejection_sampler.apply_top_k_top_p


def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Replaces vLLM's function of this name, whose CPU path fails if no token of a batch was drafted."""
    return _top_k_top_p(logits, k, p) if len(logits) else logits


if not torch.cuda.is_available():
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


class SeededDraws(torch.nn.Module):
    """Replaces vLLM's draw from filtered logits: the random number of each position (base/noise) determines its token. So tokens do
    not depend on the rest of the batch, and a sequence that another worker continues keeps its random stream."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._runner = model_runner

    def forward(
        self, logits: torch.Tensor, generators: object, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn token of each row, and the log-probabilities of the sampling distribution [rows, vocabulary], float32."""
        logprobs = _top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        numbers = torch.tensor(self._numbers(len(logits)), dtype=torch.float64, device=logits.device)
        rows = max(1, SUMS_MAX // logits.shape[-1])
        parts = zip(torch.split(logprobs, rows), torch.split(numbers, rows), strict=True)
        return torch.cat([_picked(*part) for part in parts]), logprobs

    def _numbers(self, count: int) -> list[float]:
        states = (self._runner.requests[request_id] for request_id in self._runner.input_batch.req_ids[:count])
        return [uniform(*place_of(state.sampling_params.extra_args, len(state.output_token_ids))) for state in states]


def place_of(told: dict[str, int], sampled_tokens: int) -> tuple[int, int]:
    """The random stream of a request, and the position in it of the token that it draws next."""
    return told[STREAM], told[POSITION] + sampled_tokens


def _picked(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    sums = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    picked = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    return picked.clamp_(max=logprobs.shape[-1] - 1)[:, 0]


class SamplerOfBoth(Sampler):  # type: ignore[misc]
    """vLLM's sampler, except that it reports the token's raw log-probability in place of the likeliest alternative's."""

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raw = self.compute_logprobs(logits)
        output = super().forward(logits, *args, **kwargs)
        _report_raw(output.logprobs_tensors, raw, output.sampled_token_ids[:, :1].long())
        return output


class RejectionSamplerOfBoth(RejectionSampler):  # type: ignore[misc]
    """As SamplerOfBoth, for vLLM's sampler of drafted tokens."""

    def _get_logprobs_tensors(
        self, count: int, metadata: Any, logits: torch.Tensor, target: Any, bonus: Any, sampled: torch.Tensor
    ) -> Any:
        reported = super()._get_logprobs_tensors(count, metadata, logits, target, bonus, sampled)
        # Each sequence's rows of logits are consecutive: one per drafted token and one more. vLLM drops rejected tokens
        # later, so their entries do not matter.
        first = torch.zeros_like(metadata.cu_num_sampled_tokens)
        first[1:] = metadata.cu_num_sampled_tokens[:-1]
        rows = (first[:, None] + torch.arange(sampled.shape[1], device=first.device)).flatten()
        raw = self.sampler.compute_logprobs(logits[rows.clamp_(max=len(logits) - 1)])
        _report_raw(reported, raw, sampled.flatten().clamp(min=0)[:, None].long())
        return reported


def _report_raw(reported: Any, raw: torch.Tensor, sampled: torch.Tensor) -> None:
    """Puts the raw log-probability of each sampled token into the second entry of its row, if there is one."""
    if reported is None or reported.logprob_token_ids.ndim != 2 or reported.logprobs.shape[1] < 2:
        return
    reported.logprob_token_ids[:, 1] = RAW_LOGPROB_ID
    reported.logprobs[:, 1] = raw.gather(1, sampled)[:, 0]


class WorkerExtension:
    """The methods that the engine calls in each of vLLM's processes. They return errors as a text `error: ...`, because exceptions
    lose their class on the way."""

    _echo2_map: WeightMap | RoundedMap | None = None  # of the published tensors
    _echo2_base: WeightMap | RoundedMap | None = None  # of an adapter's base model
    model_runner: Any

    def echo2_report_both_logprobs(self) -> str:
        """Makes vLLM report the sampling and the raw log-probability of each sampled token and, without drafting, draw by seeds."""
        sampler = self.model_runner.sampler
        if type(sampler) is not Sampler:
            return f"error: expected the sampler {Sampler.__name__}, got {type(sampler).__name__}"
        self.model_runner.sampler = SamplerOfBoth(logprobs_mode="processed_logprobs")
        drafts = getattr(self.model_runner, "rejection_sampler", None)
        if drafts is None:
            self.model_runner.sampler.topk_topp_sampler = SeededDraws(self.model_runner)
            return ""
        if type(drafts) is not RejectionSampler:
            return f"error: expected the sampler {RejectionSampler.__name__}, got {type(drafts).__name__}"
        self.model_runner.rejection_sampler = RejectionSamplerOfBoth(
            self.model_runner.sampler, self.model_runner.speculative_config, self.model_runner.device
        )
        return ""

    def echo2_map(self, shapes: Shapes, is_base: bool) -> Any:
        """Builds the map for whole weights of these names and shapes; returns which of their elements are here (`covers`)."""
        try:
            model = self.model_runner.model
            found: WeightMap | RoundedMap
            with without_adapters(model):
                if layers := rounded_layers(model):
                    found = map_rounded(model, _shapes(shapes), layers)
                else:
                    found = record_map(model.load_weights, _shapes(shapes), model, _expert_orders(model))
        except EchoError as error:
            return f"error: {error}"
        self._echo2_base, self._echo2_map = (found, self._echo2_map) if is_base else (self._echo2_base, found)
        return found.covers()

    def echo2_map_adapter(self, shapes: Shapes, factor: float) -> Any:
        """Builds the map for an adapter's tensors and activates the adapter; returns which elements are here (`covers`)."""
        try:
            self._echo2_map = map_adapter(self.model_runner, _shapes(shapes), factor)
        except EchoError as error:
            return f"error: {error}"
        return self._echo2_map.covers()

    def echo2_apply(self, path: str, entries: list[Entry], is_base: bool, goes_on: bool) -> str:
        """Applies the patches in the file; `echo2_settle` must follow. `goes_on`: they continue the previous call's update."""
        held = self._echo2_base if is_base else self._echo2_map
        if held is None:
            return "error: expected a keyframe first, got a change"
        try:
            held.apply(read_patches(Path(path), entries), goes_on=goes_on)
        except EchoError as error:
            return f"error: {error}"
        return ""

    def echo2_follow(self) -> str:
        """Rounds again the layers that the last update touched; `echo2_settle` must follow."""
        if not isinstance(self._echo2_map, RoundedMap):
            return "error: expected layers that vLLM rounds, got none"
        try:
            self._echo2_map.follow()
        except (EchoError, RuntimeError) as error:  # torch raises RuntimeError if memory is short
            return f"error: rounding anew: {error}"
        return ""

    def echo2_settle(self, is_kept: bool, is_base: bool, replaced: int | None) -> list[int]:
        """Ends an update: puts the old values back because a process failed (not `is_kept`), keeps them as version `replaced`, or
        drops them (None). Returns the former versions that are kept."""
        held = self._echo2_base if is_base else self._echo2_map
        if held is None:
            return []
        held.settle(is_kept=is_kept, replaced=replaced)
        return held.former_versions

    def echo2_why_not_scoring(self) -> str:
        """Why this model cannot score; empty: it can."""
        return vllm_scoring.why_not_scoring(self.model_runner)

    def echo2_score(
        self, token_ids: list[int], places: list[tuple[int, int, int]], live: int, sampling: dict[str, Any]
    ) -> Any:
        """The columns of `TokenScores` for each of `places` (version, first token, stop); an empty list on a rank without logits.

        Scores from the newest version to the oldest, so that each change is applied only twice, once in each direction.
        """
        found: list[Any] = [None] * len(places)
        drawn = SamplingParams(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])})
        try:
            if not isinstance(self._echo2_map, WeightMap):
                raise EngineError("expected a keyframe of weights that are not rounded first, got tokens to score")
            with self._echo2_map.walking(live) as go_to:
                for number, (version, first, stop) in sorted(enumerate(places), key=lambda one: -one[1][0]):
                    go_to(version)
                    found[number] = vllm_scoring.scores(self.model_runner, token_ids, first, stop, drawn)
        except (EchoError, RuntimeError) as error:  # torch raises RuntimeError if memory is short
            return f"error: {error}"
        return [[column.tolist() for column in one.columns] for one in found if one is not None]

    def echo2_sums(self, key: int, is_base: bool) -> Any:
        """The terms that the tensors held here contribute to the keyed fingerprint."""
        held = self._echo2_base if is_base else self._echo2_map
        return (
            "error: expected a keyframe first, got a question for the fingerprint" if held is None else held.sums(key)
        )


def _shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes}


def _expert_orders(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """How experts' kernels order their weights, by storage address; EngineError for kernels that change them in other ways.

    The CPU kernel stores a packed permutation under the parameter's old shape. Packing the numbers 0, 1, 2... reveals it.
    """
    orders: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if backend is None or backend in _BACKENDS_AS_LOADED:
            continue
        experts = getattr(method, "experts_cls", None)
        if backend != "CPU" or experts is None:
            raise EngineError(
                f"{name}: expected experts on {', '.join(_BACKENDS_AS_LOADED)} or CPU, got {backend}, which changes "
                "weights after loading"
            )
        for parameter in (module.w13_weight, module.w2_weight):
            orders[parameter.untyped_storage().data_ptr()] = _packed_order(name, parameter, experts.isa)
    return orders


def _packed_order(name: str, parameter: torch.Tensor, isa: str) -> torch.Tensor:
    count = parameter.numel()
    if count > _NUMBERS_EXACT_MAX:
        raise EngineError(f"{name}: expected at most {_NUMBERS_EXACT_MAX} packed weights, got {count}")
    numbers = torch.arange(count, dtype=torch.float32).reshape(parameter.shape)
    packed = vllm_ops.cpu_prepack_moe_weight(numbers, isa).reshape(-1).long()
    if not torch.equal(packed.sort().values, torch.arange(count)):
        raise EngineError(f"{name}: expected a kernel that packs weights without changing them, got {isa}")
    order = torch.empty(count, dtype=torch.int64)
    order[packed] = torch.arange(count)
    return order
