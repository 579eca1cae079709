"""Limits on what a client of the gateway may ask for, and on how much of it the gateway keeps."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES_MAX = 8 << 20  # PROMPT_TOKENS_MAX of some 4 bytes each, twice for JSON's escapes
MESSAGES_MAX = 2048  # four for each call of an episode (Limits.calls_max)
TOOLS_MAX = 128  # what OpenAI's API allows
BODY_VALUES_MAX = 1 << 19
"""Commas and opening brackets in one body: parsing holds the interpreter, so nothing else runs meanwhile."""
CHOICES_MAX = 16  # each choice is a rollout of the group, and a slot of a worker
LABEL_CHARS_MAX = 200  # shown in one line of a log
CHAINS_MAX = 256
"""Chains per episode: chats that do not continue one another."""
REWARD_MAX = 1e6
"""Largest absolute reward. No task needs more, and sums and squares of rewards stay finite."""


def is_reward(told: object) -> bool:
    """Whether `told` is a number from -REWARD_MAX to REWARD_MAX. False for NaN; compares integers exactly, however long."""
    return isinstance(told, int | float) and abs(told) <= REWARD_MAX


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of one gateway.

    `vocabulary_size`: the model's; clients' token ids must be below it. `token_bytes_max`: length of the tokenizer's longest token;
    a text longer than `context_tokens` times that cannot fit. `sessions_max`: open sessions. `calls_max`: calls per episode.
    `session_bytes_max`: approximate memory per episode. `encoded_at_once_max`: longer texts, in characters of JSON, are encoded in
    a thread, not on the event loop. `calls_at_once_max`: unanswered calls per episode. `calls_in_flight_max`: completions under way
    in the whole gateway. `idle_s`: an episode without a call for this long is lost. `episode_s`: longest episode. `restarts_max`:
    restarts of a lost episode before its rollout is dropped. `harnesses_max`: episodes that echo2 runs at once. `retry_after_s`:
    what a refused client is told to wait.
    """

    context_tokens: int
    max_new_tokens: int
    vocabulary_size: int
    token_bytes_max: int
    sessions_max: int = 4096
    calls_max: int = 512
    session_bytes_max: int = 64 << 20
    encoded_at_once_max: int = 16 << 10
    calls_at_once_max: int = 16
    calls_in_flight_max: int = 4096
    idle_s: float = 600.0
    episode_s: float = 3600.0
    restarts_max: int = 2
    harnesses_max: int = 64
    retry_after_s: float = 1.0
