"""Converts the config's objective options into the learner's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.cli.resolved import normalisation, objective
from echo2.config.run import RunConfig

if TYPE_CHECKING:  # imports torch
    from echo2.learner.loss import PolicyLossConfig


def policy_loss_of(config: RunConfig) -> PolicyLossConfig:
    """Builds the policy loss's settings. Raises ConfigError for values that no objective can have."""
    from echo2.learner.correction import Correction, CorrectionConfig
    from echo2.learner.loss import Normalisation, PolicyLossConfig
    from echo2.learner.objectives import GammaShape, Objective, ObjectiveConfig

    learner = config.learner
    return PolicyLossConfig(
        objective=ObjectiveConfig(
            kind=Objective(objective(config).value),
            clip_low=learner.clip_low,
            clip_high=learner.clip_high,
            ratio_ceiling=learner.ratio_ceiling or None,
            sapo_temperatures=learner.sapo_temperatures,
            vespo_shapes=(GammaShape(*learner.vespo_positive), GammaShape(*learner.vespo_negative)),
            second_moment_max=learner.second_moment_max,
            off_policy_nats_max=learner.off_policy_nats_max or None,
        ),
        normalisation=Normalisation(normalisation(config).value),
        correction=CorrectionConfig(
            Correction(learner.correction),
            cap=learner.is_cap,
            floor=learner.is_floor,
            mask_low=learner.is_band[0],
            mask_high=learner.is_band[1],
        ),
        kl_coefficient=learner.kl_coefficient,
        kl_weighted_by_ratio=learner.kl_weighted_by_ratio,
    )
