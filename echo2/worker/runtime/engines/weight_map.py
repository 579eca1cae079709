"""Where each element of a published tensor lies in the live parameters of a model that fuses and slices them.

The map is not written down by hand: a model's own loader is run once on tensors without storage, and every final
`Tensor.copy_` says which part of which tensor would go where. Guarantees: a tensor whose elements do not all arrive,
and a parameter that nothing fills, are refused by name; an update is applied whole or undone. Leaves to others: how
updates reach the process, and checks of the updates themselves (checking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from echo2.base.errors import EngineError
from echo2.broadcast.delta.fingerprint import MODULUS, fingerprint_tensor

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided part of a published tensor (offset and strides in it) and the live view that it fills.

    `order`: where a kernel keeps the elements of the parameter in another order, the place of each; None: as loaded.
    """

    offset: int
    strides: tuple[int, ...]
    live: torch.Tensor
    order: torch.Tensor | None = None

    def positions(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the flat positions of the published tensor are in this piece, and where in `live_flat` they are."""
        rest = flat - self.offset
        inside = rest >= 0
        target = torch.zeros_like(flat)
        axes = sorted(zip(self.strides, self.live.shape, self.live.stride(), strict=True), reverse=True)
        for stride, size, live_stride in axes:
            if size == 1:
                continue
            at = rest // stride
            inside &= at < size
            target += at * live_stride
            rest = rest - at * stride
        inside &= rest == 0
        target = target[inside]
        return inside, target if self.order is None else self.order[target + int(self.live.storage_offset())]

    @property
    def live_flat(self) -> torch.Tensor:
        """The storage of the live view from its first to its last element; with an order, all of the parameter."""
        if self.order is not None:
            return self.live.as_strided((self.order.numel(),), (1,), 0)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.live.shape, self.live.stride(), strict=True))
        return self.live.as_strided((span,), (1,))

    def part_of(self, published: torch.Tensor) -> torch.Tensor:
        """This part of a whole published tensor, in the live view's shape."""
        return published.as_strided(self.live.shape, self.strides, self.offset)

    def read(self) -> torch.Tensor:
        """The live values in the published order."""
        return self.live if self.order is None else self.live_flat[self._places()].reshape(self.live.shape)

    def write(self, values: torch.Tensor) -> None:
        """Puts values of the live view's shape where they belong."""
        if self.order is None:
            self.live.copy_(values)
        else:
            self.live_flat.index_copy_(0, self._places(), values.reshape(-1))

    def _places(self) -> torch.Tensor:
        assert self.order is not None, "only a reordered parameter has places"
        return self.order.as_strided(self.live.shape, self.live.stride(), self.live.storage_offset()).reshape(-1)


@dataclass(frozen=True, slots=True)
class Patch:
    """New values of one published tensor, raw: `bits` as signed integers, at flat `positions` or (None) all of it."""

    name: str
    dtype: str
    positions: torch.Tensor | None
    bits: torch.Tensor


class WeightMap:
    """Published names to pieces of live parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, list[Piece]]) -> None:
        self.shapes = dict(shapes)
        self._pieces = dict(pieces)
        self._dtypes: dict[str, str] = {}

    @property
    def piece_count(self) -> int:
        return sum(map(len, self._pieces.values()))

    def apply(self, patches: Iterable[Patch]) -> None:
        """Writes checked patches in place. Old values are kept in host memory meanwhile and come back on failure."""
        undo: list[Callable[[], object]] = []
        name, dtypes = "", {}
        try:
            for patch in patches:
                name, dtypes[patch.name] = patch.name, patch.dtype
                for piece in self._pieces[patch.name]:
                    self._write(patch, piece, undo)
        except (RuntimeError, IndexError, KeyError, EngineError) as error:
            for put_back in reversed(undo):
                put_back()
            raise EngineError(f"tensor {name}: the update did not apply, old weights are back: {error}") from error
        self._dtypes.update(dtypes)

    def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the live weights under their published names and dtypes."""
        total = 0
        for name, pieces in self._pieces.items():
            dtype = self._dtypes.get(name, str(pieces[0].live.dtype).removeprefix("torch."))
            whole = torch.empty(self.shapes[name], dtype=_TORCH_DTYPES[dtype], device=pieces[0].live.device)
            for piece in pieces:
                piece.part_of(whole).copy_(_narrowed(piece.read(), _TORCH_DTYPES[dtype]))
            total += fingerprint_tensor(name, whole, key)
        return int(total % MODULUS)

    def _write(self, patch: Patch, piece: Piece, undo: list[Callable[[], object]]) -> None:
        live = piece.live
        device, whose = live.device, f"tensor {patch.name}"
        if patch.positions is None:
            values = _widened(patch.bits.to(device), patch.dtype, live.dtype, whose)
            old = piece.read().to("cpu", copy=True)
            undo.append(lambda: piece.write(old.to(device)))
            piece.write(piece.part_of(values))
            return
        inside, target = piece.positions(patch.positions.to(device))
        values = _widened(patch.bits.to(device)[inside], patch.dtype, live.dtype, whose)
        flat = piece.live_flat
        replaced = flat[target].cpu()
        undo.append(lambda: flat.index_copy_(0, target, replaced.to(device)))
        flat.index_copy_(0, target, values)


def record_map(
    load_weights: Loader,
    shapes: Mapping[str, tuple[int, ...]],
    model: torch.nn.Module,
    orders: Mapping[int, torch.Tensor] | None = None,
) -> WeightMap:
    """Runs a model's loader on storage-less tensors of these names and shapes, and keeps where everything would go.

    `orders`: for parameters (by the address of their storage) that a kernel reorders after loading, the place of each
    element.
    """
    reordered = orders or {}
    dtype = next(model.parameters()).dtype
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    names = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}

    def record(live: torch.Tensor, source: torch.Tensor) -> bool:
        name = names.get(source.untyped_storage()._cdata)
        if name is None:
            return False
        if live.shape != source.shape:
            raise EngineError(f"tensor {name}: expected the loader to copy equal shapes, got {tuple(source.shape)}")
        order = reordered.get(live.untyped_storage().data_ptr())
        pieces[name].append(Piece(int(source.storage_offset()), source.stride(), live.detach(), order))
        return True

    with _intercepted_copies(record):
        for name, probe in probes.items():
            try:
                load_weights([(name, probe)])
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"tensor {name}: the model's loader cannot place it: {error!r}") from error
    _refuse_gaps(shapes, pieces, model)
    return WeightMap(shapes, pieces)


