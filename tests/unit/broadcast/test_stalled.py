"""What a node asks for, when and whom, and what it does about chunks that nobody gives or that its disk has changed; in virtual
time."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.artifact import LINEAGE, ArtifactId, ArtifactKey, Header, Seal, root_of, signed_chunks
from echo2.broadcast.events import Have, Request
from echo2.broadcast.library import RecentChunks
from echo2.broadcast.node import BroadcastNode, NodeCalls, NodeOptions
from echo2.broadcast.reachability import LinkKind, LinkWay
from echo2.broadcast.route import FORGOTTEN_S, STALL_S
from echo2.outside.streams import Remote
from echo2.trust import tls
from echo2.trust.identity import Identity, PeerIdentity, Role, RunAuthority
from echo2.trust.tls import Credentials
from echo2.wire import broadcast as wire
from tests.certificates import issued

pytestmark = pytest.mark.usefixtures("virtual_time")
RUN = RunId("a-run")
AUTHORITY = RunAuthority.create(Identity.generate(), RUN, time.time())
LEARNER, WORKER = (issued(AUTHORITY, role) for role in (Role.LEARNER, Role.WORKER))
SLACK_S = 2.0
PEER = PeerId("")  # whom a frame is for, only its connection says


class Promises:
    """A connection on which a peer says what it has, and nothing more. `later`: what it sends after a second."""

    is_outgoing, remotes, way = False, frozenset[Remote](), LinkWay(LinkKind.REVERSE, "it dialled us")
    greets_after_s = 0.0

    def __init__(self, *frames: bytes, later: tuple[bytes, ...] = (), of: Credentials = LEARNER) -> None:
        self.peer = PeerIdentity(of.peer_id, of.role)
        self._frames, self._later = [wire.hello(tls.PROTOCOL_VERSION, RUN), *frames], later
        self.asked_at: dict[ArtifactKey, list[float]] = {}
        self.ended = asyncio.Event()

    async def receive(self) -> bytes | None:
        await asyncio.sleep(self.greets_after_s)
        return self._frames.pop(0)

    async def receive_all(self, take: Callable[[bytes], bool]) -> None:
        for frames, after_s in ((self._frames, 1.0), (self._later, 1e9)):
            for frame in frames:
                take(frame)
            await asyncio.sleep(after_s)

    async def send(self, *parts: bytes) -> None:
        message = wire.parse(b"".join(parts), "the node")
        if message.WhichOneof("kind") == "request":
            key = ArtifactKey(message.request.key)
            self.asked_at.setdefault(key, []).append(asyncio.get_running_loop().time())

    async def close(self) -> None:
        pass


def header_of(version: int, parent: int | None = None) -> Header:
    artifact = ArtifactId(Version(version), None if parent is None else Version(parent))
    return Header(artifact, RUN, "", 1.0, 1 << 20, True, LEARNER.peer_id).signed(LEARNER.identity)


def two_chunks_of(header: Header) -> tuple[bytes, bytes]:
    """The frames by which a peer says that it has them."""
    return wire.header_to_bytes(header), wire.control_frame(Have(PEER, header.key, 0b11, False))


async def asked_of(
    folder: Path, promises: Promises, seconds: float, live: Version | None = None, *, known_after_s: float = 0.0
) -> dict[ArtifactKey, list[float]]:
    """What a worker asks a peer for, and when. `known_after_s`: of the link, when it hears who the learner is."""
    node = BroadcastNode(WORKER, NodeOptions(folder))
    node.set_live(live)
    await node.start()
    serving = asyncio.create_task(node.accept(promises))
    await asyncio.sleep(known_after_s)
    node.set_publisher(LEARNER.peer_id, "")
    await asyncio.sleep(seconds)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await node.stop()
    return promises.asked_at


async def test_what_the_way_leads_over_is_asked_for_also_where_a_last_chunk_makes_it_another(tmp_path: Path) -> None:
    """A delta over two versions is fewer bytes than both steps, until the second of them has come."""
    over, first, second = header_of(2, 0), header_of(1, 0), header_of(2, 1)
    ((chunk, digest),) = signed_chunks(1 << 20, LEARNER.identity, second.key, 0, bytes(400_000))
    seals = [
        Seal(header.key, 1, size, root_of([digest]), "").signed(LEARNER.identity)
        for header, size in ((over, 150_000), (first, 100_000), (second, 400_000))
    ]
    promises = Promises(
        *(wire.header_to_bytes(header) for header in (over, first, second)), *map(wire.seal_to_bytes, seals),
        *(wire.control_frame(Have(PEER, header.key, 1, True)) for header in (over, first)),
        later=(wire.chunk_to_bytes(chunk),),
    )  # fmt: skip
    asked = await asked_of(tmp_path, promises, 3.0, Version(0))
    assert asked[over.key][0] < 1.0 < asked[first.key][0]


async def test_the_only_way_is_asked_for_however_long_nothing_of_it_comes(tmp_path: Path) -> None:
    header = header_of(1)
    asked = (await asked_of(tmp_path, Promises(*two_chunks_of(header)), 2 * STALL_S + FORGOTTEN_S))[header.key]
    assert any(at < STALL_S for at in asked)
    assert [at for at in asked if STALL_S + SLACK_S < at < FORGOTTEN_S], "there is no other way"
    assert [at for at in asked if at > FORGOTTEN_S + STALL_S], "and it may come after all"


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_a_version_published_again_is_the_newer_one_also_where_the_learners_clock_has_gone_back(
    tmp_path: Path, is_on_disk: bool
) -> None:
    """Workers take the newer of two publications, and of the first nobody sends the rest. If its chunks are lost, they tell it."""
    artifact, ahead_unix_s = ArtifactId(Version(1), None), time.time() + 3600
    header = Header(artifact, RUN, LINEAGE, ahead_unix_s, 1 << 20, True, LEARNER.peer_id).signed(LEARNER.identity)
    if is_on_disk:
        killed = BroadcastNode(LEARNER, NodeOptions(tmp_path))
        killed.library.add_header(header)
        killed.library.close()
    node = BroadcastNode(LEARNER, NodeOptions(tmp_path))
    await node.start()
    if not is_on_disk:
        assert not node.exchange.on_header(PEER, header)
    await node.publish(artifact, iter([bytes(250)]), lambda: "print", 1 << 20)
    (entry,) = node.artifacts_available()
    assert entry.header.published_unix_s > ahead_unix_s
    await node.stop()


async def test_a_learner_with_a_new_identity_publishes_anew_what_the_old_one_has_signed(tmp_path: Path) -> None:
    """Workers take nothing that another has signed: newcomers waited for a keyframe that did not come."""
    for _ in range(2):
        node = BroadcastNode(issued(AUTHORITY, Role.LEARNER), NodeOptions(tmp_path))
        await node.start()
        await node.publish(ArtifactId(Version(1), None), iter([bytes(250)]), lambda: "print", 1000)
        assert [entry.header.publisher for entry in node.artifacts_available()] == [node.peer_id]
        await node.stop()


async def test_a_learner_that_has_gone_back_publishes_its_version_anew_and_gives_up_later_ones(tmp_path: Path) -> None:
    """Where its chunks are those of before: nobody followed it, and the next version was another's of that number."""
    node = BroadcastNode(LEARNER, NodeOptions(tmp_path))
    await node.start()
    for version in (1, 2, 1):
        await node.publish(ArtifactId(Version(version), None), iter([bytes(250)]), lambda: "print", 1000)
    times = [entry.header.published_unix_s for entry in node.artifacts_available() if entry.artifact.version == 1]
    assert len(times) == len(node.library.entries) == 2 and min(times) < max(times) == node.library.published_unix_s
    await node.stop()


