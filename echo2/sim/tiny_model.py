"""A model small enough to simulate: real weights under the real codec, a made-up training step and distribution over tokens, how
engines sample from it, and the audits' scorer.

Guarantees: the weights after a step are a function of the weights before it and of the batch alone; a token and its log-probability
of the bits of the weights, the leased group, the position and its random number. Two versions differ by about `DRIFT_NATS`. Lengths
have a heavy tail.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rng import derived_rng, derived_seed, uniform
from echo2.learner.audit import Passage, Scorer
from echo2.learner.bets import FLOOR_NATS, Piece, TokenScores
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore
from echo2.learner.rollouts.groups import Batch, TurnOf
from echo2.learner.rollouts.prompts import PromptSource
from echo2.learner.training.loading import digest_of
from echo2.learner.training.shards import VersionCoder
from echo2.learner.training.trainer import StepResult
from echo2.sim.virtual_loop import VirtualLoop
from echo2.tasks.rewards import RewardFailure, Scored
from echo2.tasks.task import Reward, TaskInstance
from echo2.weights import HostWeights
from echo2.worker.engines.engine import GenerateRequest

FINGERPRINT_KEY = 0x5EED  # any; fixed so that traces repeat
VOCABULARY = 97  # small: scores are computed for every token
STOP_TOKEN = 1
FAILS_SHARE = 0.01  # a few in a run
# Three tensors of two shapes: blocks with several and with part of one.
SHAPES = {"embed.weight": (24, 8), "layer.weight": (16, 12), "norm.weight": (12,)}
BLOCK_ELEMENTS = 32  # several blocks a version although it is tiny


def base_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(seed, "base"))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def fingerprint_of(weights: dict[str, Tensor]) -> int:
    return HostWeights.from_tensors(weights, Version(0), FINGERPRINT_KEY, copy=False).fingerprint()


def trained(weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The weights one step later: flips bits in a few elements of each tensor, chosen by a hash of the batch."""
    digest = hashlib.sha256(str(batch.step).encode())
    for group in batch.groups:
        digest.update(group.spec.group_id.encode())
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            digest.update(repr((rollout.index, rollout.token_ids, rollout.logprobs, reward)).encode())
    rng = random.Random(digest.digest())
    moved = copied(weights)
    for tensor in moved.values():
        bits = tensor.view(torch.int16).view(-1)
        for _ in range(max(1, bits.numel() // 16)):
            bits[rng.randrange(bits.numel())] ^= 1 << rng.randrange(6)
    return moved


def reward_of(token_ids: tuple[int, ...]) -> float:
    return (sum(token_ids) % 7) / 6.0


MEDIAN_TOKENS, SIGMA = 20.0, 0.9  # lengths are log-normal, with a tail of some ten medians
SPREAD_NATS, DRIFT_NATS = 1.5, 0.1  # far above float32's noise, so that audits find a wrong version
FIRST_TOKEN = 3  # lower token IDs are never drawn, except the stop token
_ROWS = 512  # many contexts, some 200 KB
# Drawn once: the scores of every context.
_TABLE = np.random.Generator(np.random.PCG64(0)).standard_normal((_ROWS, VOCABULARY - FIRST_TOKEN + 1))
_NORMAL = NormalDist()  # of the lengths

Column = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=1 << 14)
def logprobs_of(fingerprint: int, group_id: GroupId, position: int) -> Column:
    """Log-probabilities of all tokens (VOCABULARY values), rounded to float32 as in messages."""
    base = _number(group_id, position)
    drift = _TABLE[_number(f"{fingerprint:x}", group_id, position) % _ROWS] * DRIFT_NATS
    scores = _TABLE[base % _ROWS] * SPREAD_NATS + drift
    others = scores[1:] - math.log(np.exp(scores[1:]).sum())
    ends = min(0.9, _ends_per_token(group_id) * math.exp(drift[0]))
    logprobs = np.full(VOCABULARY, -np.inf)
    logprobs[FIRST_TOKEN:] = others + math.log1p(-ends)
    logprobs[STOP_TOKEN] = math.log(ends)
    return logprobs.astype(np.float32).astype(np.float64)


@functools.lru_cache(maxsize=1 << 12)
def _ends_per_token(group_id: GroupId) -> float:
    share = (_number("length", group_id) % 9973 + 0.5) / 9973
    return 1.0 / (1.0 + MEDIAN_TOKENS * math.exp(SIGMA * _NORMAL.inv_cdf(share)))


def _number(*names: object) -> int:
    text = "/".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def picked(logprobs: Column, number: float) -> int:
    """The first token whose cumulative probability exceeds `number`, which is in [0, 1)."""
    sums = np.exp(logprobs).cumsum()
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


class TinyScorer:
    """A `Scorer` of the tiny model."""

    is_of_trainer = False

    def __init__(self, versions_max: int) -> None:
        self._versions_max = versions_max
        self._fingerprints: dict[Version, int] = {}

    @property
    def versions(self) -> list[Version]:
        return list(self._fingerprints)

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        if self._fingerprints and version <= max(self._fingerprints):
            return
        self._fingerprints[version] = fingerprint_of(dict(tensors))
        while len(self._fingerprints) > self._versions_max:
            del self._fingerprints[next(iter(self._fingerprints))]

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        return [self._scores(version, passage, piece) for passage, piece in asked]

    def _scores(self, version: Version, passage: Passage, piece: Piece) -> TokenScores:
        rows = []
        for place, (group_id, position) in enumerate(_places_of(passage)):
            if piece.start <= place < piece.stop:
                logprobs = logprobs_of(self._fingerprints[version], group_id, position)
                rows.append(_scores(logprobs, passage.rollout.token_ids[place], passage.uniforms[place]))
        return TokenScores(*np.array(rows).T)


def _places_of(passage: Passage) -> Iterator[tuple[GroupId, int]]:
    """Yields, for each sampled token, the group ID under which its turn was leased and its position in that turn."""
    turn = position = 0
    before = int(passage.places[0])
    for place in map(int, passage.places):
        if place > before + 1:
            turn, position = turn + 1, 0
        yield TurnOf(passage.rollout.group_id, passage.rollout.index, turn).group_id, position
        before, position = place, position + 1


def _scores(logprobs: Column, token: int, number: float) -> tuple[float, ...]:
    """One row of `TokenScores`."""
    chances = np.exp(logprobs)
    drawn = max(2 * FLOOR_NATS, float(logprobs[token]))
    expected = float(chances @ np.maximum(logprobs, FLOOR_NATS))
    pick, sums, squares = picked(logprobs, number), chances.cumsum() / chances.sum(), np.square(chances).cumsum()
    edges = [(float(sums[at]), float(squares[at])) if at >= 0 else (0.0, 0.0) for at in (pick - 1, pick)]
    spreads = [((1 - edge) ** 2 * below + edge**2 * (squares[-1] - below)) ** 0.5 for edge, below in edges]
    return drawn, drawn, expected, float(pick == token), edges[0][0], edges[1][0], *spreads


Pick = Callable[[int, GenerateRequest, int], tuple[int, float]]
"""The token at a position of a completion and its log-probability, given the fingerprint of the weights."""


def seeded_pick(bits: int, request: GenerateRequest, position: int) -> tuple[int, float]:
    """The pick of an honest engine."""
    return seeded(bits, group_of(request), request.sampling.seed, position)


def seeded(bits: int, group_id: GroupId, seed: int, position: int) -> tuple[int, float]:
    """The token that this seed's random number selects, and its log-probability."""
    logprobs = logprobs_of(bits, group_id, position)
    token = picked(logprobs, uniform(seed, position))
    return token, float(logprobs[token])


def group_of(request: GenerateRequest) -> GroupId:
    """The request's group: its prefix key is the group ID."""
    return GroupId(request.prefix_key)


SNAPSHOT_BYTES = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())  # bf16
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": VOCABULARY,
    "intermediate_size": 8, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
