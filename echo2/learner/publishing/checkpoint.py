"""Checkpoints on disk: masters, optimiser, published weights, ledger; each is either complete or absent.

Guarantees: every rank writes its own rows while training continues; one rename gives a checkpoint's folder its name after all bytes
of all ranks are synced, so a kill at any instant leaves the earlier checkpoints usable; a checkpoint that does not fit on the disk
is refused with `DiskFull` before a byte is written; the newest `kept` remain; any number of ranks can read a checkpoint written by
any number; a checkpoint of which a byte has changed, or is missing, never becomes weights: the one before it is used. Nothing is
pickled: tensors are safetensors, a file for each rank, the rest is JSON, with one hash for each file. Waits for: the other ranks,
in the writers' group, up to that group's timeout.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2.base.errors import NO_ROOM, DiskFull, StateError
from echo2.base.ids import GroupId, Step, Version
from echo2.learner.options import LearnerLimits
from echo2.learner.rollouts.admission import Counts, OpenGroups
from echo2.learner.training.optimiser import put_back_state
from echo2.learner.training.ranks import Ranks, as_sharded, first_row, on_host, own_part
from echo2.learner.training.trainer import LentTensors, Trainer
from echo2.outside import here

FORMAT = 4  # of state.json and the files beside it
STATE_FILE = "state.json"
PIECE_BYTES = 16 << 20  # read, hashed or sent at a time
_MASTERS, _OPTIMISER, _PUBLISHED = "masters|", "optimiser|", "published|"
_DTYPES = {  # safetensors' names
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8",
}  # fmt: skip
_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to resume after `step`, apart from the journal. Tensors are copies in host memory unless `lent` is set.
    `shards`: this rank's masters and optimiser state under `masters|NAME` and `optimiser|NAME|FIELD`. `published`: this rank's
    rows of the published weights. `lent`: tracks those `shards` that still belong to the trainer and are written in place."""

    step: Step
    shards: Mapping[str, Tensor]
    published: Mapping[str, Tensor]
    published_version: Version
    state: Mapping[str, Any]
    ranks: Ranks = field(default_factory=Ranks)
    lent: LentTensors | None = None

    @property
    def masters(self) -> dict[str, Tensor]:
        return {key.removeprefix(_MASTERS): t for key, t in self.shards.items() if key.startswith(_MASTERS)}


def take(trainer: Trainer, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]) -> Checkpoint:
    """Takes a checkpoint between two steps: borrows the tensors if the trainer lends them, else copies them. `published`: the
    weights of `version`, never changed in place. `state`: other JSON state to save, taken at the same step boundary on the
    event loop's thread."""
    counts = {"nonfinite_steps": trainer.nonfinite_steps, "nonfinite_in_a_row": trainer.nonfinite_in_a_row}
    step, whole = Step(trainer.step_count), {**state, **counts}
    if not trainer.lends_state:
        return Checkpoint(step, shards_of(trainer), published, version, whole, trainer.ranks)
    shards = {key: tensor.detach() for key, tensor in _state_tensors(trainer)}
    trainer.lent = LentTensors(shards)
    return Checkpoint(step, shards, published, version, whole, trainer.ranks, trainer.lent)


def shards_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies this rank's shards of masters and optimiser state to host memory."""
    return {key: on_host(tensor, trainer.ranks) for key, tensor in _state_tensors(trainer)}


def _state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, master in trainer.model.masters_by_name().items():
        yield f"{_MASTERS}{name}", master
        for key, value in trainer.optimiser.state.get(master, {}).items():
            yield f"{_OPTIMISER}{name}|{key}", torch.as_tensor(value)


