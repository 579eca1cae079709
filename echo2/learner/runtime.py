"""A former import path, for scripts written against it: `echo2.learner.runtime.prompts` is `echo2.learner.rollouts.prompts`."""

from __future__ import annotations

import sys

from echo2.learner.rollouts import prompts

__path__: list[str] = []  # a package without files
sys.modules[f"{__name__}.prompts"] = prompts
