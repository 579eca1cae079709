"""Merges the sections of a sharded learner's version: each rank encodes its rows, rank 0 puts the blocks in order.

Guarantees: only encoded blocks and numbers cross between ranks; nothing is pickled. The other ranks encode in parallel with
rank 0, and buffer at most one block's bytes of encoded data that has not been requested yet. If a rank fails, rank 0 raises an
error that names it; a rank that does not answer within the time limit is `Unreachable`. Waits for: on rank 0, one answer at a
time; on the others, the next order, in a thread of their own.

Orders and answers use a gloo group of their own, so that they never interleave with the training's collectives.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from echo2.base.errors import LimitExceeded, MalformedMessage, StateError, Unreachable
from echo2.base.ids import Version
from echo2.weights.block import EncodedBlock
from echo2.weights.container import (
    HEADER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    DeltaHeader,
    HeaderFrame,
    Method,
    TensorTable,
    encode_header,
    parse_frame,
    parse_table,
)
from echo2.weights.elements import Block, WeightSet, blocks_of
from echo2.weights.encode import CodedBlock, Encoding, encode_sections, section_blocks, section_fingerprint
from echo2.weights.fingerprint import MODULUS, whole_fingerprint
from echo2.weights.host import table_of

ANSWER_TIMEOUT_S = 300.0  # time limit for a block, or for the fingerprint of a rank's rows
HELD_VERSIONS_MAX = 5
"""The newest version, its parent, the next one, one from an earlier run, and the base until its delta has been published."""
_ITEM = struct.Struct("<IIQI")
_KEPT = struct.Struct("<Q")
_log = logging.getLogger("echo2.broadcast")


class _Kind(IntEnum):
    """Meaning of `number`: NEXT and BEGIN: the encoding; FORGET: a version; DONE: a fingerprint part; unused otherwise. FORGET may
    carry an earlier version that stays, as its payload."""

    FINGERPRINT = 1
    BEGIN = 2
    NEXT = 3
    FORGET = 4
    STOP = 5
    DONE = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class _Message:
    kind: _Kind
    number: int = 0  # modulo 2^64
    payload: bytes = b""


class _Line:
    def __init__(self, group: dist.ProcessGroup, peer: int, timeout_s: float) -> None:
        self._group = group
        self._peer = peer
        self._timeout = timedelta(seconds=timeout_s)

    def send(self, message: _Message) -> None:
        number = message.number - MODULUS if message.number >= MODULUS >> 1 else message.number
        head = torch.tensor([message.kind, number, len(message.payload)], dtype=torch.int64)
        self._group.send([head], self._peer, 0).wait(self._timeout)
        if message.payload:
            packed = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
            self._group.send([packed], self._peer, 0).wait(self._timeout)

    def receive(self, payload_bytes_max: int, *, is_idle: bool = False) -> _Message:
        """Receives one message. `is_idle`: waits up to the group's own time limit instead of ours."""
        head = torch.zeros(3, dtype=torch.int64)
        coming = self._group.recv([head], self._peer, 0)
        if is_idle:
            coming.wait()
        else:
            coming.wait(self._timeout)
        kind, number, size = (int(each) for each in head)
        if not 0 <= size <= payload_bytes_max:
            raise LimitExceeded(f"rank {self._peer}: expected a message of {payload_bytes_max} bytes, got {size}")
        packed = torch.empty(size, dtype=torch.uint8)
        if size:
            self._group.recv([packed], self._peer, 0).wait(self._timeout)
        return _Message(_Kind(kind), number % MODULUS, packed.numpy().tobytes())


class HeldVersions:
    """A rank's own rows of the versions that may be requested. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Version, WeightSet] = {}

    def keep(self, version: Version, weights: WeightSet) -> None:
        """Keeps a version's weights: host tensors, which must not be changed in place."""
        with self._lock:
            self._held[version] = weights
            if len(self._held) > HELD_VERSIONS_MAX:
                raise LimitExceeded(f"version {version}: expected {HELD_VERSIONS_MAX} to be held, got {self._names()}")

    def add(self, version: Version, name: str, tensor: torch.Tensor) -> None:
        self.keep(version, {**self._held.get(version, {}), name: tensor})

    def of(self, version: Version) -> WeightSet:
        with self._lock:
            if version not in self._held:
                raise StateError(f"version {version}: expected it among those held, got {self._names()}")
            return self._held[version]

    def forget_before(self, version: Version, but: Version | None = None) -> None:
        with self._lock:
            self._held = {held: weights for held, weights in self._held.items() if held >= version or held == but}

    def _names(self) -> str:
        return ", ".join(map(str, sorted(self._held))) or "none"