def published_shards(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{_PUBLISHED}{name}": tensor for name, tensor in published.items()}


def put_back(checkpoint: Checkpoint, trainer: Trainer, *, is_given_away: bool = False) -> None:
    """Restores the trainer from `checkpoint`. `is_given_away`: the caller no longer uses the checkpoint's tensors, so the trainer
    may keep them instead of copying."""
    masters = trainer.model.masters_by_name()
    trainer.model.load_masters(checkpoint.masters)
    trainer.step_count = int(checkpoint.step)
    trainer.nonfinite_steps = int(checkpoint.state["nonfinite_steps"])
    trainer.nonfinite_in_a_row = int(checkpoint.state["nonfinite_in_a_row"])
    for key, value in checkpoint.shards.items():
        if not key.startswith(_OPTIMISER):
            continue
        name, _, entry = key.removeprefix(_OPTIMISER).rpartition("|")
        put_back_state(trainer.optimiser, masters[name], entry, value, is_given_away=is_given_away)


def groups_state(groups: OpenGroups, version: Version) -> dict[str, Any]:
    """`version`: the newest, which may be about to be published."""
    return {
        "trained": dict(groups.ledger.trained),
        "tokens_by_lag": {str(lag): count for lag, count in groups.ledger.tokens_by_lag.items()},
        "counts": asdict(groups.counts),
        "published": sorted({*groups.published, version}),
    }


def put_back_groups(state: Mapping[str, Any], step: Step, groups: OpenGroups) -> None:
    """Restores ledger, counts and published versions as of `step`."""
    groups.next_step = step
    groups.ledger.trained = {GroupId(name): Step(int(at)) for name, at in state["trained"].items()}
    groups.ledger.tokens_by_lag = Counter({int(lag): int(n) for lag, n in state["tokens_by_lag"].items()})
    groups.counts = Counts(**state["counts"])
    groups.published = [Version(int(version)) for version in state["published"]]


class CheckpointStore:
    """The checkpoints of one run folder. Only the learner that holds the folder's lock may pass `is_owner`: it deletes
    half-written checkpoints and sets damaged ones aside."""

    def __init__(self, folder: Path, limits: LearnerLimits, is_owner: bool = True) -> None:
        self.folder = folder
        self.limits = limits
        self._is_owner = is_owner
        self._sound: set[Step] = set()
        if not is_owner:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*.partial"):
            shutil.rmtree(torn)
        for replaced in folder.glob("*.replaced"):
            if replaced.with_suffix("").exists():
                shutil.rmtree(replaced)
            else:  # a kill came before the new one had its name
                replaced.rename(replaced.with_suffix(""))

    def steps(self) -> list[Step]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(Step(int(path.name.removeprefix("step-"))) for path in self.folder.glob("step-????????"))

    def newest(self) -> Step | None:
        """The newest checkpoint that is as it was written, compared byte by byte; None if there are no checkpoints. Raises the
        newest one's `StateError` if all are damaged."""
        first: StateError | None = None
        for step in reversed(self.steps()):
            try:
                if step not in self._sound:
                    check(self.folder_of(step))
            except StateError as error:
                _log.error("%s. The checkpoint before it is used, and batches since are trained on again", error)
                first = first or error
                continue
            self._sound.add(step)
            for damaged in [other for other in self.steps() if other > step] if self._is_owner else []:
                aside = self.folder / f"damaged-{damaged:08d}"
                shutil.rmtree(aside, ignore_errors=True)  # the same step may have been damaged before
                self.folder_of(damaged).rename(aside)
            return step
        if first is not None:
            raise StateError(f"{first}. There is no sound checkpoint: restore this folder from a backup") from first
        return None

    def folder_of(self, step: Step) -> Path:
        return self.folder / f"step-{step:08d}"

    def begin(self, checkpoint: Checkpoint) -> Path:
        """Creates and returns the folder that all ranks then write to; raises `DiskFull` if the checkpoint does not fit."""
        tensors = (*checkpoint.shards.values(), *checkpoint.published.values())
        self.check_room(sum(t.numel() * t.element_size() for t in tensors))
        partial = self.folder_of(checkpoint.step).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def check_room(self, tensor_bytes: int) -> None:
        """Raises `DiskFull` unless a checkpoint of this size, plus the reserve, fits on the disk."""
        needed = tensor_bytes + self.limits.free_bytes_min
        free = here().files.free_bytes(self.folder)
        if free < needed:
            raise DiskFull(
                f"checkpoint: expected {needed} bytes free in {self.folder} ({tensor_bytes} for it, the rest "
                f"as reserve), got {free}"
            )

    def save(self, checkpoint: Checkpoint) -> Step:
        """Writes the checkpoint that `begin` prepared, deletes old ones and returns the oldest journal segment still needed.
        Blocks, so call it in a thread; raises `DiskFull` if space runs out."""
        target = self.folder_of(checkpoint.step)
        partial, replaced = target.with_suffix(".partial"), target.with_suffix(".replaced")
        try:
            tensors = {**checkpoint.shards, **published_shards(checkpoint.published)}
            files = write_shards(tensors, partial, checkpoint.ranks, checkpoint.lent)
            said = {"format": FORMAT, "step": checkpoint.step, "published_version": checkpoint.published_version}
            state = {"nonfinite_steps": 0, "nonfinite_in_a_row": 0, **checkpoint.state, **said, "files": files}
            _write(partial / STATE_FILE, [json.dumps({**state, "sum": _sum_of(state)}).encode()])
            for path in (*partial.iterdir(), partial):
                here().files.sync_path(path)
            if target.exists():
                here().files.rename(target, replaced)
            here().files.rename(partial, target)
            here().files.sync_path(self.folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, DiskFull) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, DiskFull) or error.errno in NO_ROOM:
                raise DiskFull(f"checkpoint of step {checkpoint.step}: no space left in {self.folder}") from error
            raise
        remaining = self.steps()[-self.limits.checkpoints_kept :]
        for step in self.steps():
            if step not in remaining:
                shutil.rmtree(self.folder_of(step))
        try:
            return Step(int(_read_state(self.folder_of(remaining[0]))["journal_from"]))
        except StateError as error:  # an older checkpoint was damaged; the one just written is good
            _log.error("%s. The journal is kept whole", error)
            return Step(0)

    def load(self, step: Step, trainer: Trainer | None) -> Checkpoint:
        """Loads the checkpoint of `step`: the rows of `trainer`'s rank, or whole masters and published weights if it is None."""
        return load_shards(self.folder_of(step), trainer, is_checked=step in self._sound)

    def load_newest(self, trainer: Trainer | None = None) -> Checkpoint | None:
        step = self.newest()
        return None if step is None else self.load(step, trainer)


