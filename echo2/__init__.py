"""echo2: reinforcement-learning post-training of LLMs over a wide-area network.

ARCHITECTURE.md is the map; each subpackage's DESIGN.md is its argument. `Run`, `Publisher` and `Rollouts` are the Python
API for a trainer of one's own; the rest is reached through the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echo2.cli.own_trainer import PaddedBatch, Publisher, Rollouts, Run, Sample, TrainingBatch
    from echo2.weights.elements import published_tensors

__version__ = "0.1.0"
__all__ = ["PaddedBatch", "Publisher", "Rollouts", "Run", "Sample", "TrainingBatch", "__version__", "published_tensors"]


def __getattr__(name: str) -> object:
    """The API is loaded when it is asked for: the commands pay nothing for it."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'echo2' has no attribute {name!r}")
    from echo2.cli import own_trainer

    return getattr(own_trainer, name)
