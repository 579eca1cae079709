"""Every decoder of bytes and text that come from elsewhere, as targets for mutated input.

A target takes bytes and must return or raise `EchoError`; anything else, a hang or an allocation beyond its limit is a
failure. Seeds are valid inputs, kept under tests/fixtures/corpus/TARGET; mutations of them reach the deep parts.
"""

import contextlib
import json
import random
import resource
import ssl
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from google.protobuf.message import Message

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Step, Version
from echo2.broadcast.connection import HEAD, FrameCutter
from echo2.broadcast.nat.pipes import PipeAnswer, opening_of
from echo2.config.load import load_config
from echo2.learner.rollouts.journal import framed, read_journal
from echo2.outside.tls_streams import HEAD_BYTES, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, TAG_BYTES, RecordCutter
from echo2.trust.identity import Identity, JoinLink
from echo2.weights import ContainerDecoder, DeltaHeader, FrameReader, HostWeights, encode_delta, encode_keyframe
from echo2.weights.container import parse_frame
from echo2.wire import broadcast as bw, rollout as rw
from echo2.wire.bounds import CallLimits, parsed
from echo2.wire.broadcast import FRAME_BYTES_MAX, chunk_in
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, journal_pb2, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket, verify_ticket
from tests.unit.weights.models import KEY, gaussian_pair

CORPUS = Path(__file__).parent / "fixtures" / "corpus"
INPUT_BYTES_MAX = 1 << 16
SECONDS_MAX = 5.0
GROWN_BYTES_MAX = 512 << 20
"""No input of this size may make a decoder take more; the limits of the decoders themselves are far lower."""

_OLD, _NEW = gaussian_pair(rows=16)
_HOST = HostWeights.from_tensors(_OLD, Version(41), KEY)
_HEADER = DeltaHeader(
    target_version=Version(42), parent_version=Version(41), parent_fingerprint=_HOST.fingerprint(KEY), fingerprint_key=KEY,
    block_elements=512,
)  # fmt: skip
_DELTA = list(encode_delta(_OLD, _NEW, _HEADER))
_COORDINATOR = Identity.from_private_bytes(bytes(range(32)))
_WORKER = Identity.from_private_bytes(bytes(range(1, 33)))
_FOLDER = tempfile.TemporaryDirectory(prefix="echo2-fuzz-")


def _parsed(kind: type[Message], data: bytes) -> Message:
    """As every receiver takes it: parsed, and within its bounds."""
    return parsed(kind, data, CallLimits(16 << 20, 262_144), "a peer")


def _container(data: bytes) -> None:
    decoder = ContainerDecoder(_HOST)
    for frame in FrameReader().feed(data):
        decoder.feed(frame)
    decoder.finish()


def _resealed(data: bytes) -> None:
    """A frame in the place of another with its checksum made right: what a sender that lies on purpose can do."""
    frames = list(_DELTA)
    body = data[1:-8] if len(data) > 9 else data
    frames[data[0] % len(frames) if data else 0] = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    decoder = ContainerDecoder(_HOST)
    for frame in frames:
        decoder.feed(frame)
    decoder.finish()


def _keyframe(data: bytes) -> None:
    decoder = ContainerDecoder(HostWeights.empty())
    for frame in FrameReader().feed(data):
        decoder.feed(frame)
    decoder.finish()


_peer_kind: dict[str, Callable[[Any], object]] = {
    "header": lambda header: bw.header_from(header).verify(),
    "seal": lambda seal: bw.seal_from(seal).verify(_COORDINATOR.peer_id),
}


def _peer_message(data: bytes) -> None:
    by_hand = chunk_in(data, "peer x")
    message = bw.parse(data, "peer x")
    if by_hand is not None:
        chunk, read, route = by_hand.chunk, message.chunk, by_hand.route
        assert (chunk.key, chunk.index, chunk.ends_block) == (read.key, read.index, read.ends_block), (
            "as protobuf reads it"
        )
        assert (chunk.payload, chunk.signature, by_hand.is_answer) == (read.payload, read.signature, message.is_answer)
        assert (route is not None) == message.HasField("route")
        assert bw.parse(bytes(by_hand.record), "the store").chunk == read
        chunk.verify(_COORDINATOR.peer_id)
        return
    kind = message.WhichOneof("kind") or ""
    if kind in _peer_kind:
        _peer_kind[kind](getattr(message, kind))
    else:
        bw.control_from(message, PeerId("x"))