async def test_a_publisher_makes_up_for_a_chunk_that_its_disk_has_changed(tmp_path: Path) -> None:
    """Whoever asks for it gets nothing, and its publisher is told which artifact to publish anew."""
    lost: list[str] = []
    node = BroadcastNode(LEARNER, NodeOptions(tmp_path), calls=NodeCalls(lost=lost.append))
    node.library.recent = RecentChunks(0)
    await node.start()
    artifact = ArtifactId(Version(1), None)
    await node.publish(artifact, iter([bytes(range(250))]), lambda: "print", 1000)
    (path,) = tmp_path.glob("*.artifact")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(range(100, 110)))] ^= 1
    path.write_bytes(bytes(data))
    key = node.library.find(artifact)
    assert key is not None and lost == []
    asks = Promises(wire.control_frame(Request(PEER, key, (0,))), of=WORKER)
    serving = asyncio.create_task(node.accept(asks))
    await asyncio.sleep(3.0)
    assert node.library.find(artifact) is None and key not in node.session.artifacts and lost == [str(artifact)]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await node.stop()


async def test_what_was_said_before_the_learner_is_known_is_taken_then(tmp_path: Path) -> None:
    header = header_of(1)
    asked = await asked_of(tmp_path, Promises(*two_chunks_of(header)), 3.0, known_after_s=5.0)
    assert asked[header.key][0] > 5.0


