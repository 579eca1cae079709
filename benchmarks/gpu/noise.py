"""How far the device's log-probabilities are from exact ones: what an audit must forgive an honest worker."""

from __future__ import annotations

import torch

from benchmarks.gpu.setup import QWEN3_06B, SMALL, Row, Setup, saved_model
from echo2.learner.bets import NOISE_PRIOR_OTHERS_NATS
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.scoring import trial_inputs

BLOCKS = 4


def run(setup: Setup) -> list[Row]:
    shape = SMALL if setup.is_small else QWEN3_06B
    path = str(saved_model(shape, setup.folder))
    inputs = trial_inputs(shape.vocabulary, 1, 1, BLOCKS * 128)
    with torch.no_grad():
        exact_T = PolicyModel(path, "bfloat16", torch.device("cpu"), 1.0).policy(inputs)[0]
        model = PolicyModel(path, "bfloat16", setup.device, 1.0)
        found_T = model.policy(inputs.to(setup.device))[0].cpu()
    off_T = (found_T - exact_T).double()
    return [
        Row(f"{shape.name}: noise of log-probabilities, root mean square", float(off_T.square().mean().sqrt()), "nats",
            NOISE_PRIOR_OTHERS_NATS),
        Row(f"{shape.name}: noise of log-probabilities, largest of {off_T.numel()}", float(off_T.abs().max()), "nats"),
    ]  # fmt: skip
