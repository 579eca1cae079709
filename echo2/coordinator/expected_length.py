"""How many tokens a group will take, learned from earlier groups of the same prompt and of all prompts.

Longest first keeps the end of a step short, so the queue is ordered by this guess. Guarantees: bounded memory; a guess
is never negative. The prompt is known by a digest of its tokens: a prompt that comes back in a later epoch is known.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from echo2.base.rollout import GroupSpec

PROMPTS_MAX = 20_000
BLEND = 0.3


def prompt_key(spec: GroupSpec) -> bytes:
    """Sixteen bytes that name the prompt."""
    return hashlib.sha256(b",".join(b"%d" % token for token in spec.prompt_token_ids)).digest()[:16]


@dataclass(slots=True)
class ExpectedLength:
    """Exponentially blended tokens per rollout, by prompt; least recently used prompts are forgotten first."""

    _by_prompt: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _overall: float = 0.0

    def learn(self, spec: GroupSpec, tokens: int, rollouts: int) -> None:
        """Notes that `rollouts` finished completions of the prompt took `tokens` together: a worker's word, within the limit."""
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
        """Tokens of the whole group; the limit bounds it."""
        each = self._by_prompt.get(prompt_key(spec), self._overall)
        return min(each, float(spec.sampling.max_new_tokens)) * spec.rollout_count

    def rest(self, spec: GroupSpec, tokens: int, finished_rollouts: int) -> float:
        """Tokens still to come of a group that holds `tokens`: its unfinished siblings go on to the expectation, and
        past it to half of what they have; the limit bounds it."""
        unfinished = max(0, spec.rollout_count - finished_rollouts)
        held, each = tokens / spec.rollout_count, self.guess(spec) / spec.rollout_count
        left = each - held if held < each else held / 2
        return unfinished * max(0.0, min(left, spec.sampling.max_new_tokens - held))