async def test_a_lie_that_was_told_before_the_learner_is_known_ends_its_tellers_link_alone(tmp_path: Path) -> None:
    promises = Promises(*two_chunks_of(replace(header_of(1), signature=bytes(64))), of=issued(AUTHORITY, Role.WORKER))
    assert not await asked_of(tmp_path, promises, 3.0, known_after_s=5.0)


async def test_what_the_way_leads_over_no_longer_is_asked_for_no_more(tmp_path: Path) -> None:
    old, new = header_of(1), header_of(2)
    asked = await asked_of(tmp_path, Promises(*two_chunks_of(old), later=two_chunks_of(new)), 9.0)
    assert asked[old.key][-1] < 1.5 < asked[new.key][0] + 0.5 and asked[new.key][-1] > 5.0


async def test_workers_go_back_with_a_learner_that_was_restored_from_an_older_backup(tmp_path: Path) -> None:
    """They hold versions of which it knows nothing, and waited for one that is later still."""
    ahead, further = header_of(9, 8), header_of(10)
    back = replace(header_of(5), published_unix_s=2.0).signed(LEARNER.identity)
    later = *two_chunks_of(back), *two_chunks_of(further)  # by one who has not heard of it
    asked = await asked_of(tmp_path, Promises(*two_chunks_of(ahead), later=later), 9.0, Version(9))
    assert list(asked) == [back.key] and asked[back.key][0] > 1.0


async def test_who_is_not_ahead_of_a_learner_that_has_gone_back_stays_where_it_is(tmp_path: Path) -> None:
    node = BroadcastNode(WORKER, NodeOptions(tmp_path))
    for back_to, live, stays in ((5, 5, 5), (5, 9, None), (None, 6, 6)):  # it goes back once
        node.library.back_to = Version(back_to) if back_to is not None else node.library.back_to
        node.set_live(Version(live))
        node._update_wants()
        assert node.reader.version == stays
    node.exchange.trust(LEARNER.peer_id)
    for header in (replace(header_of(5), published_unix_s=2.0).signed(LEARNER.identity), header_of(5, 4)):
        node.exchange.on_header(PEER, header)
    assert len(node.library.entries) == 2, "a keyframe is later than the delta to its version"
    await node.stop()


async def test_a_peer_that_takes_its_time_to_say_hello_is_dialled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second connection would replace the first as soon as that is a link."""
    dialled_at = list[float]()

    async def dial(address: str, peer_id: PeerId) -> Promises:
        dialled_at.append(asyncio.get_running_loop().time())
        made = Promises()
        made.greets_after_s = 2.0
        return made

    node = BroadcastNode(WORKER, NodeOptions(tmp_path))
    monkeypatch.setattr(node._connections, "_dial_at", dial)
    node.set_publisher(LEARNER.peer_id, "127.0.0.1:4711")
    await node.start()
    await asyncio.sleep(2.5)
    assert node._connections.links_made == 1
    await node.stop()
    assert len(dialled_at) == 1
