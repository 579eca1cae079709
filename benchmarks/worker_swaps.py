"""What swaps cost the embedded engine, and how far its log-probabilities are from the model's own forward pass."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.worker_scene import (
    CONFIG,
    CONTEXT_TOKENS,
    Nowhere,
    Row,
    Staged,
    asks,
    delta,
    keyframe,
    make_model,
    row,
)
from echo2.base.rollout import SamplingParams
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.loop import HOLD_STEPS, LiveSwap, StepLoop
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from echo2.worker.engines.outbox import Outbox

INTERVAL_S = 2.0
SEQUENCES = 32


class Load:
    """Keeps a loop's slots busy with groups that share a prompt, completions of mixed lengths as everywhere here."""

    def __init__(self, loop: StepLoop, group_size: int) -> None:
        self._loop = loop
        self._group_size = group_size
        self._groups = 0

    def step(self, count: int) -> float:
        """CPU seconds of so many steps."""
        began = time.process_time()
        for _ in range(count):
            if self._loop.stats().waiting_sequences < self._group_size:
                self._submit()
            self._loop.step()
        return time.process_time() - began

    def _submit(self) -> None:
        self._groups += 1
        asked = asks(self._group_size, seed=self._groups)
        for index, ask in enumerate(asked):
            sampling = SamplingParams(max_new_tokens=ask.count)
            key = f"g{self._groups}"
            self._loop.submit(GenerateRequest(f"{key}/{index}", tuple(asked[0].prompt), (), sampling, key))


def swap_share(base: Staged, mode: SwapMode, swaps: int, interval_s: float, group_size: int = 8) -> float:
    """Share of CPU that a swap every `interval_s` takes from generation, with 32 slots full of mixed lengths.

    The steps from the swap's request on, less what their tokens cost between swaps: standing still, slots that stand
    empty before a swap, and recomputing caches together.
    """
    weights = LiveWeights(read_shape(CONFIG))
    loop = StepLoop(weights, partial(CachedDecoder, weights), 32, CONTEXT_TOKENS, Nowhere())
    load = Load(loop, group_size)
    extra_s = 0.0
    with torch.inference_mode():
        loop._forward.warm_up()
        loop.swap(LiveSwap(base.version, None, weights.checked(base), SwapMode.KEEP_KV))
        loop.run_commands()
        for version in range(1, swaps + 1):
            change = delta(base, version)
            scatters = weights.checked(change)
            plain_s, plain_tokens = 0.0, loop.stats().sampled_tokens
            while plain_s < interval_s:
                plain_s += load.step(4)
            plain_tokens = loop.stats().sampled_tokens - plain_tokens
            began = time.process_time()
            loop.swap(LiveSwap(change.version, change.parent, scatters, mode))
            loop.run_commands()
            tokens = loop.stats().sampled_tokens
            load.step(3 * HOLD_STEPS)
            spent_s = time.process_time() - began
            extra_s += spent_s - (loop.stats().sampled_tokens - tokens) * plain_s / plain_tokens
            assert loop.version == version, "the swap took effect within the steps measured"
    return extra_s / swaps / interval_s


def swaps(is_quick: bool) -> list[Row]:
    """The share of time that a version every `INTERVAL_S` costs, by mode and by how many sequences share a prompt."""
    base, rows = keyframe(make_model("sdpa")), []
    for mode, group_size in ((SwapMode.KEEP_KV, 8), (SwapMode.RECOMPUTE_KV, 8), (SwapMode.RECOMPUTE_KV, 1)):
        share = swap_share(base, mode, 2 if is_quick else 16, INTERVAL_S, group_size)
        name = f"time lost to swaps every 2 s, {mode.value}, groups of {group_size}"
        print(f"{name}: {share:.2%} (target <= 3%)")
        rows.append(row(name, share, "share", 0.03))
    return rows


