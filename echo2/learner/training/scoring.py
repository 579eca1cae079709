"""The model's own log-probabilities of tokens, by a forward pass over one sequence at a time: what an audit compares claims with,
and what the layout in rows and the faster attention are tried against before the first step.

Guarantees: scores are computed with exactly the published weights; `KeptVersions` holds at most `versions_max` versions, and
changes of at most BYTES_MAX_OF_MODEL times a version's bytes; at most `CHUNK_LOGITS` logits exist at a time; a model whose
rows do not give the log-probabilities of its own forward pass is refused; FlexAttention is used only if it agrees with a dense mask
and has a finite gradient.

Published versions are kept as the newest one plus the changes between versions, and loaded into a model one at a time. Each costs
the positions and bits of its changed weights: 6 bytes per changed bf16 weight (2 bytes per weight of the tensor if more than a
third changed); with 8 billion weights of which 2 % change, 1 GB per version. The model is the one that trains, between two steps,
or a separate copy (with a user's own trainer). Do not score while a step runs on the trainer's thread, nor on the event loop's.

Shapes: T tokens scored, V vocabulary, X hidden size or vocabulary, C columns of `TokenScores`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import DynamicCache

from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Passage
from echo2.learner.bets import FLOOR_NATS, Piece, TokenScores
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.training.model import Policy, PolicyModel, backbone, published_name, reshard
from echo2.learner.training.packing import (
    BLOCK,
    Attention,
    PackedInputs,
    PackingLimits,
    collate,
    lengths_of,
    plan_microbatches,
)
from echo2.learner.training.ranks import Ranks, own_part
from echo2.weights.elements import published_tensors

_log = logging.getLogger("echo2.learner")

# ---- one sequence under the weights as they are

CHUNK_LOGITS = 1 << 25  # logits per chunk: their softmax and sorting take about ten times as many bytes
GREEDY_NATS = 1.0
"""How far below the likeliest token a greedy one may be: at another precision, an engine may pick a nearly equal one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Scores the last `count` of `token_ids`; the very last token is only a target, not an input. `numbers`: the random numbers of
    the scored tokens. `begin`: earlier tokens that are already in the KV cache. `keeps`: keep the cache, because a later reading
    may continue this one."""

    token_ids: tuple[int, ...]
    count: int
    sampling: SamplingParams
    numbers: tuple[float, ...]
    begin: int = 0
    keeps: bool = False


READINGS = TypeAdapter(list[Reading])  # as JSON, on their way to the other ranks


@functools.cache
def cache_name() -> str:
    """Name of the KV cache in the arguments and outputs of transformers models: `past_key_values` until version 5.24."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def columns_of(reading: Reading, policy: Policy, past: DynamicCache | None = None) -> Tensor:
    """Returns columns_CT, float64 on the host. Call it through `policy`, which gathers the ranks' rows. `past`: the KV cache to
    continue and fill; None if no cache is needed."""
    hf_model, count = policy.hf_model, reading.count
    embedding = hf_model.get_input_embeddings().weight
    tokens = torch.tensor(reading.token_ids, device=embedding.device)
    numbers_T = torch.tensor(reading.numbers, dtype=torch.float64, device=embedding.device)
    arguments = {"input_ids": tokens[None, :-1], "use_cache": past is not None}
    arguments |= {cache_name(): past} if past is not None else {}
    logits_of: Callable[[Tensor], Tensor] = policy.head
    if policy.slices_head:
        rows_TX = backbone(hf_model)(**arguments)[0][0, -count:]
    else:
        rows_TX, logits_of = hf_model(**arguments, logits_to_keep=count).logits[0], lambda rows_TV: rows_TV
    rows_at_once = max(1, CHUNK_LOGITS // int(embedding.shape[0]))
    splits = (torch.split(part, rows_at_once) for part in (rows_TX, tokens[-count:], numbers_T))
    parts = [
        chunk_scores(logits_of(rows), targets, numbers, reading.sampling)
        for rows, targets, numbers in zip(*splits, strict=True)
    ]
    return torch.stack([torch.cat(column).double().cpu() for column in zip(*parts, strict=True)])


def chunk_scores(
    logits_CV: Tensor, targets_C: Tensor, numbers_C: Tensor, sampling: SamplingParams
) -> tuple[Tensor, ...]:
    """The columns of `TokenScores` for some rows of logits."""
    if sampling.temperature == 0:
        return _greedy_scores(logits_CV, targets_C)
    plain_CV = (logits_CV.float() / sampling.temperature).log_softmax(-1)
    drawn_CV = _filtered(plain_CV, sampling) if sampling.is_filtered else plain_CV
    drawn_C = drawn_CV.gather(-1, targets_C[:, None])[:, 0]
    trained_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    if sampling.is_filtered and sampling.temperature != 1.0:  # a token at the filter's edge counts as kept
        passed_C = torch.where(drawn_CV.isinf(), -torch.inf, plain_CV).logsumexp(-1)
        trained_C = trained_C - passed_C
    probabilities_CV = drawn_CV.exp()
    expected_C = (probabilities_CV * drawn_CV.clamp(min=FLOOR_NATS)).sum(-1)
    sums_CV = probabilities_CV.cumsum(-1, dtype=torch.float64)
    sums_CV /= sums_CV[:, -1:].clone()
    picked_C1 = torch.searchsorted(sums_CV, numbers_C[:, None], right=True).clamp_(max=logits_CV.shape[-1] - 1)
    squares_CV = probabilities_CV.double().square().cumsum(-1)
    edges_C2 = torch.cat([picked_C1 - 1, picked_C1], -1)
    at_C2, is_inner_C2 = edges_C2.clamp(min=0), edges_C2 >= 0
    cumulative_C2 = torch.where(is_inner_C2, sums_CV.gather(-1, at_C2), 0.0)
    below_C2 = torch.where(is_inner_C2, squares_CV.gather(-1, at_C2), 0.0)
    above_C2 = squares_CV[:, -1:] - below_C2
    spread_C2 = ((1.0 - cumulative_C2).square() * below_C2 + cumulative_C2.square() * above_C2).sqrt()
    picked_C = picked_C1[:, 0] == targets_C
    edges = (*cumulative_C2.unbind(-1), *spread_C2.unbind(-1))
    return trained_C, drawn_C.clamp(min=2 * FLOOR_NATS), expected_C, picked_C, *edges


def _greedy_scores(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Scores of greedy completions: the claimed number is the raw model's, and a token that is further below the
    likeliest than engines differ counts as impossible, and as one that no number picks."""
    plain_CV = logits_CV.float().log_softmax(-1)
    plain_C = plain_CV.gather(-1, targets_C[:, None])[:, 0]
    picked_C = plain_CV.amax(-1) - plain_C <= GREEDY_NATS
    drawn_C, no_C = torch.where(picked_C, 0.0, FLOOR_NATS), torch.zeros_like(plain_C)
    return plain_C, drawn_C, no_C, picked_C, no_C, no_C + 1.0, no_C, no_C


def _filtered(logprobs_CV: Tensor, sampling: SamplingParams) -> Tensor:
    """Applies top-k, then top-p, like the embedded engine: cut tokens get minus infinity, the rest is renormalised."""
    kept_CV = logprobs_CV
    if 0 < sampling.top_k < kept_CV.shape[-1]:
        threshold_C = torch.topk(kept_CV, sampling.top_k).values[:, -1:]
        kept_CV = kept_CV.masked_fill(kept_CV < threshold_C, -torch.inf)
    if sampling.top_p < 1.0:
        ordered_CV, order_CV = torch.sort(kept_CV, descending=True, stable=True)
        odds_CV = torch.softmax(ordered_CV, dim=-1, dtype=torch.float64)
        before_CV = odds_CV.cumsum(dim=-1) - odds_CV
        cut_CV = torch.zeros_like(kept_CV, dtype=torch.bool).scatter(-1, order_CV, before_CV >= sampling.top_p)
        kept_CV = kept_CV.masked_fill(cut_CV, -torch.inf)
    return kept_CV.log_softmax(-1)


# ---- published versions

BYTES_MAX_OF_MODEL = 2.0  # limit for all changes together, in bytes per byte of a published version
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one tensor between two versions. `bits`: XOR of the values at the flat positions `places` (None: all), so it
    applies in both directions."""

    places: Tensor | None
    bits: Tensor

    @property
    def size(self) -> int:
        return self.bits.nbytes + (self.places.nbytes if self.places is not None else 0)

    def turn(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Turns one version's values into the other's, in place. `dtype`: the published dtype."""
        flat, bits = parameter.view(-1), self.bits.to(parameter.device)
        places = None if self.places is None else self.places.to(parameter.device).long()
        old = flat if places is None else flat[places]
        new = (old.to(dtype).view(bits.dtype) ^ bits).view(dtype).to(flat.dtype)
        if places is None:
            flat.copy_(new)
        else:
            flat[places] = new


def rows_by_name(hf_model: Any) -> dict[str, Tensor]:
    """This rank's rows of a model's tensors, under both their own and their published names: an adapter's differ."""
    tensors = {name: own_part(tensor.detach()) for name, tensor in published_tensors(hf_model).items()}
    return tensors | {published_name(name): rows for name, rows in tensors.items()}


class KeptVersions:
    """Keeps the newest published versions and loads them into `rows`: a model's parameters, or this rank's rows of them. `keep`
    may be called from a different thread. With several ranks, rank 0 (`is_leader`) decides which versions to forget."""

    def __init__(self, rows: Mapping[str, Tensor], versions_max: int, *, is_leader: bool = True):
        assert versions_max >= 1, "at least one version is kept"
        self._versions_max = versions_max
        self._rows = dict(rows)
        self._is_leader = is_leader
        self._lock = threading.RLock()
        self._changes: dict[Version, dict[str, _Change]] = {}  # from the previous version
        self._order: list[Version] = []
        self._newest: dict[str, Tensor] = {}
        self._loaded: Version | None = None

    @property
    def versions(self) -> list[Version]:
        with self._lock:
            return list(self._order)

    @property
    def held_bytes(self) -> int:
        return sum(change.size for changes in self._changes.values() for change in changes.values())

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a version; ignores one that is not newer. `tensors`: its published weights, this rank's rows, never changed in
        place. Raises `StateError` for tensors that the model does not have."""
        rows = {name: own_part(tensor) for name, tensor in tensors.items()}
        unknown = sorted(rows.keys() - self._rows.keys())
        if unknown:
            raise StateError(f"version {version}: expected tensors of the model that scores, got {unknown[0]}")
        if self._order and version <= self._order[-1]:
            return
        changes = {name: _change(self._newest[name], tensor) for name, tensor in rows.items()} if self._order else {}
        with self._lock:
            if self._order:
                self._changes[version] = {name: change for name, change in changes.items() if change is not None}
            self._order.append(version)
            before, self._newest = self._newest, rows
            if not before or not self._is_leader:
                return
            limit = BYTES_MAX_OF_MODEL * sum(tensor.nbytes for tensor in rows.values())
            while len(self._order) > self._versions_max or (self.held_bytes > limit and len(self._order) > 2):
                self._forget_oldest()

    @contextmanager
    def held(self) -> Iterator[list[Version]]:
        """Yields the kept versions; none is forgotten within the context."""
        with self._lock:
            yield list(self._order)

    def forget_before(self, version: Version) -> None:
        with self._lock:
            while len(self._order) > 1 and self._order[0] < version:
                self._forget_oldest()

    def load(self, version: Version) -> None:
        """Loads the weights of a version into the rows; raises `StateError` if it is not kept."""
        with self._lock, torch.no_grad():
            if version not in self._order:
                raise StateError(f"version {version}: expected a kept version among {', '.join(map(str, self._order))}")
            if self._loaded is None:
                for name, tensor in self._newest.items():
                    self._rows[name].copy_(tensor)
                self._loaded = self._order[-1]
            here, there = self._order.index(self._loaded), self._order.index(version)
            path = self._order[here + 1 : there + 1] if there > here else reversed(self._order[there + 1 : here + 1])
            for step in path:
                for name, change in self._changes[step].items():
                    change.turn(self._rows[name], self._newest[name].dtype)
            self._loaded = version

    def changed_elsewhere(self) -> None:
        """Notes that something else has changed the rows, so that the next `load` copies all weights."""
        self._loaded = None

    def _forget_oldest(self) -> None:
        if self._loaded == self._order[0]:
            self.load(self._order[1])
        del self._order[0]
        del self._changes[self._order[0]]


def _change(old: Tensor, new: Tensor) -> _Change | None:
    integers = _INTEGERS[new.element_size()]
    bits = (old.contiguous().view(integers) ^ new.contiguous().view(integers)).view(-1)
    count = int(torch.count_nonzero(bits))
    if not count:
        return None
    if 3 * count > bits.numel():  # their int64 positions would take four times as much memory for a moment
        return _Change(None, bits)
    places = bits.nonzero()[:, 0]
    small = torch.int32 if bits.numel() < 1 << 31 else torch.int64
    return _Change(places.to(small), bits[places])


def reading_of(passage: Passage, piece: Piece, cached: int | None) -> Reading:
    first, stop, begin = int(passage.places[piece.start]), int(passage.places[piece.stop - 1]) + 1, cached or 0
    return Reading(
        passage.token_ids[begin:stop], stop - first, passage.sampling.without_seed(),
        tuple(passage.uniforms[piece.start : piece.stop].tolist()), begin, cached is not None,
    )  # fmt: skip


class VersionScorer:
    """A `Scorer` with a model of its own or, given `trained`, with the model that trains. On several ranks each keeps its rows of
    the versions and runs the forward passes of its share: rank 0 calls `turn` and `score`, the others what these tell them."""

    def __init__(self, hf_model: Any, versions_max: int, trained: PolicyModel | None = None) -> None:
        self._trained, self.is_of_trainer = trained, trained is not None
        self._policy = trained.policy if trained is not None else Policy(hf_model.eval(), 1.0, slices_head=False)
        self._ranks = trained.ranks if trained is not None else Ranks()
        self.kept = KeptVersions(rows_by_name(hf_model), versions_max, is_leader=self._ranks.is_leader)
        # Layers that carry a state along need a cache of their kinds.
        self._cache_config = None if self._policy.is_packed else hf_model.config
        self._cache: DynamicCache | None = None
        self._aside: list[Tensor] = []  # the training weights, where the masters do not give them
        self._attention = Attention.DENSE
        self.keep = self.kept.keep

    @property
    def versions(self) -> list[Version]:
        return self.kept.versions

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.kept.held() as versions:
            self._ranks.tell({"command": "begin_scoring", "oldest": versions[0] if versions else 0})
            self.begin()
            try:
                yield
            finally:
                self._ranks.tell({"command": "end_scoring"})
                self.end()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        readings = [reading_of(passage, piece, cached) for passage, piece in asked]
        if self._ranks.count > 1:
            self._ranks.tell({"command": "score", "version": version}, READINGS.dump_json(readings))
        return [TokenScores(*columns_CT.numpy()) for columns_CT in self.columns(version, readings)]

    def begin(self) -> None:
        """Sets the training weights aside. Call it between two steps."""
        if (model := self._trained) is None:
            return
        model.recompute(is_on=False)
        self._attention = self._policy.attention
        if self._attention is not Attention.DENSE:  # its block masks are for packed rows
            self._policy.attend_by(Attention.DENSE)
        if not model.is_rounded:  # else `end` restores them from the masters
            self._aside = [own_part(parameter.detach()).cpu().clone() for parameter in model.parameters]

    def end(self) -> None:
        self._cache = None
        if (model := self._trained) is None:
            return
        with torch.no_grad():
            for parameter, aside in zip(model.parameters, self._aside, strict=False):
                own_part(parameter.detach()).copy_(aside)
        self._aside = []
        model.round_to_policy()
        self.kept.changed_elsewhere()
        reshard(self._policy)
        model.recompute(is_on=True)
        if self._attention is not Attention.DENSE:
            self._policy.attend_by(self._attention)

    def columns(self, version: Version, readings: Sequence[Reading]) -> list[Tensor]:
        """Returns columns_CT of each reading, on every rank. The ranks divide the readings; one that keeps its cache is read by all
        of them, because the next may continue it."""
        reshard(self._policy)
        self.kept.load(version)
        is_shared = not any(reading.keeps for reading in readings)
        count, rank = (self._ranks.count, self._ranks.rank) if is_shared else (1, 0)
        scored = [torch.zeros(len(fields(TokenScores)), reading.count, dtype=torch.float64) for reading in readings]
        for begin in range(0, len(readings), count):
            place = min(begin + rank, len(readings) - 1)  # without one, the last again: all must join the forward pass
            columns_CT = self._read(readings[place])
            if begin + rank < len(readings):
                scored[place] = columns_CT
        if count == 1:
            return scored
        together = self._ranks.sum(torch.cat([columns_CT.flatten() for columns_CT in scored]))
        parts = torch.split(together, [columns_CT.numel() for columns_CT in scored])
        return [part.view(columns_CT.shape) for part, columns_CT in zip(parts, scored, strict=True)]

    def _read(self, reading: Reading) -> Tensor:
        if reading.keeps and (reading.begin == 0 or self._cache is None):
            self._cache = DynamicCache(config=self._cache_config)
        past = self._cache if reading.keeps else None
        with torch.no_grad():
            columns_CT: Tensor = self._policy(lambda policy: columns_of(reading, policy, past))
        return columns_CT


# ---- trials of a model before its first step

TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Largest allowed difference of log-probabilities: of each token in float32; of their mean in bf16, where rounding alone moves
single tokens of a random 8 B model by up to 0.75 nats."""
ROUNDINGS_MAX = 4.0
"""How many times its own rounding a bf16 model may be off in rows. Right rows were off by at most 3.5 times (five random models of
7 B to 15 B on an H200, 48 trials each), rows whose completions saw each other by 3.4 to 25 times in a dense model, and by 1 to
4.6 times in a mixture of experts, whose routers choose others when rounded: there only float32 tells."""
TRIAL_ROWS, TRIAL_BLOCKS = 2, 3


def choose_attention(policy: Policy, device: torch.device, ranks: Ranks | None = None) -> None:
    """Switches `policy` to FlexAttention if that works on every rank's device; a CPU has no gradient of it."""
    if device.type == "cpu":
        return
    failure = _failure_of_flex(policy, device)
    if (ranks or Ranks()).largest(1.0 if failure else 0.0) == 0.0:
        policy.attend_by(Attention.FLEX)
        return
    policy.attend_by(Attention.DENSE)
    add_up_in_order()
    _log.warning(
        "attention: dense masks, slower on long rows, since FlexAttention fails with this model on %s: %s",
        device, failure or "another rank could not",
    )  # fmt: skip


def add_up_in_order() -> None:
    """torch's attention with a mask adds gradients up in any order on a GPU unless told otherwise, and a step that is trained again
    must have the bits that it had."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)


def trial_inputs(
    vocabulary: int, seed: int = 0, rows: int = TRIAL_ROWS, width: int = TRIAL_BLOCKS * BLOCK
) -> PackedInputs:
    """At most this many rows of random rollouts, padded to whole blocks."""
    draw = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        length = int(torch.randint(1, max(2, width // 3), (1,), generator=draw))
        return torch.randint(0, vocabulary, (length,), generator=draw)

    groups = [_group_of(drawn(), [drawn() for _ in range(3)]) for _ in range(3 * rows)]
    micro = plan_microbatches(lengths_of(groups), PackingLimits(rows * width, width))[0]
    return collate(groups, micro, BLOCK).inputs


def _group_of(prompt: Tensor, completions: Sequence[Tensor]) -> TrainGroup:
    name, rollouts = GroupId("trial"), []
    for index, ids in enumerate(completions):
        numbers, spans = (0.0,) * len(ids), (VersionSpan(Version(0), len(ids)),)
        rollouts.append(Rollout(name, index, tuple(ids.tolist()), numbers, numbers, spans, FinishReason.STOP))
    spec = GroupSpec(name, tuple(prompt.tolist()), len(rollouts), SamplingParams(), 0)
    return TrainGroup(spec, 0, tuple(rollouts), (0.0,) * len(rollouts))


TRIAL_PROMPT, TRIAL_COMPLETIONS = 24, (8, 5)
"""Tokens of a prompt, beyond its window of attention if it has one, and of its completions."""


def refuse_wrong_rows(policy: Policy, longest_tokens: int, owner: str) -> None:
    """`ConfigError` unless rows give the log-probabilities of the model's own forward pass, one sequence at a time; beyond the
    window of attention too, if the run's sequences are longer. A collective."""
    windows = [window for window in policy.windows.values() if window < longest_tokens]
    prompt = max(2, min(max(windows, default=0) + TRIAL_PROMPT, longest_tokens - sum(TRIAL_COMPLETIONS)))
    embedding = policy.hf_model.get_input_embeddings().weight
    draw = torch.Generator().manual_seed(0)
    rollouts = [torch.randint(0, embedding.shape[0], (prompt + count,), generator=draw) for count in TRIAL_COMPLETIONS]
    rollouts = [torch.cat([rollouts[0][:prompt], ids[prompt:]]) for ids in rollouts]
    dtype, rounding = policy.hf_model.dtype, 0.0
    with torch.no_grad():
        expected_T = _own_logprobs(policy, rollouts, prompt)
        group = _group_of(rollouts[0][:prompt], [ids[prompt:] for ids in rollouts])
        (micro,) = plan_microbatches(lengths_of([group]), PackingLimits(1 << 30, 1 << 30, policy.is_packed))
        ways = [micro, replace(micro, by_units=True)] if policy.attends_by_units(len(rollouts[0])) else [micro]
        try:
            results = [policy(collate([group], way).inputs.to(embedding.device))[0].cpu() for way in ways]
        except Exception as error:  # what a model's code raises that takes no mask of rows
            raise ConfigError(f"{owner}: the learner cannot lay out its sequences in rows: {error!r}") from error
        if dtype != torch.float32:  # what comes behind a token changes only how it is rounded
            longer = [torch.cat([ids, other[prompt:]]) for ids, other in zip(rollouts, rollouts[::-1], strict=True)]
            rounding = float((_own_logprobs(policy, longer, prompt) - expected_T).abs().mean())
    reshard(policy)
    for found_T in results:
        if difference := difference_of(found_T, expected_T, dtype, rounding):
            raise ConfigError(f"{owner}: the learner cannot lay out its sequences in rows: {difference}")


def _own_logprobs(policy: Policy, sequences: Sequence[Tensor], prompt: int) -> Tensor:
    """Log-probabilities of the completions' tokens by the model's own forward pass, one sequence at a time."""
    sampling = SamplingParams(temperature=policy.temperature)
    parts: list[Tensor] = []
    for ids, count in zip(sequences, TRIAL_COMPLETIONS, strict=True):
        scored = len(ids) - prompt
        reading = Reading(tuple(ids.tolist()), scored, sampling, (0.0,) * scored)
        parts.append(policy(functools.partial(columns_of, reading))[0, :count].float())
    return torch.cat(parts)


def difference_of(found_T: Tensor, expected_T: Tensor, dtype: torch.dtype, rounding_nats: float = 0.0) -> str:
    """How log-probabilities computed in `dtype` differ from those expected; empty if they agree up to rounding. `rounding_nats`:
    by how much the model's own forward pass differs from itself on average."""
    off_T, limit = (found_T - expected_T).abs(), TOLERANCE_NATS.get(dtype, 1e-1)
    off = float(off_T.max() if dtype == torch.float32 else off_T.mean())
    limit = max(limit, ROUNDINGS_MAX * rounding_nats)
    if off <= limit:  # false for NaN
        return ""
    return f"log-probabilities differ by {off:.3g} nats from those expected, by {limit:.3g} at most allowed"


def _failure_of_flex(policy: Policy, device: torch.device) -> str:
    """Why FlexAttention cannot be used; empty if it works."""
    inputs = trial_inputs(int(policy.hf_model.get_input_embeddings().weight.shape[0])).to(device)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    try:
        with torch.no_grad():
            expected_T = policy(inputs)[0]
        policy.attend_by(Attention.FLEX)
        found_T: Tensor = policy(inputs)[0]
        torch.autograd.backward(found_T.sum())
        if difference := difference_of(found_T.detach(), expected_T, policy.hf_model.dtype):
            return difference
        if not all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            return "its gradient is not finite"
    except Exception as error:  # noqa: BLE001 (kernels raise many kinds of errors; each means dense)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        for parameter in parameters:
            parameter.grad = None
    return ""
