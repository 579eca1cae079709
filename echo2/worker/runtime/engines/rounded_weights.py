"""Weights rounded to int8 for generation, with the bf16 masters from which they are rounded.

Guarantees: published changes are written into the masters bit for bit, and every matrix that they touch is rounded again from its
whole master, so the live values depend on the masters alone; the fingerprint is that of the masters, and is valid only while all
live values equal, bit for bit, what the masters give. Leaves to others: products (products.py).

Each row of a matrix has one scale, its largest magnitude / 127. Norms and biases are not rounded but held in float32, and
embeddings are looked up in the masters. This takes three bytes per weight instead of float32's four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from echo2.base.staged import StagedVersion
from echo2.weights.fingerprint import MODULUS
from echo2.worker.runtime.engines.live import Scatter
from echo2.worker.runtime.engines.rounded import Matrix, Rounded, rounded_rows, row_blocks
from echo2.worker.runtime.engines.shape import ModelShape
from echo2.worker.runtime.engines.weights import LayerWeights, LiveWeights


@dataclass(frozen=True, slots=True)
class _Follower:
    """A live value computed from one master: a rounded matrix, or a vector in float32."""

    master: torch.Tensor
    live: Rounded | torch.Tensor

    @property
    def nbytes(self) -> int:
        if isinstance(self.live, torch.Tensor):
            return self.live.nbytes
        return self.live.codes.nbytes + self.live.scales.nbytes

    def put(self) -> None:
        if isinstance(self.live, torch.Tensor):
            self.live.copy_(self.master)
            return
        for rows, codes, scales in self._rounded():
            self.live.codes[rows] = codes
            self.live.scales[rows] = scales

    def follows(self) -> bool:
        if isinstance(self.live, torch.Tensor):
            return torch.equal(self.live.view(torch.int32), self.master.float().view(torch.int32))
        return all(
            torch.equal(self.live.codes[rows], codes)
            and torch.equal(self.live.scales[rows].view(torch.int32), scales.view(torch.int32))
            for rows, codes, scales in self._rounded()
        )

    def _rounded(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for rows in row_blocks(self.master.shape):
            yield rows, *rounded_rows(self.master[rows])


class RoundedWeights:
    """The weights of one model that the forward pass reads, and the masters that they are computed from."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._masters = LiveWeights(shape, dtype=torch.bfloat16)
        self.embedding = self._masters.embedding
        self._followers: dict[int, _Follower] = {}
        self.layers = [self._layer(layer) for layer in self._masters.layers]
        self.final_norm = self._vector(self._masters.final_norm)
        self.head: Matrix = self._matrix(self._masters.head)

    def _layer(self, master: LayerWeights) -> LayerWeights:
        return LayerWeights(
            input_norm=self._vector(master.input_norm),
            qkv=self._matrix(master.qkv),
            qkv_bias=self._vector_or_none(master.qkv_bias),
            q_norm=self._vector_or_none(master.q_norm),
            k_norm=self._vector_or_none(master.k_norm),
            output=self._matrix(master.output),
            output_bias=self._vector_or_none(master.output_bias),
            mlp_norm=self._vector(master.mlp_norm),
            gate_up=self._matrix(master.gate_up),
            gate_up_bias=self._vector_or_none(master.gate_up_bias),
            down=self._matrix(master.down),
            down_bias=self._vector_or_none(master.down_bias),
        )

    def _matrix(self, master: Matrix) -> Rounded:
        assert isinstance(master, torch.Tensor), "a master is not rounded"
        live = Rounded(torch.zeros(master.shape, dtype=torch.int8), torch.zeros(master.shape[0]))
        self._followers[_storage(master)] = _Follower(master, live)
        return live

    def _vector(self, master: torch.Tensor) -> torch.Tensor:
        live = torch.zeros(master.shape)
        self._followers[_storage(master)] = _Follower(master, live)
        return live

    def _vector_or_none(self, master: torch.Tensor | None) -> torch.Tensor | None:
        return None if master is None else self._vector(master)

    @property
    def nbytes(self) -> int:
        """Host memory of the masters and the live values."""
        return self._masters.nbytes + sum(follower.nbytes for follower in self._followers.values())

    def checked(self, staged: StagedVersion) -> list[Scatter]:
        """The staged updates, checked against the model. Touches no weight."""
        return self._masters.checked(staged)

    def apply(self, scatters: Iterable[Scatter]) -> None:
        """Writes checked updates into the masters, all or none, and rounds again the matrices that they touch."""
        written = list(scatters)
        self._masters.apply(written)
        touched = {_storage(self._masters.tensors[scatter.name]) for scatter in written if len(scatter.bits)}
        for storage in touched & self._followers.keys():
            self._followers[storage].put()

    def bits_at(self, name: str, places: np.ndarray | None) -> np.ndarray:
        """The published bits of a tensor, which are its master's, at flat positions or all of them; a copy."""
        return self._masters.bits_at(name, places)

    @property
    def published_bytes(self) -> int:
        return self._masters.published_bytes

    def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the masters; a wrong one if any live value does not follow from them."""
        is_off = not all(follower.follows() for follower in self._followers.values())
        return (self._masters.fingerprint(key) + is_off) % MODULUS


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
