"""The container: a header frame, independent block frames and an end frame. docs/delta-format.md specifies every byte.

Guarantees: a parsed frame is complete, unaltered (xxh3 digest) and within its limits; a frame's claims are checked before
anything is allocated for them.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.base.staged import FORMAT_VERSION
from echo2.weights.elements import (
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS_MAX,
    DIMENSIONS_MAX,
    ELEMENTS_MAX,
    NAME_BYTES_MAX,
    SHARDS_MAX,
    TENSOR_COUNT_MAX,
    TYPE_BY_CODE,
    TensorSpec,
)  # fmt: skip

HEADER_MAGIC = b"E2WH"  # docs/delta-format.md has every field of the three frames
BLOCK_MAGIC = b"E2WB"  # as above
END_MAGIC = b"E2WE"  # as above
_HEADER = struct.Struct("<4sBBHIQqQQQIIII")  # as above
_BLOCK = struct.Struct("<4sBBBBQIIIQ")  # as above
_END = struct.Struct("<4sBBHQIQQ")  # as above
_DIGEST = struct.Struct("<Q")  # XXH3-64
HEADER_BYTES_MAX = 1 << 28  # the tensor table of 2^20 tensors with names of 200 bytes
PAYLOAD_BYTES_MAX = BLOCK_ELEMENTS_MAX * 8 + 4096  # raw elements of the widest type, and the heads of their planes


class CodecSetting(enum.Enum):
    """How changes are coded. `FAST` can be merged without weights; `DENSE` (smaller) also codes by the old exponents."""

    FAST = 1
    DENSE = 2


class Method(enum.Enum):
    UNCHANGED = 0
    RAW = 1
    PLANES = 2
    SPARSE = 3
    STEPS = 4


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The header's fields: from which version to which, and how the weights are cut into blocks. `parent_version` None: a
    keyframe. Fingerprints are those of `fingerprint.fingerprint` under `fingerprint_key`; the end frame carries the target's."""

    target_version: Version
    parent_version: Version | None = None
    parent_fingerprint: int | None = None
    fingerprint_key: int = 0
    setting: CodecSetting = CodecSetting.FAST
    block_elements: int = BLOCK_ELEMENTS
    shard_count: int = 1

    def describe(self) -> str:
        kind = "keyframe" if self.parent_version is None else f"delta from version {self.parent_version}"
        return f"{kind} to version {self.target_version}"


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a set in canonical order, and the other names of tied ones."""

    specs: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...]

    def encode(self) -> bytes:
        out = [struct.pack("<II", len(self.specs), len(self.aliases))]
        for spec in self.specs:
            name = spec.name.encode()
            out.append(struct.pack("<HBB", len(name), spec.element.code, len(spec.shape)) + name)
            out.append(struct.pack(f"<{len(spec.shape)}Q", *spec.shape))
        for alias, name_kept in self.aliases:
            for text in (alias.encode(), name_kept.encode()):
                out.append(struct.pack("<H", len(text)) + text)
        return b"".join(out)

    def digest(self) -> int:
        return int(xxhash.xxh3_64_intdigest(self.encode()))


class _Cursor:
    """Reads consecutive fields; DeltaFormatError beyond the end."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._at = 0
        self._whose = where

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise DeltaFormatError(f"{self._whose}: expected {count} more bytes at {self._at}, got {self.left}")
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def unpack(self, layout: str) -> tuple[int, ...]:
        values: tuple[int, ...] = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return values

    def text(self, count: int) -> str:
        if count > NAME_BYTES_MAX:
            raise DeltaFormatError(f"{self._whose}: expected a name of at most {NAME_BYTES_MAX} bytes, got {count}")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise DeltaFormatError(f"{self._whose}: expected a name in UTF-8") from None

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def _parse_spec(cursor: _Cursor, where: str) -> TensorSpec:
    name_bytes, code, dimensions = cursor.unpack("<HBB")
    name = cursor.text(name_bytes)
    element = TYPE_BY_CODE.get(code)
    if element is None:
        raise DeltaFormatError(f"{where}: tensor {name}: unknown element type code {code}")
    if dimensions > DIMENSIONS_MAX:
        raise DeltaFormatError(
            f"{where}: tensor {name}: expected at most {DIMENSIONS_MAX} dimensions, got {dimensions}"
        )
    spec = TensorSpec(name, element, cursor.unpack(f"<{dimensions}Q"))
    if any(size > ELEMENTS_MAX for size in spec.shape) or spec.element_count > ELEMENTS_MAX:
        raise DeltaFormatError(f"{where}: tensor {name}: expected at most {ELEMENTS_MAX} elements, got {spec.shape}")
    return spec