class VersionCoder:
    """Rank 0's side. Its methods take its own rows, which are snapshots never changed in place; the other ranks look theirs up by
    version. The group's first `shards` ranks hold one copy of the weights; the ranks after them hold further copies, and are told
    only what to forget. Without a group it encodes alone, the same bytes as `encode_delta` and `encode_keyframe`."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, shards: int = 1, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._count = shards
        self._everyone = dict[int, _Line]()
        if group is not None:
            self._everyone = {rank: _Line(group, rank, timeout_s) for rank in range(1, group.size())}
        self._lines = {rank: line for rank, line in self._everyone.items() if rank < shards}
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # an order and its answer
        self._encodings = 0
        self._kept: Version | None = None

    def fingerprint(self, version: Version, weights: WeightSet, key: int) -> int:
        """The fingerprint of the whole set; each rank sums its own rows."""
        table = table_of(weights)
        header = DeltaHeader(target_version=version, fingerprint_key=key, shard_count=self._count)
        with self._lock:
            for shard in self._lines:
                self._tell(shard, _Message(_Kind.FINGERPRINT, 0, _begin_bytes(header, table)))
            parts = [section_fingerprint(weights, table, 0, self._count, key)]
            parts += [
                self._answer(shard, f"its part of version {version}'s fingerprint").number for shard in self._lines
            ]
        return whole_fingerprint(table.specs, key, parts)

    def encode(
        self, parent: WeightSet | None, target: WeightSet, header: DeltaHeader, executor: Executor | None = None
    ) -> Encoding:
        """The delta from `parent`; without one, a keyframe."""
        header = replace(header, shard_count=self._count)
        table = table_of(target)
        blocks = section_blocks(parent, target, header, table, 0, executor)
        return encode_sections(header, table, self._all_blocks(header, table, blocks))

    def forget_before(self, version: Version) -> None:
        """Drops versions before `version` on all ranks, except the one that `keep` named; they are not requested any more."""
        payload = b"" if self._kept is None else _KEPT.pack(self._kept)
        self._tell_all(_Message(_Kind.FORGET, version, payload), self._everyone)

    def keep(self, version: Version | None) -> None:
        """All ranks keep this version until told otherwise; with None, the next `forget_before` drops it too."""
        self._kept = version

    def stop(self) -> None:
        self._tell_all(_Message(_Kind.STOP), self._everyone)

    def _all_blocks(self, header: DeltaHeader, table: TensorTable, first: Iterator[CodedBlock]) -> Iterator[CodedBlock]:
        """Yields all ranks' blocks in order; the other ranks start encoding when the first block is drawn."""
        with self._lock:
            self._encodings += 1
            number = self._encodings
        self._tell_all(_Message(_Kind.BEGIN, number, _begin_bytes(header, table)), self._lines)
        yield from first
        blocks = [b for b in blocks_of(table.specs, header.block_elements, self._count) if b.shard > 0]
        ready: deque[tuple[int, EncodedBlock]] = deque()
        for block in blocks:
            if not ready:
                with self._lock:
                    self._tell(block.shard, _Message(_Kind.NEXT, number))
                    answer = self._answer(block.shard, f"block {block.index} of {header.describe()}")
                ready.extend(_unpacked(answer.payload))
            index, coded = ready.popleft() if ready else (-1, None)
            if coded is None or index != block.index:
                raise MalformedMessage(
                    f"rank {block.shard}: expected block {block.index} of {header.describe()}, got {index}"
                )
            yield block, coded

    def _tell_all(self, message: _Message, to: Iterable[int]) -> None:
        with self._lock:
            for rank in to:
                self._tell(rank, message)

    def _tell(self, rank: int, message: _Message) -> None:
        try:
            self._everyone[rank].send(message)
        except RuntimeError as error:  # raised by gloo: closed, or timed out
            raise self._outage(rank, f"it to take an order ({message.kind.name})", error) from error

    def _answer(self, shard: int, what: str) -> _Message:
        try:
            message = self._lines[shard].receive(PAYLOAD_BYTES_MAX + _ITEM.size)
        except RuntimeError as error:
            raise self._outage(shard, what, error) from error
        if message.kind is not _Kind.DONE:
            raise StateError(f"rank {shard}: expected {what}, got {message.payload.decode(errors='replace')}")
        return message

    def _outage(self, shard: int, what: str, error: RuntimeError) -> Unreachable:
        return Unreachable(f"rank {shard}: expected {what} within {self._timeout_s:.0f} s, got: {error}")


