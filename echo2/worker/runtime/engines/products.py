"""Matrix products of the embedded engine, with whichever of torch's two CPU libraries is faster on this machine.

torch multiplies float32 matrices with MKL, which leaves half the vector width of some processors unused; its other library, oneDNN,
is slower on small batches. So both are timed once on the model's own matrices, for each class of row counts. A rounded matrix is
widened to float32 one block at a time, in the processor's cache, and multiplied there: torch's int8 kernels either take bf16 rows,
which distorts log-probabilities more than the rounding itself, or are slower than widening.
Guarantees: float32 in and out; both libraries compute the same sums up to the order of addition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from echo2.worker.runtime.engines.rounded import Matrix, Rounded

ROW_CLASSES = (1, 4, 8, 16, 32, 64, 256)
"""A batch is assigned to the largest class that does not exceed its number of rows."""
TRIALS = 5
STEP_ROWS, PIECE_ROWS, BLOCK_ROWS = 8, 64, 256
"""oneDNN compiles and caches code for each new shape, so row counts are padded with zeros: up to `PIECE_ROWS` rows to a multiple of
`STEP_ROWS`, above that to a multiple of `PIECE_ROWS`, at most `BLOCK_ROWS` at a time. oneDNN is so much faster than MKL on many
rows that the zeros cost less."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


@dataclass(slots=True)
class Products:
    """`product(rows, weight, bias)` returns `rows @ weight.T + bias`; uses MKL until `choose` has been called."""

    _chosen: list[Product] = field(default_factory=lambda: [F.linear] * len(ROW_CLASSES))

    def product(self, rows: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, Rounded):
            return self._product_by_blocks(rows, weight, bias)
        count = rows.shape[0]
        if count > BLOCK_ROWS:
            return self._product_of_many(rows, weight, bias)
        chosen = self._chosen[_class_of(count)]
        missing = -count % (PIECE_ROWS if count > PIECE_ROWS else STEP_ROWS)
        if chosen is F.linear or not missing:
            return chosen(rows, weight, bias)
        return chosen(F.pad(rows, (0, 0, 0, missing)), weight, bias)[:count]

    def _product_of_many(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(rows.shape[0], weight.shape[0])
        for begin in range(0, rows.shape[0], BLOCK_ROWS):
            part = slice(begin, begin + BLOCK_ROWS)
            out[part] = self.product(rows[part], weight, bias)
        return out

    def _product_by_blocks(self, rows: torch.Tensor, weight: Rounded, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(rows.shape[0], weight.shape[0])
        for part, block in weight.blocks():
            out[:, part] = self.product(rows, block, None if bias is None else bias[part])
        return out

    def choose(self, matrices: Sequence[Matrix]) -> None:
        """Times both libraries on matrices of these sizes; keeps MKL where oneDNN is missing or not faster."""
        if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return
        weights = [next(m.blocks())[1] if isinstance(m, Rounded) else m for m in matrices]
        for at, rows in enumerate(ROW_CLASSES):
            if _spent_s(_by_onednn, weights, rows) < _spent_s(F.linear, weights, rows):
                self._chosen[at] = _by_onednn


def _class_of(count: int) -> int:
    at = 0
    while at + 1 < len(ROW_CLASSES) and count >= ROW_CLASSES[at + 1]:
        at += 1
    return at


def _spent_s(product: Product, weights: Sequence[torch.Tensor], row_count: int) -> float:
    """Seconds of the fastest of a few trials, which other load on the machine distorts least."""
    inputs = [torch.zeros(row_count, weight.shape[1]) for weight in weights]
    fastest = float("inf")
    for _ in range(TRIALS):
        began = time.perf_counter()
        for rows, weight in zip(inputs, weights, strict=True):
            product(rows, weight, None)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