@dataclass
class Said:
    """What engines said of one sequence: tokens, raw log-probabilities, versions."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    raws: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Witness:
    """A loop under test whose words are kept, and the weights of every version it had."""

    def __init__(self, base: Staged, said: list[Said], kept: dict[int, dict[str, torch.Tensor]]) -> None:
        self._base, self._said, self._kept = base, said, kept
        self._weights = LiveWeights(read_shape(CONFIG))
        self._box = Outbox()
        self._loop = StepLoop(
            self._weights, partial(CachedDecoder, self._weights), SEQUENCES, CONTEXT_TOKENS, self._box
        )
        self._loop._forward.warm_up()
        self.swap(base, SwapMode.KEEP_KV)
        for number, one in enumerate(said):
            sampling = SamplingParams(max_new_tokens=400)
            key = f"r{number}"
            self._loop.submit(GenerateRequest(key, tuple(one.prompt), tuple(one.tokens), sampling, key))

    def swap(self, staged: Staged, mode: SwapMode) -> None:
        self._loop.swap(LiveSwap(staged.version, staged.parent, self._weights.checked(staged), mode))
        self._loop.run_commands()
        while self._loop.version != staged.version:
            self._loop.step()
        self._kept.setdefault(
            int(staged.version), {name: tensor.clone() for name, tensor in self._weights.tensors.items()}
        )

    def step(self, count: int) -> None:
        for _ in range(count):
            self._loop.step()

    def listen(self) -> None:
        for chunk in asyncio.run(self._box.take()):
            one = self._said[int(chunk.request_id[1:])]
            one.tokens += chunk.token_ids
            one.raws += chunk.raw_logprobs
            one.versions += [int(chunk.version)] * len(chunk.token_ids)


def errors(
    said: list[Said], judge: torch.nn.Module, kept: dict[int, dict[str, torch.Tensor]], since: int = 0
) -> list[float]:
    """Of tokens from version `since` on: raw log-probabilities against the full forward under the version claimed."""
    found = []
    for version in {version for one in said for version in one.versions if version >= since}:
        for name, parameter in judge.named_parameters():
            parameter.copy_(kept[version][name])
        for one in said:
            logits = judge(torch.tensor([one.prompt + one.tokens])).logits[0, len(one.prompt) - 1 : -1]
            exact = torch.log_softmax(logits, dim=-1)
            found += [
                abs(float(exact[at, token]) - raw)
                for at, (token, raw, claimed) in enumerate(zip(one.tokens, one.raws, one.versions, strict=True))
                if claimed == version
            ]
    return found


def _witnessed(base: Staged, mode: SwapMode, swap_count: int) -> tuple[list[Said], dict[int, dict[str, torch.Tensor]]]:
    said: list[Said] = [Said(ask.prompt) for ask in asks(SEQUENCES)]
    kept: dict[int, dict[str, torch.Tensor]] = {}
    witness = Witness(base, said, kept)
    witness.step(16)
    for version in range(1, swap_count + 1):
        witness.swap(delta(base, version), mode)
        witness.step(16)
    witness.listen()
    return said, kept


def agreement(is_quick: bool) -> list[Row]:
    """Raw log-probabilities of 32 sequences against the Hugging Face forward in float32, which is the learner's."""
    count = 2 if is_quick else 6
    judge = make_model("sdpa")
    base = keyframe(judge)
    with torch.inference_mode():
        judge = copy.deepcopy(judge)
        said, kept = _witnessed(base, SwapMode.RECOMPUTE_KV, 2)
        mixed = max(errors(said, judge, kept))
        moved = Witness(base, said, kept)  # another engine, which starts at version 0 and goes on with what is there
        moved.step(24)
        before = [len(one.tokens) for one in said]
        moved.listen()
        for one, at in zip(said, before, strict=True):
            one.versions[:at] = [-1] * at
        migrated = max(errors(said, judge, kept))
        said, kept = _witnessed(base, SwapMode.KEEP_KV, count)
        off = errors(said, judge, kept, since=count)
    rows = [
        row("worst error over versions mixed in a sequence, caches recomputed", mixed, "nats", 1e-4),
        row("worst error of continuations on another engine", migrated, "nats", 1e-4),
        row(f"mean error with the cache kept over {count} swaps", sum(off) / len(off), "nats", None),
    ]
    for each in rows:
        print(f"{each['name']}: {each['value']:.2e}")
    return rows