class ShardFollower:
    """The side of ranks > 0: answers rank 0's orders until STOP. `held` is filled by the training thread."""

    def __init__(self, group: dist.ProcessGroup, held: HeldVersions) -> None:
        self._shard = group.rank()
        self._line = _Line(group, 0, ANSWER_TIMEOUT_S)
        self._held = held
        self._ahead: Ahead | None = None
        self._number = 0

    def serve(self) -> None:
        """Runs the loop; call it in a thread of its own."""
        try:
            while (order := self._line.receive(2 * HEADER_BYTES_MAX, is_idle=True)).kind is not _Kind.STOP:
                answer = self._answer_to(order)
                if answer is not None:
                    self._line.send(answer)
        finally:
            self._abandon()

    def _answer_to(self, order: _Message) -> _Message | None:
        try:
            return self._obey(order)
        except Exception as error:  # sent to rank 0, which ends the run with it
            if order.kind not in (_Kind.FINGERPRINT, _Kind.NEXT):
                raise
            _log.exception("rank %d: %s failed", self._shard, order.kind.name)
            return _Message(_Kind.FAILED, 0, f"{type(error).__name__}: {error}".encode())

    def _obey(self, order: _Message) -> _Message | None:
        match order.kind:
            case _Kind.FINGERPRINT:
                header, table = _begun(order.payload)
                weights = self._held.of(header.target_version)
                part = section_fingerprint(weights, table, self._shard, header.shard_count, header.fingerprint_key)
                return _Message(_Kind.DONE, part)
            case _Kind.BEGIN:
                self._abandon()
                self._number = order.number
                self._ahead = Ahead(lambda: self._section(order.payload))
                return None
            case _Kind.NEXT:
                if self._ahead is None or order.number != self._number:
                    raise StateError(f"encoding {order.number}: expected {self._number}, which was begun last")
                return _Message(_Kind.DONE, 0, self._ahead.take())
            case _Kind.FORGET:
                but = Version(*_KEPT.unpack(order.payload)) if order.payload else None
                self._held.forget_before(Version(order.number), but)
                return None
            case kind:
                raise MalformedMessage(f"rank {self._shard}: expected an order, got {kind.name}")

    def _section(self, payload: bytes) -> tuple[int, Iterator[CodedBlock]]:
        """Runs in the encoding thread: returns the bytes of an unencoded block, and the blocks."""
        header, table = _begun(payload)
        parent = None if header.parent_version is None else self._held.of(header.parent_version)
        blocks = section_blocks(parent, self._held.of(header.target_version), header, table, self._shard)
        widest = max((spec.element.bytes for spec in table.specs), default=1)
        return header.block_elements * widest, blocks

    def _abandon(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None


class Ahead:
    """Encodes blocks ahead of requests in a thread; buffers at most one block's bytes of packed blocks."""

    def __init__(self, begin: Callable[[], tuple[int, Iterator[CodedBlock]]]) -> None:
        self._begin = begin
        self._changed = threading.Condition()
        self._ready: deque[bytes] = deque()
        self._ready_bytes = 0
        self._failure: Exception | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="sections", daemon=True)
        self._thread.start()

    def take(self) -> bytes:
        """All blocks that are ready, at least one; waits for it. Raises the encoding thread's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_over)
            if not self._ready:
                raise self._failure or StateError("expected more blocks of this section, all were given")
            data = b"".join(self._ready)
            self._ready.clear()
            self._ready_bytes = 0
            self._changed.notify_all()
            return data

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            room_bytes, blocks = self._begin()
            for block, coded in blocks:
                if not self._put(_packed(block, coded), room_bytes):
                    return
        except Exception as error:  # noqa: BLE001 - raised in `take`
            self._failure = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _put(self, item: bytes, room_bytes: int) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or not self._ready or self._ready_bytes + len(item) <= room_bytes
            )
            if self._is_over:
                return False
            self._ready.append(item)
            self._ready_bytes += len(item)
            self._changed.notify_all()
            return True


def _begin_bytes(header: DeltaHeader, table: TensorTable) -> bytes:
    head = encode_header(header, table)
    return struct.pack("<I", len(head)) + head + table.encode()


def _begun(payload: bytes) -> tuple[DeltaHeader, TensorTable]:
    (size,) = struct.unpack_from("<I", payload)
    head = parse_frame(payload[4 : 4 + size])
    if not isinstance(head, HeaderFrame):
        raise MalformedMessage("order of the first rank: expected a container's header")
    return head.header, parse_table(payload[4 + size :], "tensor table of the first shard")


def _packed(block: Block, coded: EncodedBlock) -> bytes:
    size = len(coded.payload)
    return _ITEM.pack(block.index, coded.method.value, coded.fingerprint_step % MODULUS, size) + coded.payload


def _unpacked(data: bytes) -> Iterator[tuple[int, EncodedBlock]]:
    at = 0
    while at < len(data):
        index, method, step, size = _ITEM.unpack_from(data, at)
        at += _ITEM.size
        yield index, EncodedBlock(Method(method), data[at : at + size], step)
        at += size
