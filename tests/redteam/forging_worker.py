"""`echo-worker` whose log-probabilities are honest, but for the raw ones, which are those that training uses."""

from __future__ import annotations

import dataclasses
import sys

from echo2.cli.worker import main
from echo2.worker import partial
from echo2.worker.engine import TokenChunk

_honest = partial.PartialRollout.append


def _forged(self: partial.PartialRollout, chunk: TokenChunk) -> None:
    _honest(self, dataclasses.replace(chunk, raw_logprobs=tuple(number - 18.0 for number in chunk.raw_logprobs)))


if __name__ == "__main__":
    partial.PartialRollout.append = _forged  # type: ignore[method-assign]
    sys.exit(main())
