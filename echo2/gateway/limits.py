"""What a client of the gateway may ask for, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES_MAX = 8 << 20
MESSAGES_MAX = 2048
TOOLS_MAX = 128
BODY_VALUES_MAX = 1 << 19
"""Commas and opening brackets in it: the interpreter does nothing else while it makes lists and objects of them."""
CHOICES_MAX = 16
LABEL_CHARS_MAX = 200
CHAINS_MAX = 256
"""Of one episode: beginnings of chats that do not continue one another."""
REWARD_MAX = 1e6
"""Of either sign. No task is worth more, and sums and squares of rewards stay finite."""


def is_reward(told: object) -> bool:
    """Whether it is a number from -REWARD_MAX to REWARD_MAX. NaN is none, and a whole number of any length is compared as it is."""
    return isinstance(told, int | float) and abs(told) <= REWARD_MAX


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """`vocabulary_size`: of the model; token ids of clients are below it. `idle_s`: an episode that asks nothing for so long is
    lost; `episode_s`: none lasts longer. `restarts_max`: how often a lost episode is begun anew before its rollout is dropped.
    `harnesses_max`: episodes that echo2 runs at the same time. `token_bytes_max`: of the tokenizer's longest token: a text of more
    than `context_tokens` times that has no room. `encoded_at_once_max`: characters that become tokens on the loop, more in a
    thread. `session_bytes_max`: about what the gateway keeps of one episode.
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
