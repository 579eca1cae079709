"""Live tensors under Hugging Face names, in float32 or as bf16 masters, updated in place from raw published bits.

Guarantees: an update is checked completely (names, dtypes, shapes, positions) before a bit is touched; applying it either succeeds
or leaves every weight as it was; bits read back are the published ones (bf16 widens to float32 and narrows again without loss).
Leaves to others: the tensors' memory and its readers (weights, module), verifying the origin of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.staged import StagedVersion, TensorUpdate
from echo2.weights.elements import TensorSpec, element_type_of
from echo2.weights.fingerprint import MODULUS, fingerprint_tensor, header_term, sum_bits
from echo2.worker.runtime.engines.adapter import Adapter
from echo2.worker.runtime.engines.checking import UpdateCheck

PIECE_ELEMENTS = 1 << 16
_BF16 = element_type_of("", torch.zeros(0, dtype=torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Scatter:
    """A checked update: `bits` (patterns of `dtype`) go to the flat `positions` of the tensor; None: to all of it.

    Positions are uint32 if the last one fits: all positions of a version are in memory at the same time.
    """

    name: str
    dtype: str
    positions: np.ndarray | None
    bits: np.ndarray


class LiveTensors:
    """`tensors` are what the forward pass reads, by Hugging Face name, all of one dtype, contiguous and on the CPU.

    With an `adapter`, its tensors are published and checked instead, and `tensors` are computed from the adapter and its base.
    bfloat16 tensors are the masters of rounded weights and accept only bf16 updates.
    """

    def __init__(self, model_type: str, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None = None) -> None:
        self._tensors = tensors
        self._adapter = adapter
        self._takes_float32 = all(tensor.dtype is torch.float32 for tensor in tensors.values())
        self._published = tensors if adapter is None else adapter.tensors
        self._check = UpdateCheck(model_type, {name: tuple(t.shape) for name, t in self._published.items()})
        self._bits = {name: _bits_of(tensor) for name, tensor in self._published.items()}
        if adapter is not None:
            adapter.lay_base(tensors)

    @property
    def nbytes(self) -> int:
        """Host memory of the weights."""
        shared = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors.values()}
        return sum(storage.nbytes() for storage in shared.values())

    def checked(self, staged: StagedVersion) -> list[Scatter]:
        """The staged updates, checked against the model. Touches no weight."""
        return [self._scatter(update, staged.version) for update in self._check.checked(staged)]

    def _scatter(self, update: TensorUpdate, version: Version) -> Scatter:
        if not self._takes_float32 and update.dtype != "bfloat16":
            raise EngineError(
                f"version {version}, tensor {update.name}: the masters of a rounding engine hold bfloat16, got {update.dtype}"
            )
        places = update.indices
        if places is not None and len(places) and places[-1] <= np.iinfo(np.uint32).max:
            places = places.astype(np.uint32)
        return Scatter(update.name, update.dtype, places, update.bits)

    def apply(self, scatters: Iterable[Scatter]) -> None:
        """Writes checked updates in place. On any failure undoes every change and raises EngineError.

        Whole tensors come last, piece by piece and without keeping the old values: they were checked to fit, so that cannot fail.
        """
        undo: list[tuple[Scatter, np.ndarray]] = []
        written: list[Scatter] = []
        try:
            for scatter in sorted(scatters, key=lambda scatter: scatter.positions is None):
                live = self._bits[scatter.name]
                if scatter.positions is None:
                    _put_whole(live, scatter)
                else:
                    undo.append((scatter, _narrowed(scatter, live[scatter.positions])))
                    live[scatter.positions] = _widened(scatter.bits, live.dtype)
                written.append(scatter)
        except (IndexError, ValueError, MemoryError) as error:
            for changed, old in reversed(undo):
                self._bits[changed.name][changed.positions] = _widened(old, self._bits[changed.name].dtype)
            raise EngineError(
                f"tensor {scatter.name}: the update did not apply, old weights are back: {error}"
            ) from error
        self._check.dtypes.update((scatter.name, scatter.dtype) for scatter in written)
        if self._adapter is not None:
            self._adapter.merge(self._tensors, [scatter.name for scatter in written])

    def bits_at(self, name: str, places: np.ndarray | None) -> np.ndarray:
        """The published bits of a tensor, at flat positions or all of them; a copy."""
        live = self._bits[name]
        if live.dtype == np.uint32 and self._check.dtypes.get(name) == "bfloat16":
            live = live.view(np.uint16)[1::2]  # the upper halves
        return live.copy() if places is None else live[places]

    @property
    def published_bytes(self) -> int:
        """Size of all tensors in the dtypes that were published."""
        halves = (self._check.dtypes.get(name) == "bfloat16" for name in self._bits)
        return sum(2 * len(b) if is_half else b.nbytes for b, is_half in zip(self._bits.values(), halves, strict=True))

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every tensor in the dtype that was published."""
        for name, tensor in self._published.items():
            if self._is_widened(name):
                narrow = _upper_halves(self._bits[name]).view(np.int16)
                yield name, torch.from_numpy(narrow).view(torch.bfloat16).reshape(tensor.shape)
            else:
                yield name, tensor

    def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the weights as published; float32 copies of bf16 weights are narrowed piece by piece."""
        return int(sum(self._fingerprint_of(name, tensor, key) for name, tensor in self._published.items()) % MODULUS)

    def _fingerprint_of(self, name: str, tensor: torch.Tensor, key: int) -> int:
        if not self._is_widened(name):
            return fingerprint_tensor(name, tensor, key)
        bits = self._bits[name]
        pieces = (
            sum_bits(name, _upper_halves(bits[begin : begin + PIECE_ELEMENTS]), key, begin)
            for begin in range(0, len(bits), PIECE_ELEMENTS)
        )
        return header_term(key, TensorSpec(name, _BF16, tuple(tensor.shape))) + sum(pieces)

    def _is_widened(self, name: str) -> bool:
        """Whether a tensor was published in bf16 and is held in float32."""
        return self._published[name].dtype == torch.float32 and self._check.dtypes.get(name) == "bfloat16"


def _bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory as unsigned integers, flat."""
    if tensor.dtype == torch.float32:
        return tensor.numpy().reshape(-1).view(np.uint32)
    return tensor.view(torch.int16).numpy().reshape(-1).view(np.uint16)


def _upper_halves(bits: np.ndarray) -> np.ndarray:
    """The bf16 patterns of float32 patterns that were widened from bf16."""
    return bits.view(np.uint16)[1::2].copy()


def _widened(bits: np.ndarray, live_dtype: np.dtype[np.unsignedinteger]) -> np.ndarray:
    """The patterns in the live dtype."""
    return bits if bits.dtype == live_dtype else bits.astype(live_dtype) << 16


def _narrowed(scatter: Scatter, old: np.ndarray) -> np.ndarray:
    """Live patterns in the update's dtype."""
    return old if scatter.bits.dtype == old.dtype else _upper_halves(old)


def _put_whole(live: np.ndarray, scatter: Scatter) -> None:
    """Writes a whole tensor, in pieces that stay in the processor's cache."""
    if scatter.bits.dtype == live.dtype:
        live[:] = scatter.bits
        return
    for begin in range(0, len(live), PIECE_ELEMENTS):
        piece = live[begin : begin + PIECE_ELEMENTS]
        piece[:] = scatter.bits[begin : begin + PIECE_ELEMENTS]
        piece <<= 16
