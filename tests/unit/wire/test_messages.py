"""Messages and the core's types: nothing is lost on the way, whatever is inconsistent is refused by its field, and chunks that are
written and read by hand are protobuf's."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, strategies as st

from echo2.base.errors import BadSignature, EchoError, MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Version
from echo2.base.rollout import (
    FinishReason,
    GroupSpec,
    Rollout,
    SamplingParams,
    SegmentVerdict,
    Verdict,
    VersionSpan,
    Work,
)
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey, Chunk, Seal
from echo2.broadcast.events import Have, Request, Route, WidthWished
from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Tree
from echo2.trust.identity import Identity
from echo2.wire import broadcast as bw, rollout as rw
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket, verify_ticket
from tests.contract.test_golden import filled

W, PEER = "a peer", PeerId("p")
Convert = Callable[[Any], Any]
FRAME = broadcast_pb2.PeerMessage


def framed(kind: str) -> Callable[[bytes], Message]:
    """The message in a frame of the broadcast."""
    return lambda data: getattr(FRAME.FromString(data), kind)  # type: ignore[no-any-return]


def through(there: Convert, back: Convert) -> Convert:
    return lambda message: back(there(message))


def controlled(kind: str) -> Convert:
    return lambda message: framed(kind)(bw.control_frame(bw.control_from(FRAME(**{kind: message}), PEER)))


ROUND_TRIPS: dict[type[Message], Convert] = {
    rollout_pb2.GroupSpec: through(rw.group_from_message, rw.group_to_message),
    rollout_pb2.RolloutSegment: through(rw.segment_from_message, rw.rollout_to_message),
    ingest_pb2.SegmentVerdict: through(rw.verdict_from_message, rw.verdict_to_message),
    broadcast_pb2.BroadcastPlan: through(bw.plan_from_message, bw.plan_to_message),
    broadcast_pb2.PeerAccess: through(bw.access_from_message, bw.access_to_message),
    broadcast_pb2.ArtifactHeader: through(bw.header_from, through(bw.header_to_bytes, framed("header"))),
    broadcast_pb2.ArtifactSeal: through(bw.seal_from, through(bw.seal_to_bytes, framed("seal"))),
    broadcast_pb2.PeerHello: lambda m: framed("hello")(
        bw.hello(m.protocol_version, RunId(m.run_id), is_further=m.is_further)
    ),
    broadcast_pb2.HaveMap: controlled("have"),
    broadcast_pb2.ChunkRequest: controlled("request"),
    broadcast_pb2.ChunkCancel: controlled("cancel"),
    broadcast_pb2.RelayAck: controlled("relay_ack"),
    broadcast_pb2.WidthWish: controlled("width_wish"),
}
READ: dict[type[Message], Convert] = {
    coordinator_pb2.OfferGroups: lambda m: rw.offer_from_message(m, W),
}
"""Read only: what is read must depend on every field."""
SENSIBLE: dict[str, dict[str, Any]] = {  # values that fit together, in the place of those that follow from names
    "SamplingParams": {"top_p": 0.5, "temperature": 1.5, "max_new_tokens": 64},
    "GroupSpec": {"rollout_count": 4},
    "RolloutSegment": {
        "index": 3, "token_ids": [5, 6], "logprobs": [-0.5, -0.25], "raw_logprobs": [-0.75, -1.5],
        "version_spans": [rollout_pb2.VersionSpan(version=4, count=1), rollout_pb2.VersionSpan(version=5, count=1)],
        "finish_reason": 0, "routing": b"abcd", "prompt_routing": b"efghij",
    },
    "SegmentVerdict": {"index": 3},
    "PlanTree": {"parents": [0], "weight": 0.5},
    "BroadcastPlan": {"topology": "multi_tree", "predicted_s": [1.5]},
    "PlanNode": {"addresses": ["10.0.0.1:7", "10.0.0.2:8"]},
    "PeerAccess": {"lan_addresses": ["10.0.0.1:7", "10.0.0.2:8"], "public_host": "10.1.1.1"},
    "ArtifactHeader": {"parent": 1, "version": 2, "signature": bytes(64)},
    "ArtifactSeal": {"key": bytes(range(16)), "root_sha256": bytes(32), "signature": bytes(64)},
    "ChunkFrame": {"key": bytes(range(16)), "signature": bytes(64)},
    "HaveMap": {"key": bytes(range(16))}, "ChunkRequest": {"key": bytes(range(16))},
    "ChunkCancel": {"key": bytes(range(16))}, "RelayAck": {"key": bytes(range(16))}, "WidthWish": {"connections": 3},
}  # fmt: skip


def sensible(message: Any) -> Any:
    """Every field set, to values that a reader takes."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else (value,):
                sensible(one)
    for name, value in SENSIBLE.get(message.DESCRIPTOR.name, {}).items():
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def instance(kind: type[Message]) -> Any:
    return sensible(filled(kind.DESCRIPTOR))