MASTERS = "masters|"  # before a name, in a checkpoint's file


class TinyModel:
    path, context_tokens, flops_per_position = "tiny", 512, 1.0
    device = torch.device("cpu")
    parameter_count = SNAPSHOT_BYTES // 2
    vocabulary_size, snapshot_bytes = VOCABULARY, SNAPSHOT_BYTES
    stop_token_ids = (STOP_TOKEN,)
    config: Any = None
    routing = None

    def config_json(self) -> bytes:
        return json.dumps(CONFIG, sort_keys=True).encode()

    def digest(self) -> str:
        return digest_of(self.config_json(), SHAPES.items(), "bfloat16")

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fingerprint").write_text(f"{fingerprint_of(dict(policy)):x}")


class TinyTrainer:
    """A `TrainingSide` with real checkpoints and a made-up optimiser, whose steps take `train_s` of virtual time. Calls `on_step`
    with each batch and the resulting weights."""

    starts_from_base = True

    def __init__(
        self, seed: int, train_s: Callable[[], float], on_step: Callable[[Batch, dict[str, Tensor]], None]
    ) -> None:
        self.model, self.coder = TinyModel(), VersionCoder()
        self.step_count = 0
        self._weights = base_weights(seed)
        self._train_s, self._on_step = train_s, on_step

    @property
    def checkpoint_bytes(self) -> int:
        return 2 * SNAPSHOT_BYTES

    def step(self, batch: Batch, is_published: bool = False, is_kept: bool = False) -> StepResult:
        self._weights = trained(self._weights, batch)
        self.step_count += 1
        self._on_step(batch, self._weights)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "the trainer's thread is the virtual loop's"
        loop.spend(self._train_s())
        sampled = sum(len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts)
        return StepResult(self.step_count, {"train": self._train_s()}, None, 0.0, 0.0, False, sampled, sampled)

    def cross_entropy(self, batch: Batch) -> float:
        return 0.0

    def snapshot(self) -> dict[str, Tensor]:
        return copied(self._weights)

    def whole(self, snapshot: Mapping[str, Tensor], version: Version) -> dict[str, Tensor]:
        return dict(snapshot)

    def hold(self, version: Version, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def take(
        self, store: CheckpointStore, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]
    ) -> Checkpoint:
        step = Step(self.step_count)
        shards = {f"{MASTERS}{name}": tensor.clone() for name, tensor in self._weights.items()}
        checkpoint = Checkpoint(step, shards, published, version, state)
        store.begin(checkpoint)
        return checkpoint

    def load_newest(self, store: CheckpointStore) -> Checkpoint | None:
        if (checkpoint := store.load_newest()) is not None:
            self._weights, self.step_count = copied(checkpoint.masters), int(checkpoint.step)
        return checkpoint

    def scorer(self, versions_max: int, newest: Version) -> Scorer:
        return TinyScorer(versions_max)

    def stop(self) -> None:
        pass


