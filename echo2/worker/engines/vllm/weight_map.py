"""Maps each element of a published tensor to its place in the live parameters of a model that fuses and slices tensors.

The map is recorded, not written by hand: the model's own loader runs once on tensors without storage, and every final
`Tensor.copy_` shows which part of which tensor goes where. Guarantees: a parameter that is not completely filled is refused by
name; an update is applied completely or undone, and can be undone until it is settled. If live values differ from the published
ones in their bits (a `factor`, a `RoundedLayer`), the published bits are kept on the host as well; a rounded layer that an update
touches is rounded again from its whole master, by the same function as at loading, and undoing an update rounds the old masters
again. Which layers are rounded again depends only on an update's names: if several processes hold parts of a layer, all of them
round it, in the same order, so that they can agree on scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echo2.base.errors import EngineError
from echo2.weights.elements import TensorSpec, element_type_of
from echo2.weights.fingerprint import MODULUS, fingerprint_tensor, header_term

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A strided part of a published tensor (`offset` and `strides` in elements) and the live view that it fills. `factor`: the live
    values are this part times it, in their own dtype; None: they are the published values."""

    offset: int
    strides: tuple[int, ...]
    live: torch.Tensor
    factor: float | None = None

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
        return inside, target[inside]

    @property
    def live_flat(self) -> torch.Tensor:
        """A flat view of the storage from the live view's first to its last element."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.live.shape, self.live.stride(), strict=True))
        return self.live.as_strided((span,), (1,))

    def part_of(self, published: torch.Tensor) -> torch.Tensor:
        """This part of a whole published tensor, in the live view's shape."""
        return published.as_strided(self.live.shape, self.strides, self.offset)

    def product(self, published: torch.Tensor) -> torch.Tensor:
        """The live values of a piece with a factor."""
        return (self.part_of(published).float() * (self.factor or 0.0)).to(self.live.dtype)


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """`live`: the tensors that the layer computes with, by parameter name; `rounded`: computes the same tensors from a master."""

    name: str
    master: torch.Tensor
    live: Mapping[str, torch.Tensor]
    rounded: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]

    def put(self) -> None:
        for name, values in self.rounded(self.master).items():
            self.live[name].copy_(values)

    def follows(self) -> bool:
        """Whether the live values equal, bit for bit, what `put` would write."""
        return all(_are_equal(self.live[name], values) for name, values in self.rounded(self.master).items())


