"""torch.distributed.checkpoint's safetensors files, written with checksums and verified while reading.

Guarantees: each rank computes the checksums of its own file as it writes one tensor after another, so that writing needs no extra
memory; no tensor is used before its blocks are verified. Leaves to others: which tensors, completeness of a checkpoint
(checkpoint), the checksums themselves (sums).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DATA_OFFSETS_KEY,
    DCP_VERSION_KEY,
    DEFAULT_EXTRA_METADATA_KEY,
    DTYPE_KEY,
    DTYPE_MAP,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    SHAPE_KEY,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from echo2.learner.runtime.lending import LentTensors
from echo2.learner.runtime.sums import CheckedFile, FileSums, SummingFile, part_of, written_with_sums
from echo2.outside import here

_HEADER_LENGTH = struct.Struct("<Q")  # start of a safetensors file: size of the JSON that follows
_ALIGNMENT = 8
_DTYPES = {dtype: name for name, dtype in DTYPE_MAP.items()}


class SummingWriter(HuggingFaceStorageWriter):
    """Writes this rank's file, and its checksums beside it. `lent`: those of the saved tensors that are borrowed from the trainer,
    which may change them once they are written (lending)."""

    def __init__(self, folder: Path, lent: LentTensors | None = None) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self._lent = lent or LentTensors({})
        self.written: list[str] = []
        """Names of this rank's files."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes tensor by tensor. torch's own method first serialises all tensors into one block and copies that, which takes
        twice the checkpoint's size in memory."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._written(plan, planner) if plan.items else [])
        return done

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        items = sorted(plan.items, key=lambda item: (-_data_of(item).properties.dtype.itemsize, item.index.fqn))
        results, begin = [], 0
        with written_with_sums(self._folder / name) as file:
            file.write(_header_of(items))
            for item in items:
                size = _bytes_of(item)
                with self._lent.taken(item.index.fqn) as lent:
                    tensor = planner.resolve_data(item) if lent is None else lent
                    assert isinstance(tensor, Tensor), "a checkpoint's state is of tensors"
                    _write(file, tensor, size)
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
                begin += size
            here().files.sync(file.fileno())
        self.written = [name, part_of(name)]
        return results


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "a checkpoint's state is of tensors"
    return item.tensor_data


def _bytes_of(item: WriteItem) -> int:
    data = _data_of(item)
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _header_of(items: Sequence[WriteItem]) -> bytes:
    """Header of a safetensors file: each tensor's place in the file and, for torch's reader, its offset in the whole tensor."""
    offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: list(_data_of(item).chunk.offsets)} for item in items}
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
    header: dict[str, object] = {DEFAULT_EXTRA_METADATA_KEY: metadata}
    begin = 0
    for item in items:
        data, end = _data_of(item), begin + _bytes_of(item)
        header[item.index.fqn] = {
            DTYPE_KEY: _DTYPES[data.properties.dtype], SHAPE_KEY: list(data.chunk.sizes), DATA_OFFSETS_KEY: [begin, end],
        }  # fmt: skip
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _HEADER_LENGTH.pack(len(text)) + text


def _write(file: SummingFile, tensor: Tensor, size: int) -> None:
    rows = tensor.detach().cpu().contiguous()
    assert rows.nbytes == size, "a tensor is as large as its plan says"
    if size:
        data: memoryview = rows.view(-1).view(torch.uint8).numpy().data
        file.write(data)


class CheckedReader(HuggingFaceStorageReader):
    """Reads a checkpoint and verifies it; with `sums` None (written by an older release), reads it unverified."""

    def __init__(self, folder: Path, sums: Mapping[str, FileSums] | None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._files = {name: CheckedFile(folder / name, said) for name, said in (sums or {}).items()}

    def read_metadata(self) -> Metadata:
        for name, file in self._files.items():
            if name.endswith(".safetensors"):
                file.check_to(_data_start(self._folder / name))
        return super().read_metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for path, items in self._items_by_file(plan).items():
            ends = _tensor_ends(path)
            checked = self._files.get(path.name)
            with safe_open(str(path), framework="pt") as file:
                for item in sorted(items, key=lambda item: ends[item.storage_index.fqn]):
                    if checked is not None:
                        checked.check_to(ends[item.storage_index.fqn])
                    self._process_read_request(file, item, planner)
            if checked is not None:
                checked.check_all()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _items_by_file(self, plan: LoadPlan) -> dict[Path, list[ReadItem]]:
        items: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(Path(self.storage_data[item.storage_index].relative_path), []).append(item)
        return items


def _data_start(path: Path) -> int:
    with path.open("rb") as file:
        length: int = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size).ljust(_HEADER_LENGTH.size, b"\0"))[0]
    return min(_HEADER_LENGTH.size + length, path.stat().st_size)


def _tensor_ends(path: Path) -> dict[str, int]:
    """File offset of the end of each tensor's bytes."""
    start = _data_start(path)
    with path.open("rb") as file:
        header = json.loads(file.read(start)[_HEADER_LENGTH.size :])
    return {name: start + said["data_offsets"][1] for name, said in header.items() if name != "__metadata__"}