@pytest.mark.parametrize("kind", ROUND_TRIPS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_message_comes_out_of_the_cores_type_as_it_went_in_or_is_refused(kind: type[Message]) -> None:
    """With all its fields, and without any one of them."""
    message = instance(kind)
    assert ROUND_TRIPS[kind](message) == message
    for field in kind.DESCRIPTOR.fields:
        lacking = kind()
        lacking.CopyFrom(message)
        lacking.ClearField(field.name)
        lacking.ClearField("parent") if field.name == "has_parent" else None
        with contextlib.suppress(MalformedMessage):
            assert ROUND_TRIPS[kind](lacking) == lacking, field.name


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.DESCRIPTOR.name)
def test_what_is_read_depends_on_every_field(kind: type[Message]) -> None:
    read, whole = READ[kind], instance(kind)
    for field in kind.DESCRIPTOR.fields:
        lacking = kind()
        lacking.CopyFrom(whole)
        lacking.ClearField(field.name)
        try:
            found = read(lacking)
        except Exception:  # noqa: BLE001  (it is missed: that is all that is asked)
            continue
        assert found != read(whole), f"{kind.DESCRIPTOR.name}.{field.name} is read by nobody"


# ---- rollouts, groups and tickets

SAMPLING = SamplingParams(temperature=0.5, top_p=0.75, top_k=20, max_new_tokens=64, stop_token_ids=(2, 3), seed=7)
GROUP = GroupSpec(GroupId("g-17"), (1, 5, 300), 8, SAMPLING, 42)
SEGMENT = Rollout(
    GroupId("g-17"),
    3,
    (5, 6, 7),
    (-0.5, -0.25, -1.0),
    (-0.75, -0.5, -1.5),
    (VersionSpan(Version(4), 2), VersionSpan(Version(5), 1)),
    FinishReason.UNFINISHED,
    offset=10,
    expected_remaining_tokens=12,
)


def test_a_whole_rollout_travels_as_the_segment_at_offset_0() -> None:
    rollout = Rollout(
        GroupId("g"), 1, (4, 5), (-1.0, -2.0), (-1.0, -2.0), (VersionSpan(Version(0), 2),), FinishReason.LENGTH
    )
    assert rw.rollout_from_message(rw.rollout_to_message(rollout)) == rollout
    reply = ingest_pb2.GetPartialsReply(rollouts=[rw.rollout_to_message(rollout)])
    assert rw.rollouts_from_partials(reply) == (rollout,)
    reply.rollouts.add().CopyFrom(rw.rollout_to_message(rollout))
    with pytest.raises(MalformedMessage, match="each index once"):
        rw.rollouts_from_partials(reply)
    with pytest.raises(MalformedMessage, match=r"expected it whole, got tokens 10\.\."):
        rw.rollout_from_message(rw.rollout_to_message(SEGMENT))


def broken(made: Rollout | GroupSpec, **fields: object) -> Callable[[], object]:
    """Reads the message of a segment or a group with other `fields`; None: without it."""
    message: Any = rw.rollout_to_message(made) if isinstance(made, Rollout) else rw.group_to_message(made)
    for name, value in fields.items():
        if value is None or isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value or ()) if value is not None else None
        else:
            setattr(message, name, value)

    def decode() -> object:
        return (rw.segment_from_message if isinstance(made, Rollout) else rw.group_from_message)(message)

    return decode