def _are_equal(live: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the bits are the same, so that NaNs compare equal."""
    return bool(torch.equal(*(each.contiguous().view(torch.uint8) for each in (live, values))))


@dataclass(frozen=True, slots=True)
class Patch:
    """New raw values of one published tensor: `bits` as signed integers, at flat `positions`; None: all of it."""

    name: str
    dtype: str
    positions: torch.Tensor | None
    bits: torch.Tensor


class WeightMap:
    """Maps published names to pieces of live parameters and of the masters of rounded `layers`. `device`: computes fingerprints;
    None: each tensor's own device."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Mapping[str, list[TensorPiece]],
        device: torch.device | None = None,
        layers: Sequence[RoundedLayer] = (),
    ) -> None:
        self.shapes = dict(shapes)
        self._pieces, self._device = dict(pieces), device
        self._layers = {layer.master.untyped_storage().data_ptr(): layer for layer in layers}
        self._touched: set[int] = set()  # storages that the update has written to
        self._rounded: list[RoundedLayer] = []
        self._derived = {name for name, parts in pieces.items() if any(p.factor is not None for p in parts)}
        self._masters: dict[str, torch.Tensor] = {}  # published bits, flat, of tensors with derived live values
        self._dtypes: dict[str, str] = {}
        self._undo: list[Callable[[], object]] = []
        self._keeps_old = False

    def covers(self) -> list[tuple[str, int, str]]:
        """For each tensor: its name, how many of its elements are here, and a text that is equal on ranks with the same ones."""
        rows = []
        for name, shape in self.shapes.items():
            pieces = self._pieces[name]
            parts = sorted((piece.offset, piece.strides, tuple(piece.live.shape)) for piece in pieces)
            count = torch.Size(shape).numel() if name in self._derived else sum(p.live.numel() for p in pieces)
            rows.append((name, count, "" if name in self._derived else str(parts)))
        return rows

    def _storages_of(self, name: str) -> set[int]:
        return {piece.live.untyped_storage().data_ptr() for piece in self._pieces[name]}

    def apply(self, patches: Iterable[Patch], *, goes_on: bool = False) -> None:
        """Writes checked patches in place; rounded values stay as they are until `follow`. Keeps old values in host memory
        until `settle`; on failure restores them and raises EngineError. `goes_on`: continues the update of the last call.
        Before the first published weights are live, whole tensors' old values are not kept."""
        if not goes_on:
            self.settle(is_kept=True)
            self._keeps_old = bool(self._dtypes)
            self._touched = set()
        name, dtypes = "", {}
        try:
            for patch in patches:
                name, dtypes[patch.name] = patch.name, patch.dtype
                if len(patch.bits):
                    self._touched |= self._storages_of(name)
                if name in self._derived:
                    self._derive(patch)
                    continue
                for piece in self._pieces[name]:
                    self._write(patch, piece)
        except (RuntimeError, IndexError, KeyError, ValueError, EngineError) as error:
            self.settle(is_kept=False)
            raise EngineError(f"tensor {name}: the update did not apply, old weights are back: {error}") from error
        self._dtypes.update(dtypes)

    def follow(self) -> None:
        """Rounds again the layers that the update touched. Call `settle` afterwards, whether or not this succeeds."""
        self._rounded = [layer for storage, layer in self._layers.items() if storage in self._touched]
        for layer in self._rounded:
            layer.put()

    def settle(self, *, is_kept: bool) -> None:
        """Ends the last update: restores the old values (not `is_kept`), or drops them."""
        undo, self._undo = self._undo, []
        rounded, self._rounded = self._rounded, []
        if not is_kept:
            for put_back in (*reversed(undo), *(layer.put for layer in rounded)):
                put_back()

    def sums(self, key: int) -> list[tuple[int, int]]:
        """For each tensor, in the order of `shapes`: its header's term of the fingerprint, and the sum over its elements here; a
        wrong one if live values do not follow from the published ones."""
        is_off = {storage for storage, layer in self._layers.items() if not layer.follows()}
        return [self._sum(name, key, bool(is_off & self._storages_of(name))) for name in self.shapes]

    def _sum(self, name: str, key: int, is_off: bool) -> tuple[int, int]:
        if name in self._derived:
            whole = self._master(name)
            is_off = not all(_are_equal(piece.live.cpu(), piece.product(whole)) for piece in self._pieces[name])
        else:
            whole = self._gathered(name)
        header = header_term(key, TensorSpec(name, element_type_of(name, whole), self.shapes[name]))
        return header, (fingerprint_tensor(name, whole, key) - header + is_off) % MODULUS

    def _gathered(self, name: str) -> torch.Tensor:
        """A tensor as published, from its live values; zeros for elements that this process does not hold."""
        pieces = self._pieces[name]
        dtype = _TORCH_DTYPES[self._dtypes.get(name, str(pieces[0].live.dtype).removeprefix("torch."))]
        whole = torch.zeros(self.shapes[name], dtype=dtype, device=self._device or pieces[0].live.device)
        for piece in pieces:
            live = piece.live
            if live.dtype != dtype:
                live = (live.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
            piece.part_of(whole).copy_(live)
        return whole

    def _master(self, name: str) -> torch.Tensor:
        return self._masters[name].view(_TORCH_DTYPES[self._dtypes[name]]).view(self.shapes[name])

    def _derive(self, patch: Patch) -> None:
        name, old_dtype = patch.name, self._dtypes.get(patch.name)
        before = self._masters.get(name)
        replaced = None if patch.positions is None or before is None else before[patch.positions]

        def put() -> None:
            for piece in self._pieces[name]:
                piece.live.copy_(piece.product(self._master(name)))

        def put_back() -> None:
            if before is None or old_dtype is None:
                self._masters.pop(name, None)
                return
            if replaced is not None:
                before[patch.positions] = replaced
            self._masters[name], self._dtypes[name] = before, old_dtype
            put()

        self._undo.append(put_back)
        if patch.positions is None:
            self._masters[name], self._dtypes[name] = patch.bits, patch.dtype
        else:
            self._masters[name][patch.positions] = patch.bits
        put()

    def _write(self, patch: Patch, piece: TensorPiece) -> None:
        live = piece.live
        device, where = live.device, f"tensor {patch.name}"
        if patch.positions is None:
            values = _widened(patch.bits.to(device), patch.dtype, live.dtype, where)
            if self._keeps_old:
                self._undo.append(partial(live.copy_, live.to("cpu", copy=True)))
            live.copy_(piece.part_of(values))
            return
        inside, target = piece.positions(patch.positions.to(device))
        values = _widened(patch.bits.to(device)[inside], patch.dtype, live.dtype, where)
        flat = piece.live_flat
        # Old values wait on the host, their places in 4 bytes if those suffice.
        old, places = flat[target].cpu(), target.to("cpu", torch.int32 if flat.numel() <= 1 << 31 else torch.int64)
        self._undo.append(lambda: flat.index_copy_(0, places.to(device).long(), old.to(device)))
        flat.index_copy_(0, target, values)


def record_map(
    load_weights: Loader,
    shapes: Mapping[str, tuple[int, ...]],
    model: torch.nn.Module,
    device: torch.device | None = None,
    config: Path | None = None,
    layers: Sequence[RoundedLayer] = (),
) -> WeightMap:
    """Runs a model's loader on storage-less tensors of these names and shapes, and records where each part would go. `device`,
    `layers`: as for the map. `config`: a folder with the model's config.json, for a loader that reads the model's files.
    EngineError if a tensor cannot be placed, a parameter is not filled, or the loader computes what it keeps from a tensor: no
    change would reach that."""

    def load_each(probes: Mapping[str, torch.Tensor]) -> None:
        for name, probe in (probes if config is None else in_files(probes, config)).items():
            try:
                load_weights([(name, probe)])
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"tensor {name}: the model's loader cannot place it: {error!r}") from error

    live = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    pieces = record_pieces(load_each, shapes, next(model.parameters()).dtype, live)
    _refuse_gaps(shapes, pieces, model)
    return WeightMap(shapes, pieces, device, layers)


