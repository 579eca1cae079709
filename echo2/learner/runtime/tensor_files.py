"""torch.distributed.checkpoint's safetensors files, written with checksums and compared while they are read.

Guarantees: each rank sums its own file as it writes it; no tensor is given out before the blocks that it lies in were
compared. Leaves to others: which tensors, where a checkpoint is whole (checkpoint), the sums themselves (sums).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from echo2.learner.runtime.sums import CheckedFile, FileSums, written_with_sums

_HEADER_LENGTH = struct.Struct("<Q")  # of a safetensors file: the size of the JSON that follows


class _SummingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "tensors are written once, from the front"
        with written_with_sums(Path(path)) as file:
            yield file


class SummingWriter(HuggingFaceStorageWriter):
    """Leaves the sums of this rank's files beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.fs = _SummingFileSystem()


class CheckedReader(HuggingFaceStorageReader):
    """Reads what was written and nothing else; with `sums` None, as an older release left it, whatever is there."""

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
    """Where each tensor's bytes end in the file."""
    start = _data_start(path)
    with path.open("rb") as file:
        header = json.loads(file.read(start)[_HEADER_LENGTH.size :])
    return {name: start + said["data_offsets"][1] for name, said in header.items() if name != "__metadata__"}