@contextmanager
def _intercepted_copies(record: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[None]:
    original = torch.Tensor.copy_

    def copy(live: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return live if record(live, source) else original(live, source, non_blocking)

    torch.Tensor.copy_ = copy  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            yield
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]


def _refuse_gaps(
    shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, list[Piece]], model: torch.nn.Module
) -> None:
    filled: dict[int, int] = {}
    for name, shape in shapes.items():
        mapped = sum(piece.live.numel() for piece in pieces[name])
        expected = torch.Size(shape).numel()
        if mapped != expected:
            raise EngineError(f"tensor {name}: the model's loader places {mapped} of its {expected} elements")
        for piece in pieces[name]:
            storage = piece.live.untyped_storage().data_ptr()
            filled[storage] = filled.get(storage, 0) + piece.live.numel()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            count = filled.get(parameter.untyped_storage().data_ptr(), 0)
            is_padded = hasattr(module, "num_embeddings_padded")  # vocabularies are rounded up
            if count != parameter.numel() and not (is_padded and count):
                raise EngineError(f"parameter {name}: published tensors fill {count} of {parameter.numel()} elements")


def _widened(bits: torch.Tensor, published: str, live: torch.dtype, whose: str) -> torch.Tensor:
    """Values of the live dtype from published bits, exactly."""
    if _TORCH_DTYPES[published] == live:
        return bits.view(live)
    if published == "bfloat16" and live == torch.float32:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    raise EngineError(f"{whose}: expected an engine of dtype {published} or float32, got {live}")


def _narrowed(live: torch.Tensor, published: torch.dtype) -> torch.Tensor:
    """The published value back from a live one, bit for bit."""
    if live.dtype == published:
        return live
    return (live.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