def record_pieces(
    load: Callable[[Mapping[str, torch.Tensor]], object],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    storages: Collection[int] = (),
) -> dict[str, list[TensorPiece]]:
    """Records where `load` copies each part of storage-less tensors of these names and shapes. Nothing else may be copied into
    these `storages`."""
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    names = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in shapes}

    def record(live: torch.Tensor, source: torch.Tensor) -> bool:
        name = names.get(source.untyped_storage()._cdata)
        if name is None and live.untyped_storage()._cdata in storages:
            raise RuntimeError("it computes what it keeps, which changes would not reach")
        if name is None:
            return False
        if live.shape != source.shape:
            raise EngineError(f"tensor {name}: expected the loader to copy equal shapes, got {tuple(source.shape)}")
        pieces[name].append(TensorPiece(int(source.storage_offset()), source.stride(), live.detach()))
        return True

    with _intercepted_copies(record):
        load(probes)
    return pieces


def in_files(probes: Mapping[str, torch.Tensor], config: Path) -> Mapping[str, torch.Tensor]:
    """Published tensors as the model's files name and cut them, each a view of its published tensor: transformers fuses experts,
    which files hold one by one and under other names, and the loaders of engines read files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, modules have the names of the files
        return probes
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    original = torch.Tensor.contiguous
    torch.Tensor.contiguous = lambda tensor, **_: tensor  # type: ignore[method-assign]  # parts stay views
    try:
        return dict(revert_weight_conversion(model, dict(probes)))
    finally:
        torch.Tensor.contiguous = original  # type: ignore[method-assign]


@contextmanager
def _intercepted_copies(record: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[None]:
    original, assign = torch.Tensor.copy_, torch.Tensor.__setitem__

    def copy(live: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return live if record(live, source) else original(live, source, non_blocking)

    def copy_part(whole: torch.Tensor, place: Any, source: Any) -> None:
        part = whole[place] if isinstance(source, torch.Tensor) else None
        is_view = part is not None and part.untyped_storage()._cdata == whole.untyped_storage()._cdata
        if part is None or not (is_view and record(part, source)):
            assign(whole, place, source)

    torch.Tensor.copy_, torch.Tensor.__setitem__ = copy, copy_part  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            yield
    finally:
        torch.Tensor.copy_, torch.Tensor.__setitem__ = original, assign  # type: ignore[method-assign]


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
            storage = parameter.untyped_storage()
            count, whole = filled.get(storage.data_ptr(), 0), storage.nbytes() // parameter.element_size()
            is_padded = hasattr(module, "num_embeddings_padded")  # vLLM pads vocabularies
            if count not in (parameter.numel(), whole) and not (is_padded and count):
                raise EngineError(f"parameter {name}: published tensors fill {count} of {parameter.numel()} elements")


def _widened(bits: torch.Tensor, published: str, live: torch.dtype, where: str) -> torch.Tensor:
    """Exact values in the live dtype from published bits; EngineError if the dtypes do not allow that."""
    if _TORCH_DTYPES[published] == live:
        return bits.view(live)
    if published == "bfloat16" and live == torch.float32:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    raise EngineError(f"{where}: expected an engine of dtype {published} or float32, got {live}")
