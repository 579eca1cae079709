"""The tokens of a multi-turn rollout: what the model sampled, what the world said, and which of them are trained on.

Guarantees: the model's tokens keep the log-probabilities and versions they were sampled with, turn by turn; the world's
tokens are masked out; the prompt of each turn is exactly the tokens before it, never text that was encoded again (a
round trip through text can change token boundaries, and then the log-probabilities are of other tokens). Leaves to
others: decoding and encoding (`TurnCodec`), the world (environment).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from echo2.base.errors import TaskError
from echo2.base.rollout import Rollout, VersionSpan, joined_spans
from echo2.tasks.environment import Observation
from echo2.tasks.task import ChatMessage


class TurnCodec(Protocol):
    """The tokenizer's two directions between turns."""

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        """What the model said, without its closing tokens."""
        ...

    def tokens_between(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """All tokens from the end of the model's turn to where it speaks again, by the chat template."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """An episode that reaches a limit ends there, and its environment scores it as it stands."""

    turns_max: int = 8
    tokens_max: int = 32_768


@dataclass(frozen=True, slots=True)
class Episode:
    """A multi-turn rollout so far. `mask`, `logprobs` and `token_ids` run over everything after the opening prompt;
    `version_spans` over the sampled tokens alone, in order.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    completions: tuple[str, ...] = ()

    @property
    def turn_prompt(self) -> tuple[int, ...]:
        """The prompt of the lease for the next turn."""
        return self.prompt_token_ids + self.token_ids

    def after_completion(self, turn: Rollout, codec: TurnCodec) -> Episode:
        """With a turn that the model has finished."""
        if not turn.is_finished:
            raise TaskError(f"episode: expected a finished turn, rollout {turn.index} of {turn.group_id} is not")
        return replace(
            self,
            token_ids=self.token_ids + turn.token_ids,
            mask=self.mask + (True,) * len(turn.token_ids),
            logprobs=self.logprobs + turn.logprobs,
            version_spans=joined_spans(self.version_spans, turn.version_spans),
            completions=(*self.completions, codec.text_of(turn.token_ids)),
        )

    def after_observation(self, observation: Observation, codec: TurnCodec) -> Episode:
        """With the world's answer; of one that ends the episode nothing is added."""
        if observation.is_done:
            return self
        said = codec.tokens_between(observation.messages)
        return replace(
            self,
            token_ids=self.token_ids + said,
            mask=self.mask + (False,) * len(said),
            logprobs=self.logprobs + (0.0,) * len(said),
        )

    def has_room(self, limits: EpisodeLimits) -> bool:
        """Whether another turn may begin."""
        return len(self.completions) < limits.turns_max and len(self.turn_prompt) < limits.tokens_max
