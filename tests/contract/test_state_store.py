"""One contract for every state store: SQLite always, PostgreSQL where a server is installed (a soak test)."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from echo2.base.errors import DiskFull, StateError, Unreachable
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.coordinator.fleet.members import Liveness, Member, OperatorSetting
from echo2.coordinator.fleet.tokens import Token
from echo2.coordinator.leases.lease import GroupPhase, Lease, OpenGroup
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.coordinator.store import _ROWS, CurvePoint, LoggedEvent, PaidAction, Row, SqlStore, StateChanges, TokenPeer
from echo2.outside import files
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from tests.unit.coordinator import test_daemon as daemon_tests

RUN = RunId("a-run")
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def _postgres(folder: Path) -> Iterator[str]:
    """A server of its own on a unix socket, run by an unprivileged user."""
    if not POSTGRES or shutil.which("runuser") is None or os.geteuid() != 0:
        pytest.skip("no PostgreSQL server is installed, or no right to run one as another user")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    home = Path("/tmp") / f"echo2-pg-{os.getpid()}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    shutil.chown(home, "postgres", "postgres")
    run = ["runuser", "-u", "postgres", "--"]
    tools = POSTGRES[-1].parent
    control = [*run, tools / "pg_ctl", "-D", home / "data", "-w", "-t", "60"]
    subprocess.run([*run, tools / "initdb", "-D", home / "data", "-A", "trust"], check=True, capture_output=True)
    settings = f"-k {home} -c listen_addresses=''"
    subprocess.run([*control, "-o", settings, "-l", home / "log", "start"], check=True, capture_output=True)
    try:
        yield f"postgresql+psycopg://postgres@/postgres?host={home}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=False, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'state.sqlite'}"
    else:
        yield from _postgres(tmp_path)


STOP = "。".encode()  # of which a token may have a part, no UTF-8
SAMPLING = SamplingParams(max_new_tokens=8, stop_strings=(STOP,), stop_piece_ids=(5,), stop_pieces=(STOP[:2],))
SPEC = GroupSpec(GroupId("g"), (1, 2), 4, SAMPLING, 3)
GROUP = OpenGroup(SPEC, GroupPhase.LEASED, 5.0, attempts=2, refusals=1, lease_id=LeaseId("l"), expected_tokens=9.0)
LEASE = Lease(LeaseId("l"), GroupId("g"), PeerId("w"), 2, 5.0, 35.0, 6.0, 1, 40, is_recalled=True)
MEMBER = Member(
    PeerId("w"), coordinator_pb2.WorkerHello(name="w", addresses=["h:1"], gpu="A100", link={"rtt_s": 0.1}), 1.0, 9.0,
    heartbeat=coordinator_pb2.Heartbeat(version=3, has_version=True, rollouts_per_s=2.0),
    setting=OperatorSetting.DRAINING, setting_reason="why", usd_spent=1.5, last_liveness=Liveness.SUSPECT,
    is_wanted=False, price_approved=1.5, activation_since=4.0, metered_until=8.5,
)  # fmt: skip
TOKEN = Token("t", "h" * 64, "worker", "mine", 0.0, 99.0, 2, True, {PeerId("w")})
MACHINE = RentedMachine(
    "m", "gpu", "cloud", "mine", MachineState.GONE, 2.0, 5.0, 8.0, "t", "join", "taken", (PeerId("v"),)
)


def rows(*changed: Row, must_last: bool = False, **meta: str) -> StateChanges:
    """One transaction that writes these rows."""
    kinds = {OpenGroup: "groups", Lease: "leases", Member: "members", Token: "tokens", RentedMachine: "machines"}
    keys = {OpenGroup: "g", Lease: "l", Member: "w", Token: "t", RentedMachine: "m"}
    changes = StateChanges(must_last=must_last)
    for row in changed:
        if isinstance(row, TokenPeer):
            changes.rows["token_peers", f"{row.token_id} {row.peer_id}"] = row
        else:
            changes.rows[kinds[type(row)], keys[type(row)]] = row
    changes.rows.update({("meta", key): value for key, value in meta.items()})
    return changes


EVENT = LoggedEvent(1.0, "k", "text")
SAMPLE = CurvePoint(1.0, 2, 0.5, None, 0.9, 0.95, 1.0, 2.0)
PAID = PaidAction(1.0, "active", "w", "why", 0.5, 0.0)
ALL = rows(GROUP, LEASE, MEMBER, TOKEN, MACHINE, TokenPeer("t", PeerId("w")), port="7")
ALL.log.extend([("events", EVENT), ("samples", SAMPLE), ("paid", PAID)])


def test_a_server_that_does_not_answer_is_no_wrong_state(tmp_path: Path) -> None:
    """Whatever starts the coordinator again, as a unit of systemd does, has to: PostgreSQL may be back."""
    with closing(SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN)) as store:
        for file, text, kind in (
            (None, "server closed the connection", Unreachable), (None, "No space left on device", DiskFull),
            (tmp_path, "database is locked", StateError),
        ):  # fmt: skip
            store._file = file
            assert type(store._error(sa.exc.OperationalError("", None, Exception(text)))) is kind


def test_what_was_written_is_there_after_the_process_is_gone_and_later_writes_replace_and_drop(url: str) -> None:
    with closing(SqlStore(url, RUN)) as store:
        store.write(rows(replace(GROUP, not_before=1e9)))  # by a clock that a restart may find set back
        assert store.load().groups == (GROUP,)
        store.write(ALL)
        with sa.create_engine(url).begin() as connection:  # a release that knew nothing of it wrote no such field
            older = "UPDATE \"rows\" SET json = replace(json, ',\"replaced\":[\"v\"]', '') WHERE kind = 'machines'"
            assert connection.execute(sa.text(older + " AND json LIKE '%\"replaced\"%'")).rowcount == 1
    with closing(SqlStore(url, RUN)) as store:
        saved = store.load()
        assert (saved.groups, saved.leases, saved.members) == ((GROUP,), (LEASE,), (MEMBER,))
        assert (saved.tokens, saved.machines, saved.meta["port"]) == ((TOKEN,), (replace(MACHINE, replaced=()),), "7")
        for (kind, _), row in ALL.rows.items():  # else a field that is not written would not be missed
            if kind in ("groups", "leases", "members", "tokens", "machines"):
                usual = [field.name for field in fields(row) if getattr(row, field.name) == field.default]
                assert not set(usual) & set(_ROWS[kind]._names)
        assert (saved.events, saved.samples, saved.paid) == ((EVENT,), (SAMPLE,), (PAID,))
        store.write(rows(replace(LEASE, tokens=80), TokenPeer("t", PeerId("x"), 7.5), TokenPeer("t", PeerId("v"), 6.5)))
        saved = store.load()
        assert saved.leases[0].tokens == 80 and saved.tokens[0].peers == {"v", "w", "x"}
        assert list(saved.tokens[0].silent.items()) == [("v", 6.5), ("x", 7.5)], "a row each, oldest first"
        store.write(StateChanges({("groups", "g"): None, ("groups", "unknown"): None, ("token_peers", "t v"): None}))
        store.write(StateChanges(log=[("events", LoggedEvent(float(i), "k", str(i))) for i in range(10)]))
        store.write(StateChanges(log=[("paid", replace(PAID, unix_s=float(i))) for i in range(10)]))
        store.prune(events_max=3, samples_max=3, paid_max=3)
        saved = store.load()
        assert (saved.groups, len(saved.members), saved.tokens[0].peers) == ((), 1, {"w", "x"})
        assert [event.text for event in saved.events] == ["7", "8", "9"]
        assert [paid.unix_s for paid in saved.paid] == [7.0, 8.0, 9.0], "what grows for weeks has an end"


def test_write_is_all_or_nothing(url: str) -> None:
    store, engine = SqlStore(url, RUN), sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE log RENAME TO elsewhere"))
    with pytest.raises(StateError):
        store.write(ALL)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO log"))
    engine.dispose()
    saved = store.load()
    assert (saved.groups, saved.leases, saved.members, saved.meta) == ((), (), (), {})
    store.close()


def test_state_of_another_run_and_of_another_schema_are_refused(url: str, tmp_path: Path) -> None:
    SqlStore(url, RUN).close()
    with pytest.raises(StateError, match="'a-run'"):
        SqlStore(url, RunId("b-run"))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE meta SET value = '3' WHERE key = 'schema_version'"))
    mark = tmp_path / "state.mark"
    mark.write_text("as an older schema wrote it")
    with pytest.raises(StateError, match="got 3"):  # the schema is told, not what it has made unreadable
        SqlStore(url, RUN, mark)
    engine.dispose()


def test_full_disk_is_told_as_such(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN)
    with store._engine.connect() as connection:
        pages = connection.execute(sa.text("PRAGMA page_count")).scalar()
    store.close()
    store = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN)

    @sa.event.listens_for(store._engine, "connect")
    def _limit(connection: object, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")  # type: ignore[attr-defined]

    store._engine.dispose()
    with pytest.raises(DiskFull, match="expected room"):
        for index in range(200):
            store.write(rows(**{f"k{index}": "x" * 1000}))
    assert isinstance(store._error(OSError(errno.EDQUOT, "Disk quota exceeded")), DiskFull)
    store.close()


async def test_a_coordinator_on_this_store_goes_on_where_it_was(url: str, tmp_path: Path) -> None:
    chosen = daemon_tests.options(tmp_path, database_url=url)
    async with daemon_tests.running(chosen) as daemon:
        learner = await daemon_tests.Node.join(daemon, Role.LEARNER)
        worker = await daemon_tests.Node.join(daemon, Role.WORKER)
        await learner.hello(open_groups=[daemon_tests.group("g1")])
        await worker.hello(name="berlin")
        await worker.say(lease_request=coordinator_pb2.LeaseRequest(free_rollouts=8, version=0))
        ticket = (await worker.until("lease_grant")).ticket
        for node in (worker, learner):
            await node.close()
    assert not (tmp_path / "coordinator" / "state.sqlite").exists()
    async with daemon_tests.running(chosen) as daemon:
        assert daemon.hub is not None
        assert [member.name for member in daemon.hub.membership.members.values()] == ["berlin"]
        assert set(daemon.hub.book.leases) == {ticket.lease_id}


def test_checkpoints_on_another_thread_let_the_log_start_over_and_neither_stop_nor_lose_writes(tmp_path: Path) -> None:
    log, count = tmp_path / "state.sqlite-wal", 60
    with closing(SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN)) as store, ThreadPoolExecutor(1) as pool:
        for number in range(2 * count):
            done = pool.submit(store.checkpoint if number >= count else int)
            store.write(StateChanges(log=[("events", LoggedEvent(1.0, "k" * 400, str(number)))]))
            done.result()
            if number == count - 1:
                grown = log.stat().st_size
        assert log.stat().st_size < 1.5 * grown
        assert [event.text for event in store.load().events] == [str(number) for number in range(2 * count)]
    store.checkpoint()  # told after the end, by a thread that was late


# ---- a database that is not what it was: SQLite, with the count of changes that must last beside it


def kept_in(folder: Path) -> SqlStore:
    return SqlStore(f"sqlite:///{folder / 'state.sqlite'}", RUN, folder / "state.mark")


BANNED = replace(MEMBER, setting=OperatorSetting.BANNED)


def as_a_kill_leaves_it(folder: Path, into: Path) -> Path:
    """A database of which the last changes, a ban among them, are in its log alone, and fill it."""
    folder.mkdir()
    store = kept_in(folder)
    store.write(ALL)
    store.checkpoint()
    for number in range(60):
        store.write(rows(n=str(number)))
    store.write(rows(BANNED, must_last=True))
    shutil.copytree(folder, into)
    store.close()
    return into


def test_what_a_kill_leaves_is_whole(tmp_path: Path) -> None:
    left = as_a_kill_leaves_it(tmp_path / "run", tmp_path / "left")
    with closing(kept_in(left)) as store:
        assert store.load().members == (BANNED,)
    with closing(kept_in(left)) as store:
        assert (store.load().members, store.load().meta["n"]) == ((BANNED,), "59")


@pytest.mark.parametrize("removed", ["state.sqlite", "state.sqlite-wal", "state.sqlite*", "state.*"])
def test_files_removed_under_an_open_store_end_it_and_nothing_is_lost(tmp_path: Path, removed: str) -> None:
    with closing(kept_in(tmp_path)) as store:
        store.write(ALL)
        store.checkpoint()
        store.write(rows(n="before"))
        for path in list(tmp_path.glob(removed)):
            path.unlink()
        store.write(rows(n="after"))
        told = r"removed or replaced while it ran.*state is in .*state\.sqlite\.rescued: .* rename it to state\.sqlite"
        if removed != "state.sqlite":
            with pytest.raises(StateError, match=told):
                store.write(rows(BANNED, must_last=True))
        else:
            store.write(rows(BANNED, must_last=True))
        if removed != "state.sqlite-wal":
            with pytest.raises(StateError, match=told):
                store.checkpoint()
    # Not even an empty one is begun while the count is there.
    if removed != "state.sqlite-wal" and (tmp_path / "state.mark").exists():
        with pytest.raises(StateError, match="found none; bans"):
            kept_in(tmp_path)
    for left in tmp_path.glob("state.sqlite-*"):
        left.unlink()
    (tmp_path / "state.sqlite.rescued").rename(tmp_path / "state.sqlite")
    with closing(kept_in(tmp_path)) as store:
        state = store.load()
        assert (state.members, state.meta["n"], state.paid) == ((BANNED,), "after", (PAID,))


def test_another_file_in_the_databases_place_ends_the_store_and_the_runs_own_state_is_beside_it(tmp_path: Path) -> None:
    with closing(kept_in(tmp_path)) as store:
        store.write(ALL)
        store.write(rows(BANNED))
        with closing(SqlStore(f"sqlite:///{tmp_path / 'other.sqlite'}", RUN)):
            pass
        (tmp_path / "other.sqlite").replace(tmp_path / "state.sqlite")
        with pytest.raises(StateError, match=r"removed or replaced while it ran.*state\.sqlite\.rescued"):
            store.checkpoint()
    with closing(SqlStore(f"sqlite:///{tmp_path / 'state.sqlite.rescued'}", RUN)) as rescued:
        assert rescued.load().members == (BANNED,)


async def test_a_coordinator_whose_database_is_removed_ends_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="it was removed or replaced while it ran"):
        async with daemon_tests.running(daemon_tests.options(tmp_path)) as daemon:
            (tmp_path / "coordinator" / "state.sqlite").unlink()
            await daemon._stop.wait()


def test_a_database_that_is_gone_or_empty_is_not_begun_anew(tmp_path: Path) -> None:
    with closing(kept_in(tmp_path)) as store:
        store.write(rows(BANNED, must_last=True))
    database, whole = tmp_path / "state.sqlite", (tmp_path / "state.sqlite").read_bytes()
    database.unlink()
    with pytest.raises(
        StateError, match=r"expected the database that was there, found none; bans.*remove .*state\.mark"
    ):
        kept_in(tmp_path)
    assert not database.exists()
    database.write_bytes(b"")
    with pytest.raises(StateError, match="found none"):
        kept_in(tmp_path)
    with closing(SqlStore(f"sqlite:///{tmp_path / 'other.sqlite'}", RUN)):
        pass
    (tmp_path / "other.sqlite").replace(database)
    with pytest.raises(StateError, match="expected all of 1 changes that must last, found the first 0"):
        kept_in(tmp_path)
    database.write_bytes(whole)
    kept_in(tmp_path).close()
    database.unlink()
    (tmp_path / "state.mark").unlink()  # what the message says
    kept_in(tmp_path).close()


@pytest.mark.parametrize("damage", ["gone", "cut", 0.0, 0.001, 0.5, 0.999])
def test_a_log_gone_cut_or_with_a_flipped_bit_costs_no_ban_in_silence(tmp_path: Path, damage: str | float) -> None:
    left = as_a_kill_leaves_it(tmp_path / "run", tmp_path / "left")
    log = left / "state.sqlite-wal"
    data = bytearray(log.read_bytes())
    if isinstance(damage, float):
        frames = 32 + (len(data) - 32) // 4120 * 4120
        data[int(damage * (frames - 1))] ^= 4
    log.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "gone":
        log.unlink()
    with pytest.raises(StateError, match="expected all of 1 changes that must last, found the first 0"):
        kept_in(left).close()


def test_what_must_last_is_synced_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files.MachineFiles, "sync_path", lambda _, path: synced.append(path))
    monkeypatch.setattr(
        files.MachineFiles, "sync", lambda _, handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink())
    )
    with closing(kept_in(tmp_path)) as store:
        synced.clear()
        store.write(ALL)
        assert not synced, "most changes are told again after a power cut, and wait for no disk"
        store.write(rows(BANNED, must_last=True))
        assert synced == [tmp_path / "state.sqlite-wal", tmp_path / "state.mark"]


def test_a_backup_of_before_a_change_that_must_last_is_refused(tmp_path: Path) -> None:
    with closing(kept_in(tmp_path)) as store:
        store.write(ALL)
    older = (tmp_path / "state.sqlite").read_bytes()
    with closing(kept_in(tmp_path)) as store:
        store.write(rows(BANNED, must_last=True))
    (tmp_path / "state.sqlite").write_bytes(older)
    with pytest.raises(StateError, match="expected all of 1 changes"):
        kept_in(tmp_path)


def test_a_damaged_page_and_a_damaged_count_say_what_to_do(tmp_path: Path) -> None:
    with closing(kept_in(tmp_path)) as store:
        store.write(ALL)
    database, mark = tmp_path / "state.sqlite", tmp_path / "state.mark"
    whole = database.read_bytes()
    database.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    with pytest.raises(StateError, match=r"expected a whole database, found it damaged.*docs/runbook\.md"):
        kept_in(tmp_path)
    database.write_bytes(whole)
    mark.write_bytes(b"not a number")
    with pytest.raises(StateError, match="found it damaged"):
        kept_in(tmp_path)
    mark.write_bytes(b"")  # the disk was full as it was begun
    kept_in(tmp_path).close()