def parse_table(data: bytes, where: str) -> TensorTable:
    """Parses a tensor table; DeltaFormatError for unsorted, duplicate, oversized or trailing entries."""
    cursor = _Cursor(data, where)
    count, alias_count = cursor.unpack("<II")
    if count > TENSOR_COUNT_MAX or alias_count > TENSOR_COUNT_MAX:
        raise DeltaFormatError(f"{where}: expected at most {TENSOR_COUNT_MAX} tensors, got {count} and {alias_count}")
    specs = tuple(_parse_spec(cursor, where) for _ in range(count))
    aliases = tuple((cursor.text(*cursor.unpack("<H")), cursor.text(*cursor.unpack("<H"))) for _ in range(alias_count))
    order = [(spec.element.code, spec.name) for spec in specs]
    names = {spec.name for spec in specs}
    if order != sorted(order) or len(names) != count or cursor.left:
        raise DeltaFormatError(f"{where}: expected tensors once each in canonical order and nothing after them")
    if any(name not in names or alias in names for alias, name in aliases) or len(dict(aliases)) != alias_count:
        raise DeltaFormatError(f"{where}: expected each alias once, naming a tensor of the table")
    return TensorTable(specs, aliases)


@dataclass(frozen=True, slots=True)
class HeaderFrame:
    """A parsed header. `table` only in keyframes; a delta has only the digest of the table, which both sides know."""

    header: DeltaHeader
    table: TensorTable | None
    table_digest: int
    container_id: int


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """A parsed block frame, its payload still encoded."""

    container_id: int
    index: int
    element_count: int
    element_code: int
    method: Method
    payload: memoryview
    digest: int


@dataclass(frozen=True, slots=True)
class EndFrame:
    """The last frame: the number of blocks, and the fingerprint that the result must have."""

    container_id: int
    block_count: int
    target_fingerprint: int


Frame = HeaderFrame | BlockFrame | EndFrame


def encode_header(header: DeltaHeader, table: TensorTable) -> bytes:
    """Encodes the header frame. Its digest is the container's id, which every other frame repeats."""
    return encode_header_of(header, table.digest(), table.encode() if header.parent_version is None else b"")


def encode_header_of(header: DeltaHeader, table_digest: int, body: bytes = b"") -> bytes:
    """Encodes the header frame for a table given by its digest; `body`: the table itself, in keyframes."""
    fields = _HEADER.pack(
        HEADER_MAGIC, FORMAT_VERSION, header.setting.value, 0, _HEADER.size + 8 + len(body) + _DIGEST.size,
        header.target_version, -1 if header.parent_version is None else header.parent_version,
        header.parent_fingerprint or 0, 0, header.fingerprint_key, header.block_elements, header.shard_count, 0, len(body),
    )  # fmt: skip
    frame = fields + struct.pack("<Q", table_digest) + body
    return frame + _DIGEST.pack(xxhash.xxh3_64_intdigest(frame))


def encode_block_frame(
    container_id: int, index: int, element_count: int, element_code: int, method: Method, payload: bytes
) -> bytes:
    fields = _BLOCK.pack(
        BLOCK_MAGIC, FORMAT_VERSION, method.value, element_code, 0, container_id, index, element_count, len(payload), 0
    )[: -_DIGEST.size]
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return b"".join((fields, _DIGEST.pack(digest.intdigest()), payload))


def encode_end(container_id: int, block_count: int, target_fingerprint: int) -> bytes:
    fields = _END.pack(END_MAGIC, FORMAT_VERSION, 0, 0, container_id, block_count, target_fingerprint, 0)[:-8]
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def frame_bytes(prefix: bytes | memoryview) -> int | None:
    """The length of the frame that starts with `prefix`; None if `prefix` is too short (36 bytes always suffice)."""
    if len(prefix) < 36:
        return None
    magic = bytes(prefix[:4])
    if magic == END_MAGIC:
        return _END.size
    if magic == BLOCK_MAGIC:
        payload_bytes = int(_BLOCK.unpack_from(prefix)[8])
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise DeltaFormatError(
                f"block frame: expected at most {PAYLOAD_BYTES_MAX} bytes, it claims {payload_bytes}"
            )
        return _BLOCK.size + payload_bytes
    if magic == HEADER_MAGIC:
        size = int(struct.unpack_from("<I", prefix, 8)[0])
        if not _HEADER.size < size <= HEADER_BYTES_MAX:
            raise DeltaFormatError(f"header frame: expected at most {HEADER_BYTES_MAX} bytes, it claims {size}")
        return size
    raise DeltaFormatError(f"expected a frame of a delta container, got bytes that begin with {magic!r}")