# ---- files: one a rank, safetensors; its header's metadata says which rows of which whole tensors it holds


def write_shards(
    tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, lent: LentTensors | None = None
) -> dict[str, list[Any]]:
    """Writes this rank's rows. A collective: on rank 0 it returns the size and hash of each file once those of all ranks are in its
    `folder`. `lent`: those tensors that are borrowed from the trainer, which may change them once they are written."""
    is_shared = _sees_leader(folder, ranks)
    if not is_shared:
        folder.mkdir(parents=True, exist_ok=True)
    name, written, failure = f"rank-{ranks.rank:05d}.safetensors", {}, None
    # Rows are written by the ranks of the first copy of the weights, what is not sharded by rank 0.
    writes_rows = ranks.rank < ranks.shards
    rows = {key: t for key, t in tensors.items() if (writes_rows if isinstance(t, DTensor) else ranks.is_leader)}
    try:
        if rows:
            written[name] = _write(folder / name, _safetensors(rows, ranks, lent or LentTensors({})))
    except OSError as error:
        failure = error
    reports = ranks.gather({"files": written, "error": str(failure or ""), "errno": failure.errno if failure else 0})
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report["error"]:
            is_full = report["errno"] in NO_ROOM
            raise (DiskFull if is_full else StateError)(f"checkpoint of rank {rank}: {report['error']}")
    files: dict[str, list[Any]] = {file: sum_ for report in reports for file, sum_ in report["files"].items()}
    _to_leader(folder, {file: size for file, (size, _) in written.items()}, ranks, is_shared=is_shared)
    return files


