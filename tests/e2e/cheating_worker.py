"""`echo-worker` with an engine whose log-probabilities are made up; for the test of the audit."""

import dataclasses
import random
import sys

from echo2.cli.worker import main
from echo2.worker import rollouts as partial
from echo2.worker.engines.engine import TokenChunk

_rng = random.Random(0)
_honest = partial.PartialRollout.append


def _made_up(self: partial.PartialRollout, chunk: TokenChunk) -> None:
    numbers = tuple(-_rng.expovariate(1.0) for _ in chunk.logprobs)
    _honest(self, dataclasses.replace(chunk, logprobs=numbers, raw_logprobs=numbers))


if __name__ == "__main__":
    partial.PartialRollout.append = _made_up  # type: ignore[method-assign]
    sys.exit(main())