class TinyTokenizer:
    """A tokenizer that decodes tokens to their numbers, separated by spaces."""

    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()
    vocab_size = VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + byte % (VOCABULARY - 3) for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(token) for token in token_ids)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer").write_text("numbers")


class TinyWorld:
    """A `World`: each prompt wants up to `turns` completions. The last one is scored; FAILS_SHARE of the time scoring fails."""

    name, size, reward_processes = "tiny", None, 0

    def __init__(self, seed: int, turns: int) -> None:
        self._seed, self._turns = seed, turns

    def instance(self, index: int) -> TaskInstance:
        return TaskInstance(index, f"p{index}", "")

    async def answer(self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = "") -> Scored:
        rng = derived_rng(self._seed, "answer", index, len(turns), sum(turns[-1]))
        await asyncio.sleep(0.01 + 0.2 * rng.random())
        if len(turns) < 1 + index % self._turns and room_tokens > 8:
            question = tuple(3 + rng.randrange(VOCABULARY - 3) for _ in range(4))
            return Scored(None, None, "", 0.0, reply=question)
        if rng.random() < FAILS_SHARE:
            return Scored(None, RewardFailure.RAISED, "made up", 0.0)
        return Scored(Reward(reward_of(tuple(turns[-1]))), None, "", 0.0)

    def close(self) -> None:
        pass


def tiny_source(seed: int, turns: int) -> PromptSource:
    return PromptSource(TinyTokenizer(), TinyWorld(seed, turns))