SPAN = rollout_pb2.VersionSpan


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (broken(SEGMENT, group_id=""), "group_id: expected one, got none"),
        (broken(SEGMENT, offset=1 << 20), "end of rollout 3 of group g-17"),
        (broken(SEGMENT, token_ids=[1] * (rw.SEGMENT_TOKENS_MAX + 1)), "number of token_ids"),
        (broken(SEGMENT, logprobs=[-0.5]), "expected 3 log-probabilities, one a token, got 1"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=1)]), "version spans that cover 3 tokens, got 1"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=0)]), "count of a version span"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=1)] * 4), "number of version_spans"),
        (broken(GROUP, prompt_token_ids=[]), "number of prompt_token_ids of group g-17: expected 1"),
        (broken(GROUP, rollout_count=0), "rollout_count of group g-17: expected 1 or more, got 0"),
        (broken(GROUP, sampling=None), "sampling of group g-17: expected sampling parameters, got none"),
        (broken(GROUP, work=1), "exact_version of group g-17: expected one for work to evaluate, got None"),
        (broken(GROUP, exact_version=3), "exact_version of group g-17: expected none for work to train, got 3"),
    ],
)
def test_a_malformed_message_is_refused_by_field(decode: Callable[[], object], words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        decode()


def test_reports_and_verdicts_over_their_limits_are_refused() -> None:
    report = ingest_pb2.RolloutReport()
    for _ in range(5):
        report.segments.add(token_ids=[1] * rw.SEGMENT_TOKENS_MAX)
    with pytest.raises(MalformedMessage, match="number of tokens of a report"):
        rw.segments_from_report(report)
    with pytest.raises(MalformedMessage, match="expected a known verdict, got 0"):
        rw.verdict_from_message(ingest_pb2.SegmentVerdict(group_id="g"))


@pytest.mark.parametrize("held", [(), (7,), (0, 7), (1, 2, 3)])
def test_an_offer_counts_the_tokens_of_none_or_each_of_its_groups(held: tuple[int, ...]) -> None:
    groups = (GROUP, replace(GROUP, group_id=GroupId("g-18")))
    message = coordinator_pb2.OfferGroups(groups=map(rw.group_to_message, groups), held_tokens=held)
    if len(held) in (0, 2):
        assert rw.offer_from_message(message, "the learner") == (groups, held)
        return
    with pytest.raises(MalformedMessage, match=f"held_tokens of the learner: expected .* 2 groups, got {len(held)}"):
        rw.offer_from_message(message, "the learner")


def test_enumerations_on_the_wire_have_the_names_of_ours() -> None:
    """The byte of a value is contract (tests/contract/test_golden); here, that each stands for what it says."""
    for verdict in Verdict:
        made = rw.verdict_to_message(SegmentVerdict(GroupId("g"), 3, verdict, 10, "why"))
        assert ingest_pb2.SegmentVerdict.Verdict.Name(made.verdict) == f"VERDICT_{verdict.name}"
        assert rw.verdict_from_message(made) == SegmentVerdict(GroupId("g"), 3, verdict, 10, "why")
    for reason in set(FinishReason) - {FinishReason.UNFINISHED}:
        finish = rw.rollout_to_message(replace(SEGMENT, finish_reason=reason)).finish_reason
        assert rollout_pb2.FinishReason.Name(finish) == f"FINISH_REASON_{reason.name}"
    evaluated = replace(GROUP, work=Work.EVALUATE, exact_version=Version(12))
    assert rw.group_to_message(evaluated).work == rollout_pb2.WORK_EVALUATE
    assert rw.group_from_message(rw.group_to_message(evaluated)) == evaluated


COORDINATOR = Identity.generate()
WORKER = Identity.generate()
RUN = RunId("a-run")
TICKET = Ticket(LeaseId("lease-1"), GroupId("group-1"), WORKER.peer_id, 1, 1e9, RUN)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused(at: int, flip: int) -> None:
    data = bytearray(sign_ticket(TICKET, COORDINATOR).SerializeToString())
    data[at % len(data)] ^= flip
    try:
        message = rollout_pb2.LeaseTicket.FromString(bytes(data))
    except Exception:  # noqa: BLE001 - protobuf's decoder refused it first
        return
    with pytest.raises(EchoError):
        verify_ticket(message, RUN, COORDINATOR.peer_id, WORKER.peer_id)


def test_a_signed_ticket_comes_back_whole_and_a_forgers_another_runs_and_another_workers_are_refused() -> None:
    forged = sign_ticket(TICKET, WORKER)
    with pytest.raises(BadSignature, match="expected the signature of the coordinator"):
        verify_ticket(forged, RUN, COORDINATOR.peer_id, WORKER.peer_id)
    good = sign_ticket(TICKET, COORDINATOR)
    assert verify_ticket(good, RUN, COORDINATOR.peer_id, WORKER.peer_id) == TICKET
    with pytest.raises(NotAllowed, match="expected a ticket of run other"):
        verify_ticket(good, RunId("other"), COORDINATOR.peer_id, WORKER.peer_id)
    with pytest.raises(NotAllowed, match="granted to"):
        verify_ticket(good, RUN, COORDINATOR.peer_id, COORDINATOR.peer_id)
    with pytest.raises(MalformedMessage):
        verify_ticket(rollout_pb2.LeaseTicket(), RUN, COORDINATOR.peer_id, WORKER.peer_id)


# ---- chunks and plans

KEY = ArtifactKey(bytes(range(16)))
IDENTITY = Identity.from_private_bytes(bytes(32))
PLAIN = bw.chunk_to_bytes(Chunk.signed(KEY, 3, True, b"payload", IDENTITY)[0])


@given(
    st.integers(0, CHUNKS_MAX - 1), st.booleans(),
    st.binary(max_size=300) | st.sampled_from([bytes(127), bytes(128), bytes(20_000), bytes(3 << 20)]),
    st.none() | st.builds(Route, st.integers(0, 1 << 40), st.integers(0, 31)), st.booleans(),
)  # fmt: skip
def test_a_chunk_written_and_read_by_hand_is_protobufs_wherever_its_route_stands(
    index: int, ends_block: bool, payload: bytes, route: Route | None, is_answer: bool
) -> None:
    chunk = Chunk.signed(KEY, index, ends_block, payload, IDENTITY)[0]
    record, beside = bw.chunk_to_bytes(chunk), bw.beside(route, is_answer)
    message = FRAME(
        chunk=broadcast_pb2.ChunkFrame(
            key=KEY, index=index, ends_block=ends_block, signature=chunk.signature, payload=payload
        )
    )
    assert record == message.SerializeToString()
    if is_answer:
        message.is_answer, route = True, None
    elif route is not None:
        message.route.CopyFrom(broadcast_pb2.Route(epoch=route.epoch, tree=route.tree))
    for data in (record + beside, beside + record):
        found = bw.chunk_in(data, "peer x")
        assert bw.parse(data, "peer x") == message
        assert found == bw.ChunkIn(chunk, memoryview(record), route, is_answer)


def test_a_chunk_that_is_not_as_nodes_write_it_or_beyond_its_bounds_is_refused() -> None:
    have = bw.control_frame(Have(PEER, KEY, 1, False))
    unsigned = FRAME(chunk=broadcast_pb2.ChunkFrame(key=KEY, payload=b"payload")).SerializeToString()
    for frame in (b"", PLAIN[:-1], PLAIN + PLAIN, PLAIN + have, unsigned, have, PLAIN + bytes(40)):
        assert bw.chunk_in(frame, "peer x") is None
    for message in (FRAME(hello=broadcast_pb2.PeerHello()), FRAME.FromString(unsigned)):
        with pytest.raises(MalformedMessage, match="got another (hello|chunk)"):
            bw.control_from(message, PEER)
    far = FRAME(chunk=broadcast_pb2.ChunkFrame(key=KEY, index=CHUNKS_MAX, signature=bytes(64), payload=b"x"))
    for read in (bw.chunk_in, bw.parse):
        with pytest.raises(MalformedMessage):
            read(far.SerializeToString(), "peer x")


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (bw.control_frame(Have(PEER, ArtifactKey(b"short"), 1, False)), "expected 16 bytes, got 5"),
        (bw.control_frame(Request(PEER, KEY, (CHUNKS_MAX,))), f"of peer p: expected 0 to {CHUNKS_MAX - 1}, got"),
        (
            bw.control_frame(Request(PEER, KEY, tuple(range(4096 + 1)))),
            "number of indices of peer p: expected up to 4096",
        ),
        (bw.seal_to_bytes(Seal(KEY, 1, 1, b"short", "f", b"s")), "expected a root hash of 32 bytes, got 5"),
        (bw.control_frame(WidthWished(PEER, LINK_CONNECTIONS + 1)), "width of peer p: expected 1 to"),
        (b"", "expected a PeerMessage of a known kind"),
        (b"\xff\xff", "expected a PeerMessage, got 2 bytes that are not"),
    ],
    ids=["short key", "index too large", "too many indices", "short root", "too wide", "empty", "rubbish"],
)
def test_what_is_out_of_bounds_is_refused_in_words(frame: bytes, expected: str) -> None:
    with pytest.raises(MalformedMessage, match=expected):
        message = bw.parse(frame, "peer p")
        bw.seal_from(message.seal) if message.HasField("seal") else bw.control_from(message, PEER)


@pytest.mark.parametrize("parents", [(0,), (0, 1, 2), (0, 3)])
def test_a_plan_whose_trees_are_not_of_its_nodes_is_refused(parents: tuple[int, ...]) -> None:
    nodes = tuple(NodeLink(IDENTITY.peer_id, f"n{number}", (), 1.0, 1.0, 0.1) for number in range(3))
    message = bw.plan_to_message(BroadcastPlan(3, nodes, (Tree(1.0, (0, 1)),), "multi_tree", (1.0,), 1, ""))
    assert bw.plan_from_message(message).trees == (Tree(1.0, (0, 1)),)
    message.trees[0].parents[:] = parents
    with pytest.raises(MalformedMessage, match="plan: expected trees over 3 nodes"):
        bw.plan_from_message(message)
