"""What a training client sends: sequences with targets and numbers for each target, the loss over them, and the update's settings.

Shapes: N tokens of an example, K targets of each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echo2.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """`token_ids_N`: int64 inputs. `targets_NK`: int64, the tokens scored after each input. `columns`: float32 (N, K), a number
    for each target under the names that the loss reads."""

    token_ids_N: np.ndarray
    targets_NK: np.ndarray
    columns: Mapping[str, np.ndarray]


LOSS_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("logprobs", "advantages")),
}
"""The losses of Tinker's API that are computed here, and the columns that each reads."""


@dataclass(frozen=True, slots=True)
class ClientLoss:
    """`name`: of `LOSS_COLUMNS`. `clip_low`, `clip_high`: bounds of the ratio. `beta`: weight of dro's quadratic term. The defaults
    are those of Tinker's API."""

    name: str
    clip_low: float = 0.8
    clip_high: float = 1.2
    beta: float = 0.05

    def __post_init__(self) -> None:
        if self.name not in LOSS_COLUMNS:
            raise ConfigError(f"loss_fn: expected one of {', '.join(LOSS_COLUMNS)}, got {self.name!r:.80}")
        if not 0 <= self.clip_low <= 1 <= self.clip_high < math.inf or not 0 <= self.beta < math.inf:
            raise ConfigError(
                f"loss_fn_config: expected 0 <= clip_low_threshold <= 1 <= clip_high_threshold and beta of 0 or more, got {self}"
            )


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Settings of one update by AdamW. `grad_clip`: largest norm of the gradient; 0: any."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float = 0.0
    grad_clip: float = 0.0

    def __post_init__(self) -> None:
        is_sound = 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon >= 0 and math.isfinite(self.lr)
        if not is_sound or self.lr < 0 or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"adam_params: expected betas from 0 to below 1, the rest finite and 0 or more, got {self}"
            )