def _bulk_frames(data: bytes) -> None:
    """The first byte says in which pieces the others come."""
    cutter, step, at = FrameCutter(FRAME_BYTES_MAX, "peer x"), 1 + data[:1][0] if data else 1, 1
    while at < len(data):
        room = cutter.room()
        piece = data[at : at + min(step, len(room))]
        room[: len(piece)] = piece
        at += len(piece)
        for frame in cutter.take(len(piece)):
            _peer_message(frame)


def _tls_records(data: bytes) -> None:
    """Records with a cipher that changes nothing; the first byte says in which pieces they come. Nothing is lost or held for ever,
    and no more is expected of a frame than it needs."""
    records, frames = RecordCutter(3 * RECORD_BYTES_MAX), FrameCutter(FRAME_BYTES_MAX, "peer x")
    step, at, given = 1 + data[:1][0] if data else 1, 1, b""
    while at < len(data):
        room = records.room()
        piece = data[at : at + min(step, len(room))]
        room[: len(piece)] = piece
        at += len(piece)
        whole, count = records.take(len(piece))
        new = b""
        while count:
            new += whole
            whole, count = records.take(0)
        given += new
        assert at - 1 - len(given) < RECORD_BYTES_MAX
        for plain in _plain_of(new):
            _into_frames(frames, plain)
        missing = frames.missing_bytes
        assert records.still_to_come(missing) <= RECORD_BYTES_MAX + missing + (missing // PLAIN_BYTES_MAX + 1) * 22
    assert data[1:].startswith(given)


def _plain_of(whole: bytes) -> Iterator[bytes]:
    while whole:
        size = int.from_bytes(whole[3:5], "big")
        if size < TAG_BYTES or HEAD_BYTES + size > RECORD_BYTES_MAX:
            raise MalformedMessage("as OpenSSL would say")
        yield whole[HEAD_BYTES : HEAD_BYTES + size - TAG_BYTES]
        whole = whole[HEAD_BYTES + size :]


def _into_frames(frames: FrameCutter, plain: bytes) -> None:
    while plain:
        room = frames.room()
        count = min(len(plain), len(room))
        room[:count] = plain[:count]
        plain = plain[count:]
        for frame in frames.take(count):
            _peer_message(frame)


def _pipe_opening(data: bytes) -> None:
    """Of a prefix it is said at most that more has to come; then what the whole says."""
    whole = opening_of(data)
    for cut in {len(data) // 2, max(0, len(data) - 1)}:
        assert opening_of(data[:cut]) in (None, whole)


def _of(kind: type[Message], **readers: Callable[[Any], object]) -> Callable[[bytes], None]:
    """Reads a message by the reader of its kind, if that has one."""

    def decode(data: bytes) -> None:
        message = _parsed(kind, data)
        if (reader := readers.get(message.WhichOneof("kind") or "")) is not None:
            reader(getattr(message, message.WhichOneof("kind") or ""))

    return decode


def _whole(kind: type[Message], read: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda data: read(_parsed(kind, data))


def _ticket(ticket: rollout_pb2.LeaseTicket) -> object:
    return verify_ticket(ticket, RunId("r"), _COORDINATOR.peer_id, _WORKER.peer_id)


_worker_message = _of(
    coordinator_pb2.WorkerMessage,
    heartbeat=lambda beat: bw.access_from_message(beat.reach.access),
    lease_ended=rw.end_reason_from_message,
)
_learner_message = _of(
    coordinator_pb2.LearnerMessage,
    hello=lambda hello: [rw.group_from_message(group) for group in hello.open_groups],
    offer=lambda offer: rw.offer_from_message(offer, "a learner"),
)
_worker_order = _of(
    coordinator_pb2.WorkerOrder,
    lease_grant=lambda grant: rw.group_from_message(grant.group),
    broadcast_plan=bw.plan_from_message,
)


def _report(report: ingest_pb2.RolloutReport) -> None:
    rw.segments_from_report(report)
    _ticket(report.ticket)


def _join_link(data: bytes) -> None:
    JoinLink.parse(data.decode("utf-8", "replace"))


def _config(data: bytes) -> None:
    path = Path(_FOLDER.name) / "run.toml"
    path.write_bytes(data)
    load_config([path])


def _journal(data: bytes) -> None:
    """Each input is the payload of one record with a right checksum, then the raw bytes."""
    folder = Path(_FOLDER.name)
    path = folder / "segment-00000000.records"
    path.write_bytes(framed(data) + data)
    list(read_journal(folder, Step(0))[0])


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    decode: Callable[[bytes], object]


TARGETS = {
    one.name: one
    for one in (
        Target("delta_container", _container),
        Target("keyframe_container", _keyframe),
        Target("delta_frame", parse_frame),
        Target("delta_resealed", _resealed),
        Target("peer_message", _peer_message),
        Target("bulk_frames", _bulk_frames),
        Target("tls_records", _tls_records),
        Target("pipe_opening", _pipe_opening),
        Target("worker_message", _worker_message),
        Target("learner_message", _learner_message),
        Target("worker_order", _worker_order),
        Target("rollout_report", _whole(ingest_pb2.RolloutReport, _report)),
        Target("rollout_verdict", _whole(ingest_pb2.RolloutVerdict, rw.verdicts_from_message)),
        Target("partials_reply", _whole(ingest_pb2.GetPartialsReply, rw.rollouts_from_partials)),
        Target("lease_ticket", _whole(rollout_pb2.LeaseTicket, _ticket)),
        Target("broadcast_plan", _whole(broadcast_pb2.BroadcastPlan, bw.plan_from_message)),
        Target("join_link", _join_link),
        Target("config", _config),
        Target("journal", _journal),
    )
}


class Fuzzer:
    """Mutates the corpus of one target. Same seed, same inputs. `outcomes` counts accepted inputs and refusals."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.rng = random.Random(f"{target.name}/{seed}")
        self.seeds = [path.read_bytes() for path in sorted((CORPUS / target.name).iterdir())]
        assert self.seeds, f"no corpus for {target.name}"
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0

    def run(self, executions: int) -> None:
        """Raises what a decoder should not have raised, with the input in its notes."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(executions):
            self.once(self.mutated())
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < GROWN_BYTES_MAX, f"{self.target.name}: memory grew by {grown} bytes"

    def once(self, data: bytes) -> None:
        began = time.perf_counter()
        try:
            self.target.decode(data)
            self.outcomes["accepted"] += 1
        except EchoError as error:
            self.outcomes[type(error).__name__] += 1
        except BaseException as error:
            error.add_note(f"target {self.target.name}, input {data.hex()}")
            raise
        took_s = time.perf_counter() - began
        self.slowest_s = max(self.slowest_s, took_s)
        assert took_s < SECONDS_MAX, f"{self.target.name} took {took_s:.1f} s over {data.hex()}"

    def mutated(self) -> bytes:
        rng, data = self.rng, bytearray(self.rng.choice(self.seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            _mutate(data, rng, self.seeds)
        return bytes(data[:INPUT_BYTES_MAX])


def _mutate(data: bytearray, rng: random.Random, seeds: list[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            del data[at : at + rng.choice((1, 2, 8, 64))]
        case 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))
        case 4:  # numbers at their limits, as fixed width and as varint
            number = rng.choice((b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x01"))
            data[at : at + len(number)] = number
        case 5:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:256]
        case 6:
            other = rng.choice(seeds)
            begin = rng.randrange(len(other) + 1)
            data[at:] = other[begin:]
        case _:
            del data[at:]


# ---- the corpus


def write_corpus() -> None:
    """Valid inputs of every target. Run it when a format changes: `python -m tests.fuzz_targets`."""
    for name, seeds in _valid_inputs():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds):
            (folder / f"valid-{number}").write_bytes(data)


def _messages(kind: type[Message]) -> list[bytes]:
    """One message of each alternative that it has, every field set to what a reader takes."""
    from tests.contract.test_golden import filled
    from tests.unit.wire.test_messages import sensible

    alternatives = [field.name for field in kind.DESCRIPTOR.oneofs[0].fields] if kind.DESCRIPTOR.oneofs else [""]
    return [sensible(filled(kind.DESCRIPTOR, one)).SerializeToString() for one in alternatives]


def _valid_inputs() -> Iterator[tuple[str, list[bytes]]]:
    keyframe = list(encode_keyframe(_NEW, DeltaHeader(target_version=Version(42), fingerprint_key=KEY)))
    yield "delta_container", [b"".join(iter(_DELTA))]
    yield "keyframe_container", [b"".join(iter(keyframe))]
    yield "delta_frame", [*_DELTA[:3], _DELTA[-1], keyframe[0], keyframe[-1]]
    yield "delta_resealed", [bytes([i]) + frame for i, frame in enumerate(_DELTA[:4])]
    yield from _peer_inputs()
    for name, kind in (
        ("worker_message", coordinator_pb2.WorkerMessage), ("learner_message", coordinator_pb2.LearnerMessage),
        ("worker_order", coordinator_pb2.WorkerOrder), ("rollout_report", ingest_pb2.RolloutReport),
        ("rollout_verdict", ingest_pb2.RolloutVerdict), ("broadcast_plan", broadcast_pb2.BroadcastPlan),
    ):  # fmt: skip
        yield name, _messages(kind)
    whole = ingest_pb2.GetPartialsReply.FromString(_messages(ingest_pb2.GetPartialsReply)[0])
    del whole.rollouts[1:]
    whole.rollouts[0].offset = 0
    yield "partials_reply", [whole.SerializeToString()]
    given = Ticket(LeaseId("l-1"), GroupId("g-17"), _WORKER.peer_id, 2, 2e9, RunId("r"))
    yield "lease_ticket", [sign_ticket(given, _COORDINATOR).SerializeToString()]
    yield (
        "join_link",
        [f"echo2://10.0.0.7:8418/{_COORDINATOR.peer_id}?token={'A' * 43}".encode(), b"echo2://[::1]:1/x?token="],
    )
    config = 'preset = "wan"\n[run]\nname = "r"\n[staleness]\nbound = 4\n[learner]\nlr = 1e-6\nsteps = 3\n'
    yield "config", [config.encode(), b'[worker]\nemulated_link = "20mbit/s 0 80ms"\n']
    yield "journal", list(_journal_inputs())


def _peer_inputs() -> Iterator[tuple[str, list[bytes]]]:
    from echo2.broadcast.artifact import ArtifactId, Chunk, Header, Seal, root_of
    from echo2.broadcast.events import Cancel, Have, RelayAck, Request, Route, WidthWished

    made = Header(ArtifactId(Version(5), Version(4)), RunId("r"), "", 1.0, 4096, True, _COORDINATOR.peer_id)
    header = made.signed(_COORDINATOR)
    chunk = Chunk.signed(header.key, 0, True, b"payload" * 9, _COORDINATOR)[0]
    seal = Seal(header.key, 1, 63, root_of([chunk.verify(_COORDINATOR.peer_id)]), "ab" * 8).signed(_COORDINATOR)
    frame = bw.chunk_to_bytes(chunk)
    messages = bw.header_to_bytes(header), frame, bw.beside(Route(3, 1), False) + frame, bw.seal_to_bytes(seal)
    stream = b"".join(HEAD.pack(len(message)) + message for message in messages)
    yield "bulk_frames", [bytes([pace]) + stream for pace in (0, 7, 255)]
    cut = [stream[begin : begin + 90] for begin in range(0, len(stream), 90)]
    records = b"".join(b"\x17\x03\x03" + (len(part) + 17).to_bytes(2, "big") + part + bytes(17) for part in cut)
    yield "tls_records", [bytes([pace]) + records for pace in (0, 7, 255)]
    yield (
        "pipe_opening",
        [PipeAnswer(bytes(range(16))).to_bytes(), _tls_hello("peer.example", ["h2"]), _tls_hello("a.b", [])],
    )
    peer = PeerId("x")
    yield "peer_message", [
        bw.hello(1, RunId("r")), bw.header_to_bytes(header), frame, frame + bw.beside(Route(3, 1), True),
        bw.seal_to_bytes(seal), *map(bw.control_frame, (
            Have(peer, header.key, 0b1011, True), Request(peer, header.key, (0, 3)), Cancel(peer, header.key, (1,)),
            RelayAck(peer, header.key, 0, 2), WidthWished(peer, 4),
        )), bw.beside(Route(3, 1), False) + frame,
    ]  # fmt: skip


def _tls_hello(name: str, protocols: list[str]) -> bytes:
    """As OpenSSL writes it, with its randomness made even: the corpus is to be the same each time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        context.set_alpn_protocols(protocols)
    written = ssl.MemoryBIO()
    hello = context.wrap_bio(ssl.MemoryBIO(), written, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    made = bytearray(written.read())
    made[11:43] = made[44:76] = bytes(range(32))
    return bytes(made)


def _journal_inputs() -> Iterator[bytes]:
    from echo2.learner.rollouts import journal
    from echo2.learner.rollouts.groups import Group
    from tests.unit.wire.test_messages import GROUP, SEGMENT

    rollout = rw.rollout_from_message(rw.rollout_to_message(replace(SEGMENT, offset=0)))
    rewards = [journal_pb2.DrawnReward(value=0.5), journal_pb2.DrawnReward(is_failed=True)]
    group = journal_pb2.DrawnGroup(group_id=GROUP.group_id, rewards=rewards)
    drawn = journal_pb2.JournalRecord(batch=journal_pb2.DrawnBatch(step=0, groups=[group]))
    records = [
        journal.began("r", Step(0), 3, (Version(0), Version(2))), journal.opened(Group(GROUP, 7)),
        journal.published(Version(2), "ab" * 8), drawn, journal.closed(GROUP.group_id), journal.finished(rollout),
    ]  # fmt: skip
    for record in records:
        yield record.SerializeToString()


def main() -> None:
    write_corpus()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({name: len(list((CORPUS / name).iterdir())) for name in TARGETS}))


if __name__ == "__main__":
    main()