def _parse_header(data: memoryview) -> HeaderFrame:
    raw = bytes(data)
    _, _, setting, flags, _, target, parent, parent_print, zero, key, elements, shards, none, body_bytes = (
        _HEADER.unpack_from(raw)
    )
    where = f"header of version {target}"
    if xxhash.xxh3_64_intdigest(raw[:-8]) != _DIGEST.unpack_from(raw, len(raw) - 8)[0]:
        raise DeltaFormatError(f"{where}: its digest differs from its bytes")
    cursor = _Cursor(raw[_HEADER.size : -8], where)
    (table_digest,) = cursor.unpack("<Q")
    body = cursor.take(body_bytes)
    if cursor.left or flags or zero or none or parent < -1 or setting not in {s.value for s in CodecSetting}:
        raise DeltaFormatError(f"{where}: expected a known setting, no flags, and nothing after its table")
    if not 1 <= elements <= BLOCK_ELEMENTS_MAX or not 1 <= shards <= SHARDS_MAX:
        raise DeltaFormatError(f"{where}: expected 1 to {BLOCK_ELEMENTS_MAX} elements a block, got {elements}")
    header = DeltaHeader(
        target_version=Version(target), parent_version=None if parent < 0 else Version(parent),
        parent_fingerprint=None if parent < 0 else parent_print, fingerprint_key=key, setting=CodecSetting(setting),
        block_elements=elements, shard_count=shards,
    )  # fmt: skip
    table = parse_table(body, where) if parent < 0 else None
    if (table is None) != (not body) or (table is not None and table.digest() != table_digest):
        raise DeltaFormatError(f"{where}: expected a tensor table in a keyframe, and only there")
    return HeaderFrame(header, table, table_digest, container_id_of(raw))


def container_id_of(header_frame: bytes) -> int:
    """The id that names a container in its other frames: the header's digest."""
    value: int = _DIGEST.unpack_from(header_frame, len(header_frame) - 8)[0]
    return value


def _parse_block(data: memoryview) -> BlockFrame:
    _, _, method, code, reserved, container, index, element_count, _, digest = _BLOCK.unpack_from(data)
    payload = data[_BLOCK.size :]
    actual = xxhash.xxh3_64(data[: _BLOCK.size - 8])
    actual.update(payload)
    if actual.intdigest() != digest:
        raise DeltaFormatError(f"block {index}: its digest differs from its bytes")
    if reserved or method not in {m.value for m in Method} or code not in TYPE_BY_CODE:
        raise DeltaFormatError(f"block {index}: expected a known method and element type, got {method} and {code}")
    if not 1 <= element_count <= BLOCK_ELEMENTS_MAX:
        raise DeltaFormatError(f"block {index}: expected 1 to {BLOCK_ELEMENTS_MAX} elements, got {element_count}")
    return BlockFrame(container, index, element_count, code, Method(method), payload, digest)


def parse_frame(data: bytes | memoryview) -> Frame:
    """Parses exactly one frame. DeltaFormatError for a wrong digest or length or an unknown version."""
    view = memoryview(data)
    expected = frame_bytes(view[:64])
    if expected is None or len(view) != expected:
        raise DeltaFormatError(f"expected one whole frame of {expected or 'at least 36'} bytes, got {len(view)}")
    if view[4] != FORMAT_VERSION:
        raise DeltaFormatError(f"expected delta format version {FORMAT_VERSION}, got {view[4]}")
    magic = bytes(view[:4])
    if magic == HEADER_MAGIC:
        return _parse_header(view)
    if magic == BLOCK_MAGIC:
        return _parse_block(view)
    _, _, _, _, container, block_count, fingerprint, digest = _END.unpack(view)
    if xxhash.xxh3_64_intdigest(view[:-8]) != digest:
        raise DeltaFormatError("end frame: its digest differs from its bytes")
    return EndFrame(container, block_count, fingerprint)


class FrameReader:
    """Reassembles frames from a byte stream that was split anywhere (into chunks, for example). Buffers at most one incomplete
    frame, whose claimed length was checked against the limits."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds data; returns the frames that are now complete."""
        self._held += data
        frames: list[bytes] = []
        at = 0
        with memoryview(self._held) as view:
            while True:
                size = frame_bytes(view[at : at + 64])
                if size is None or at + size > len(view):
                    break
                frames.append(bytes(view[at : at + size]))
                at += size
        del self._held[:at]
        return frames