def _safetensors(tensors: Mapping[str, Tensor], ranks: Ranks, lent: LentTensors) -> Iterator[bytes | memoryview]:
    """The bytes of a file, tensor by tensor: safetensors' own writer would hold all of them a second time."""
    # Wide elements first, so that all are aligned.
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, object] = {}
    rows: dict[str, list[int]] = {}
    end = 0
    for key in keys:
        part = own_part(tensors[key])
        begin, end = end, end + part.numel() * part.element_size()
        header[key] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
        rows[key] = [first_row(tensors[key], ranks), *tensors[key].shape]
    text = json.dumps({"__metadata__": {"format": "pt", "rows": json.dumps(rows)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in keys:
        with lent.borrow(key) as borrowed:
            part = own_part(tensors[key] if borrowed is None else borrowed).detach().cpu().contiguous()
            if part.numel():
                yield part.view(-1).view(torch.uint8).numpy().data


def _write(path: Path, pieces: Iterator[bytes | memoryview] | list[bytes]) -> list[Any]:
    """Writes and syncs a file; returns its size and hash."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            size += len(view)
            while view:
                done = view[: here().files.write(file.fileno(), view[:PIECE_BYTES])]
                digest.update(done)
                view = view[len(done) :]
        here().files.sync(file.fileno())
    return [size, digest.hexdigest()]


def check(folder: Path) -> dict[str, Any]:
    """Reads the checkpoint's JSON and compares every file with its size and hash; raises `StateError` for any difference."""
    state = _read_state(folder)
    files: dict[str, list[Any]] = state["files"]
    there = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != STATE_FILE}
    for name, (size, _) in files.items():
        if there.get(name) != size:
            raise _damaged(folder, f"{name} of {size} bytes", f"{there.get(name, 'none')}")
    if unknown := sorted(there.keys() - files.keys()):
        raise _damaged(folder, "only files of this checkpoint", unknown[0])
    with ThreadPoolExecutor(min(len(files) or 1, os.cpu_count() or 1)) as pool:
        hashes = pool.map(_hash_of, map(folder.joinpath, files))
        for (name, (_, expected)), actual in zip(files.items(), hashes, strict=True):
            if actual != expected:
                raise _damaged(folder, f"{name} with the hash {expected}", actual)
    return state


def _hash_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        return f"a disk that does not give it ({error.strerror})"  # which is as good as other bytes
    return digest.hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    """Reads the JSON of a checkpoint and verifies its own hash and its format."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_bytes())
        expected = state.pop("sum")
        if (actual := _sum_of(state)) != expected:
            raise ValueError(f"the hash {actual} instead of {expected}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{STATE_FILE} as it was written", str(error)) from None
    if state["format"] != FORMAT:
        raise StateError(
            f"checkpoint {folder}: expected format {FORMAT}, got {state['format']}; use the release that wrote it"
        )
    return state


def _sum_of(state: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def _damaged(folder: Path, expected: str, actual: str) -> StateError:
    return StateError(f"checkpoint {folder}: expected {expected}, found {actual}")


def load_shards(folder: Path, trainer: Trainer | None, *, is_checked: bool = False) -> Checkpoint:
    """Loads a checkpoint: the rows of `trainer`'s rank, or whole masters and published weights if it is None. `is_checked`: this
    process has compared its bytes. A collective of all ranks; what one cannot read is a `StateError` on all."""
    ranks = trainer.ranks if trainer is not None else Ranks()
    with _for_reading(folder, ranks) as source:
        error, state, tensors = "", {}, {}
        try:
            state = _read_state(source) if is_checked and source == folder else check(source)
            tensors = _read_rows(source, state["files"], trainer)
        except (OSError, ValueError, KeyError, SafetensorError, StateError) as failure:
            error = (
                str(failure) if isinstance(failure, StateError) else f"checkpoint {source}: cannot be read: {failure!r}"
            )
        errors = [answer["error"] for answer in ranks.gather({"error": error})]
    if failed := next(filter(None, [error, *errors]), None):
        raise StateError(failed)
    published = {key.removeprefix(_PUBLISHED): t for key, t in tensors.items() if key.startswith(_PUBLISHED)}
    shards = {key: t for key, t in tensors.items() if not key.startswith(_PUBLISHED)}
    return Checkpoint(Step(state["step"]), shards, published, Version(state["published_version"]), state, ranks)


def _read_rows(folder: Path, files: Mapping[str, object], trainer: Trainer | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(files)]
        for file in opened:
            rows = json.loads(file.metadata()["rows"])
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                if trainer is None and key.startswith(_OPTIMISER):
                    continue  # which only training needs
                first, *whole = rows[key]
                part = file.get_slice(key)
                if key not in tensors:
                    dtype = {name: dtype for dtype, name in _DTYPES.items()}[part.get_dtype()]
                    tensors[key] = _room_for(key, torch.empty(whole, dtype=dtype, device="meta"), trainer, folder)
                if not whole:
                    tensors[key].copy_(file.get_tensor(key))
                    continue
                target, ranks = own_part(tensors[key]), trainer.ranks if trainer else Ranks()
                target_first = first_row(tensors[key], ranks)
                begin = max(first, target_first)
                end = min(first + part.get_shape()[0], target_first + target.shape[0])
                if begin < end:
                    target[begin - target_first : end - target_first] = part[begin - first : end - first]
    return tensors


def _room_for(key: str, like: Tensor, trainer: Trainer | None, folder: Path) -> Tensor:
    """Allocates a tensor to read into, `like` the one on the meta device: sharded like the trainer's own, or whole without a
    trainer."""
    if trainer is None or not like.ndim:
        return torch.empty(like.shape, dtype=like.dtype)
    name = key.split("|")[1]
    model = trainer.model
    master = model.layout_of(name) if key.startswith(_PUBLISHED) else model.masters_by_name().get(name)
    if master is None:
        raise StateError(f"checkpoint {folder}: expected the tensors of {model.path}, got another: {name}")
    if key.startswith(_OPTIMISER) and trainer.learner.optimizer_state == "8bit":
        return torch.empty(like.shape, dtype=like.dtype)
    if master.shape != like.shape:
        raise StateError(
            f"checkpoint: expected {name} of shape {tuple(master.shape)}, got {tuple(like.shape)} in {folder}"
        )
    return as_sharded(torch.empty(own_part(master).shape, dtype=like.dtype), master, trainer.ranks)


# ---- between ranks that do not share rank 0's disk


def _sees_leader(folder: Path, ranks: Ranks) -> bool:
    """Whether this rank's `folder` is the same folder as rank 0's, which must be writable there. A collective. A marker file shows
    it; folder listings would not do, because a network file system may show them late."""
    if ranks.count == 1:
        return True
    mark = str(ranks.gather({"mark": f"{here().rng.getrandbits(64):016x}.mark"})[0]["mark"])
    if ranks.is_leader:
        (folder / mark).touch()
    ranks.gather({})  # barrier: it is there
    sees = (folder / mark).exists()
    ranks.gather({})  # barrier: all ranks have looked
    if ranks.is_leader:
        (folder / mark).unlink()
    return sees


def _to_leader(folder: Path, written: Mapping[str, int], ranks: Ranks, *, is_shared: bool) -> None:
    """Sends the files that this rank has `written` in its `folder` to rank 0's folder and removes its own folder. If the folder
    `is_shared` with rank 0, it sends and removes nothing. A collective."""
    group = ranks.writers
    if group is None:
        return
    for rank, files in enumerate(ranks.gather({} if is_shared else dict(written))):
        for name, size in files.items():
            if ranks.is_leader:
                _receive(folder / name, size, rank, group)
            elif ranks.rank == rank:
                _send(folder / name, [0], group)
    ranks.gather({})  # barrier: all ranks of a machine have sent their files
    if not is_shared:
        shutil.rmtree(folder, ignore_errors=True)  # several ranks may do so at once


@contextmanager
def _for_reading(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yields `folder` if it holds rank 0's files; else a copy of rank 0's folder beside it, removed afterwards. Ranks of one
    machine with one run folder share a copy. A collective."""
    group = ranks.writers
    if group is None:
        yield folder
        return
    files = ranks.gather(_sizes(folder))[0]
    lacks = [
        answer.get("place", "")
        for answer in ranks.gather({"place": _place(folder, ranks)} if _sizes(folder) != files else {})
    ]
    if not any(lacks):
        yield folder
        return
    takers = [rank for rank, place in enumerate(lacks) if place and place not in lacks[:rank]]
    taker = lacks.index(lacks[ranks.rank])  # the first rank that shares this folder
    target = folder.with_name(f"{folder.name}.of-rank-{taker}") if lacks[ranks.rank] else folder
    if ranks.rank in takers:
        for left in folder.parent.glob(f"*.of-rank-{taker}"):  # by a kill, of any step
            shutil.rmtree(left, ignore_errors=True)
        target.mkdir(parents=True)
    try:
        for name, size in files.items():
            if ranks.is_leader:
                _send(folder / name, takers, group)
            elif ranks.rank in takers:
                _receive(target / name, size, 0, group)
        ranks.gather({})  # barrier: the copies are complete
        yield target
        ranks.gather({})  # barrier: all ranks have finished reading
    finally:
        if ranks.rank in takers:
            shutil.rmtree(target, ignore_errors=True)


def _place(folder: Path, ranks: Ranks) -> str:
    """A key that is equal for ranks that use the same folder on the same machine. A machine's ranks share a torchrun agent, whose
    number is GROUP_RANK."""
    machine = os.environ.get("GROUP_RANK") or f"rank {ranks.rank}"
    return f"{machine}: {zlib.crc32(str(folder.absolute()).encode())}"


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def _send(path: Path, targets: list[int], group: dist.ProcessGroup) -> None:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            packed = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            for target in targets:
                dist.send(packed, target, group=group)


def _receive(path: Path, size: int, source: int, group: dist.ProcessGroup) -> None:
    with path.open("wb") as file:
        while size > 0:
            packed = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
            dist.recv(packed, source, group=group)
            file.write(packed.numpy().tobytes())
            size -= packed.numel()
