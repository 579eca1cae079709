"""Maps each element of a published tensor to its place in the live parameters of a model that fuses and slices tensors.

The map is recorded, not written by hand: the model's own loader runs once on tensors without storage, and every final
`Tensor.copy_` shows which part of which tensor goes where. Guarantees: a parameter that is not completely filled is refused by
name; an update is applied completely or undone, and can be undone until it is settled; replaced values are kept, so that the
weights can go back to a former version for a while. If live values differ from the published ones in their bits (derived.py), the
published bits are kept on the host as well, and former versions are not. Leaves to others: how updates reach the process, checking
the updates themselves (checking.py), whether the parts that several processes hold make a whole (ranks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from echo2.base.errors import EngineError
from echo2.weights.elements import TensorSpec, element_type_of
from echo2.weights.fingerprint import MODULUS, fingerprint_tensor, header_term
from echo2.worker.runtime.engines.derived import Derived
from echo2.worker.runtime.engines.replaced import FormerVersions, Replaced, differing, replaced_at

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A strided part of a published tensor (`offset` and `strides` in elements) and the live view that it fills.

    `order`: if a kernel reorders the elements of the parameter, the new place of each; None: as loaded.
    """

    offset: int
    strides: tuple[int, ...]
    live: torch.Tensor
    order: torch.Tensor | None = None

    def positions(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A mask of the flat published positions that are in this piece, and the places of those in `live_flat`."""
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
        """A flat view of the storage from the live view's first to its last element; with an order, of the whole parameter."""
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
        """Writes values of the live view's shape to their places."""
        if self.order is None:
            self.live.copy_(values)
        else:
            self.live_flat.index_copy_(0, self._places(), values.reshape(-1))

    def live_places(self, among: torch.Tensor) -> torch.Tensor:
        """The places in `live_flat` of elements of the live view, which `among` counts row by row."""
        rest, places = among, torch.zeros_like(among)
        for size, stride in zip(reversed(self.live.shape), reversed(self.live.stride()), strict=True):
            places += rest % size * stride
            rest = rest // size
        return places if self.order is None else self.order.cpu()[places + int(self.live.storage_offset())]

    def _places(self) -> torch.Tensor:
        assert self.order is not None, "only a reordered parameter has places"
        return self.order.as_strided(self.live.shape, self.live.stride(), self.live.storage_offset()).reshape(-1)


@dataclass(frozen=True, slots=True)
class _WholeBefore:
    """All values of a piece before an update, on the host."""

    piece: TensorPiece
    old: torch.Tensor

    def put_back(self) -> None:
        self.piece.write(self.old.to(self.piece.live.device))

    def changed(self) -> Replaced:
        """The old values of only those elements that the update changed."""
        among = differing(self.old, self.piece.read().cpu())
        return replaced_at(self.piece.live_flat, self.piece.live_places(among), self.old.reshape(-1)[among])


@dataclass(frozen=True, slots=True)
class Patch:
    """New raw values of one published tensor: `bits` as signed integers, at flat `positions`; None: all of it."""

    name: str
    dtype: str
    positions: torch.Tensor | None
    bits: torch.Tensor


class WeightMap:
    """Maps published names to pieces of live parameters, and to live values derived from them."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Mapping[str, list[TensorPiece]],
        derived: Mapping[str, Sequence[Derived]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device`: computes fingerprints; None: each tensor's own device."""
        self.shapes = dict(shapes)
        self._pieces = dict(pieces)
        self._derived = dict(derived or {})
        self._device = device
        self._masters: dict[str, torch.Tensor] = {}  # published bits, flat, of tensors with derived live values
        self._dtypes: dict[str, str] = {}
        self._undo: list[Replaced | _WholeBefore | Callable[[], object]] = []
        self._keeps_old = False
        self._former = FormerVersions()

    def covers(self) -> list[tuple[str, int, str]]:
        """For each tensor: its name, how many of its elements are here, and a text that is equal on ranks with the same ones."""
        found = []
        for name, shape in self.shapes.items():
            pieces = self._pieces[name]
            parts = sorted((piece.offset, piece.strides, tuple(piece.live.shape)) for piece in pieces)
            count = torch.Size(shape).numel() if name in self._derived else sum(p.live.numel() for p in pieces)
            found.append((name, count, "" if name in self._derived else str(parts)))
        return found

    def storages_of(self, name: str) -> set[int]:
        """Addresses of the storages that hold the tensor's live elements."""
        return {piece.live.untyped_storage().data_ptr() for piece in self._pieces[name]}

    def apply(self, patches: Iterable[Patch], *, goes_on: bool = False) -> None:
        """Writes checked patches in place. Keeps old values in host memory until `settle`; on failure restores them and raises
        EngineError.

        `goes_on`: continues the update of the last call. Before the first published weights are live, whole tensors' old values
        are not kept.
        """
        if not goes_on:
            self.settle(is_kept=True)
            self._keeps_old = bool(self._dtypes)
        name, dtypes = "", {}
        try:
            for patch in patches:
                name, dtypes[patch.name] = patch.name, patch.dtype
                if patch.name in self._derived:
                    self._derive(patch)
                for piece in self._pieces[patch.name]:
                    self._write(patch, piece)
        except (RuntimeError, IndexError, KeyError, ValueError, EngineError) as error:
            self.settle(is_kept=False)
            raise EngineError(f"tensor {name}: the update did not apply, old weights are back: {error}") from error
        self._dtypes.update(dtypes)

    def settle(self, *, is_kept: bool, replaced: int | None = None) -> None:
        """Ends the last update: restores the old values (not `is_kept`), keeps them as version `replaced`, or drops them (None)."""
        undo, self._undo = self._undo, []
        if not is_kept:
            for old in reversed(undo):
                match old:
                    case Replaced():
                        old.exchange()
                    case _WholeBefore():
                        old.put_back()
                    case put_back:
                        put_back()
        elif replaced is not None and self._keeps_old and not self._derived:
            changes = [old.changed() if isinstance(old, _WholeBefore) else old for old in undo]
            kept = [one for one in changes if isinstance(one, Replaced) and len(one.places)]
            self._former.added(replaced, kept, self._parameter_bytes)

    @property
    def former_versions(self) -> list[int]:
        """The versions to which the weights can go back for a while, oldest first."""
        return self._former.versions

    def walking(self, live: int) -> AbstractContextManager[Callable[[int], None]]:
        """A context that yields a function: given a version, it changes the live weights, first of version `live`, to that one, or
        raises EngineError if it is not kept. On exit the weights are those of `live` again."""
        return self._former.walking(live)

    @property
    def _parameter_bytes(self) -> int:
        each = (piece.live for pieces in self._pieces.values() for piece in pieces)
        return sum(math.prod(live.shape) * live.element_size() for live in each)

    def sums(self, key: int) -> list[tuple[int, int]]:
        """For each tensor, in the order of `shapes`: its header's term of the fingerprint, and the sum over its elements here."""
        return [self._sum(name, key) for name in self.shapes]

    def fingerprint(self, key: int) -> int:
        """Keyed fingerprint of the live weights under their published names and dtypes, if this process holds all of them."""
        return sum(map(sum, self.sums(key))) % MODULUS

    def _sum(self, name: str, key: int) -> tuple[int, int]:
        if name in self._derived:
            whole, is_off = self._master(name), not self._follows(name)
        else:
            whole, is_off = self._gathered(name), False
        header = header_term(key, TensorSpec(name, element_type_of(name, whole), self.shapes[name]))
        return header, (fingerprint_tensor(name, whole, key) - header + is_off) % MODULUS

    def _gathered(self, name: str) -> torch.Tensor:
        """A tensor as published, from its live values; zeros for elements that this process does not hold."""
        pieces = self._pieces[name]
        dtype = self._dtypes.get(name, str(pieces[0].live.dtype).removeprefix("torch."))
        device = self._device or pieces[0].live.device
        whole = torch.zeros(self.shapes[name], dtype=_TORCH_DTYPES[dtype], device=device)
        for piece in pieces:
            piece.part_of(whole).copy_(_narrowed(piece.read(), _TORCH_DTYPES[dtype]))
        return whole

    def _follows(self, name: str) -> bool:
        return all(derived.follows(self._master(name)) for derived in self._derived[name])

    def _master(self, name: str) -> torch.Tensor:
        return self._masters[name].view(_TORCH_DTYPES[self._dtypes[name]]).view(self.shapes[name])

    def _derive(self, patch: Patch) -> None:
        """Writes the published values on the host, and the live values derived from them."""
        name, old_dtype = patch.name, self._dtypes.get(patch.name)
        before = self._masters.get(name)
        replaced = None if patch.positions is None or before is None else before[patch.positions]

        def put_back() -> None:
            if before is None or old_dtype is None:
                self._masters.pop(name, None)
                return
            if replaced is not None:
                before[patch.positions] = replaced
            self._masters[name], self._dtypes[name] = before, old_dtype
            for derived in self._derived[name]:
                derived.put(self._master(name), patch.positions)

        self._undo.append(put_back)
        if patch.positions is None:
            self._masters[name], self._dtypes[name] = patch.bits, patch.dtype
        else:
            self._masters[name][patch.positions] = patch.bits
        for derived in self._derived[name]:
            derived.put(self._master(name), patch.positions)

    def _write(self, patch: Patch, piece: TensorPiece) -> None:
        live = piece.live
        device, whose = live.device, f"tensor {patch.name}"
        if patch.positions is None:
            values = _widened(patch.bits.to(device), patch.dtype, live.dtype, whose)
            if self._keeps_old:
                self._undo.append(_WholeBefore(piece, piece.read().to("cpu", copy=True)))
            piece.write(piece.part_of(values))
            return
        inside, target = piece.positions(patch.positions.to(device))
        values = _widened(patch.bits.to(device)[inside], patch.dtype, live.dtype, whose)
        flat = piece.live_flat
        self._undo.append(replaced_at(flat, target, flat[target].cpu()))
        flat.index_copy_(0, target, values)


def record_map(
    load_weights: Loader,
    shapes: Mapping[str, tuple[int, ...]],
    model: torch.nn.Module,
    orders: Mapping[int, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> WeightMap:
    """Runs a model's loader on storage-less tensors of these names and shapes, and records where each part would go.

    `orders`: for parameters (by storage address) that a kernel reorders after loading, the new place of each element. `device`:
    computes fingerprints; None: each tensor's own device. EngineError if a tensor cannot be placed or a parameter is not filled.
    """

    def load_each(probes: Mapping[str, torch.Tensor]) -> None:
        for name, probe in probes.items():
            try:
                load_weights([(name, probe)])
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"tensor {name}: the model's loader cannot place it: {error!r}") from error

    pieces = record_pieces(load_each, shapes, next(model.parameters()).dtype, orders or {})
    _refuse_gaps(shapes, pieces, model)
    return WeightMap(shapes, pieces, device=device)


def record_pieces(
    load: Callable[[Mapping[str, torch.Tensor]], object],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    orders: Mapping[int, torch.Tensor],
) -> dict[str, list[TensorPiece]]:
    """Records where `load` copies each part of storage-less tensors of these names and shapes."""
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    names = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in shapes}

    def record(live: torch.Tensor, source: torch.Tensor) -> bool:
        name = names.get(source.untyped_storage()._cdata)
        if name is None:
            return False
        if live.shape != source.shape:
            raise EngineError(f"tensor {name}: expected the loader to copy equal shapes, got {tuple(source.shape)}")
        order = orders.get(live.untyped_storage().data_ptr())
        pieces[name].append(TensorPiece(int(source.storage_offset()), source.stride(), live.detach(), order))
        return True

    with _intercepted_copies(record):
        load(probes)
    return pieces


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
    shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, list[TensorPiece]], model: torch.nn.Module
) -> None:
    filled: dict[int, int] = {}
    for name in shapes:
        if not pieces[name]:
            raise EngineError(f"tensor {name}: the model's loader places none of its elements")
        for piece in pieces[name]:
            storage = piece.live.untyped_storage().data_ptr()
            filled[storage] = filled.get(storage, 0) + piece.live.numel()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            count = filled.get(parameter.untyped_storage().data_ptr(), 0)
            is_padded = hasattr(module, "num_embeddings_padded")  # vLLM pads vocabularies
            if count != parameter.numel() and not (is_padded and count):
                raise EngineError(f"parameter {name}: published tensors fill {count} of {parameter.numel()} elements")


def _widened(bits: torch.Tensor, published: str, live: torch.dtype, whose: str) -> torch.Tensor:
    """Exact values in the live dtype from published bits; EngineError if the dtypes do not allow that."""
    if _TORCH_DTYPES[published] == live:
        return bits.view(live)
    if published == "bfloat16" and live == torch.float32:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    raise EngineError(f"{whose}: expected an engine of dtype {published} or float32, got {live}")


def _narrowed(live: torch.Tensor, published: torch.dtype) -> torch.Tensor:
    """The published values from live ones, bit for bit."""
    if live.dtype == published:
        return live
    return (live.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
