"""Guesses how many tokens a group will take, from earlier groups of the same prompt and of all prompts.

Longest first keeps the end of a step short, so the queue is ordered by this guess. Guarantees: bounded memory; a guess
is never negative. A prompt is identified by a digest of its tokens, so it is recognised in a later epoch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from echo2.base.rollout import GroupSpec

PROMPTS_MAX = 20_000
BLEND = 0.3


def prompt_key(spec: GroupSpec) -> bytes:
    """A digest of the prompt, 16 bytes."""
    return hashlib.sha256(b",".join(b"%d" % token for token in spec.prompt_token_ids)).digest()[:16]


@dataclass(slots=True)
class ExpectedLength:
    """Moving averages (exponential) of tokens per rollout, by prompt; the least recently used prompts are forgotten first."""

    _by_prompt: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _overall: float = 0.0

    def learn(self, spec: GroupSpec, tokens: int, rollouts: int) -> None:
        """Notes that `rollouts` finished completions of the prompt took `tokens` together. The numbers are a worker's claim, so the
        token limit bounds them."""
        if rollouts <= 0:
            return
        each = min(tokens / rollouts, float(spec.sampling.max_new_tokens))
        key = prompt_key(spec)
        before = self._by_prompt.pop(key, each)
        self._by_prompt[key] = before + BLEND * (each - before)
        self._overall = self._overall + BLEND * (each - self._overall) if self._overall else each
        while len(self._by_prompt) > PROMPTS_MAX:
            self._by_prompt.popitem(last=False)

    def guess(self, spec: GroupSpec) -> float:
        """Expected tokens of the whole group, bounded by the token limit."""
        each = self._by_prompt.get(prompt_key(spec), self._overall)
        return min(each, float(spec.sampling.max_new_tokens)) * spec.rollout_count

    def rest(self, spec: GroupSpec, tokens: int, finished_rollouts: int) -> float:
        """Expected tokens still to come in a group that holds `tokens`. An unfinished rollout is expected to reach the expected
        length; past that, to grow by half of what it has. The token limit bounds both."""
        unfinished = max(0, spec.rollout_count - finished_rollouts)
        held, each = tokens / spec.rollout_count, self.guess(spec) / spec.rollout_count
        left = each - held if held < each else held / 2
        return unfinished * max(0.0, min(left, spec.sampling.max_new_tokens - held))
