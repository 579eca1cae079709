"""The coordinator's state in SQL: SQLite (WAL) in the run's folder by default, or PostgreSQL by its URL.

A row is JSON under a kind and a key; the log (events, samples, paid actions) is JSON under a running number. SQLite runs with
synchronous=NORMAL: what `write` has written survives a kill of the process; a power cut may lose the last moments, which the
learner's list of groups and the workers' held leases repair. Changes that no node would report again (`must_last`) are synced and
counted in a file beside the database before `write` returns; a database that lacks one of them is refused, for bans, revoked tokens
and money spent would be lost silently. `checkpoint`, on the thread that calls it, folds SQLite's log into the database file. If
that was removed or replaced, what this process holds is saved beside it, and the store ends. Guarantees: state of another schema or
run is refused, and so is a damaged database.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pydantic
import pydantic_core
import sqlalchemy as sa
from google.protobuf.message import DecodeError, Message
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from echo2.base.errors import NO_ROOM, DiskFull, EchoError, StateError, Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.fleet.tokens import Token, TokenBook
from echo2.coordinator.leases.lease import Lease, OpenGroup
from echo2.coordinator.money.provisioning import RentedMachine
from echo2.outside import here

SCHEMA_VERSION = 8  # of the tables and of what their JSON holds
CHECKPOINT_TRIES = 3  # writes during a try remain in the log; the next checkpoint comes two seconds later anyway
LOG_PAGES_MAX = 16_384  # 64 MiB: such a log is folded in by `write` itself, in case `checkpoint` is not called
EVENTS_MAX = 5_000  # what the page's log can show, and a day of a large fleet's joins
PAID_MAX = 100_000  # 25 MB: each change of who works is one, and each deletion walks through them
# Transactions between two deletions of old log lines: each deletion scans the log, which may grow by this many lines in between.
PRUNE_EVERY_FLUSHES = 2_000
# What opening a database may raise. ValueError, because SQLite reads part of it on connect, and damaged text fails to decode.
_DRIVER_ERRORS = (SQLAlchemyError, sqlite3.Error, ValueError)
_FULL_WORDS = ("disk is full", "disk I/O error", "No space left")  # the last of a server's disk
_DAMAGE_WORDS = ("malformed", "not a database", "decode")  # in SQLite's own messages
_metadata = sa.MetaData()
_serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_meta = sa.Table(
    "meta", _metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)
_rows = sa.Table(
    "rows", _metadata,
    sa.Column("kind", sa.Text, primary_key=True), sa.Column("key", sa.Text, primary_key=True),
    sa.Column("json", sa.Text, nullable=False),
)  # fmt: skip
_lines = sa.Table(
    "log", _metadata,
    sa.Column("id", _serial, primary_key=True, autoincrement=True), sa.Column("kind", sa.Text, nullable=False),
    sa.Column("json", sa.Text, nullable=False),
)  # fmt: skip


# ---- what is saved, and the changes to it

SAMPLES_MAX = 4_000  # of the run's curves: a step a minute for three days
SAMPLE_LINES = 4  # of one point in the store: its step, the step's measures, its evaluation

RowKind = Literal["groups", "leases", "members", "tokens", "token_peers", "machines", "meta"]
LogKind = Literal["events", "samples", "paid"]


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    unix_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the run's curves. `eval_reward` None: not evaluated yet; `reward_mean` None: no step since the learner
    started."""

    unix_s: float
    step: int
    reward_mean: float | None
    eval_reward: float | None
    utilisation: float
    predicted_utilisation: float
    usd_spent: float
    usd_per_hour: float

    @property
    def measures(self) -> tuple[object, ...]:
        return self.step, self.reward_mean, self.eval_reward, self.utilisation


@dataclass(frozen=True, slots=True)
class PaidAction:
    """An action that costs or saves money and was done or requested, with its reason. `usd_per_hour`: the price at stake;
    `usd_spent`: what it has cost."""

    unix_s: float
    action: str
    whom: str
    reason: str
    usd_per_hour: float
    usd_spent: float


@dataclass(frozen=True, slots=True)
class TokenPeer:
    """A peer that used a token: a row of its own, so that an enrolment does not rewrite all earlier ones. `silent_since`: None once
    it has said hello, or where none is expected."""

    token_id: str
    peer_id: PeerId
    silent_since: float | None = None


Row = OpenGroup | Lease | Member | Token | TokenPeer | RentedMachine | str
LogLine = LoggedEvent | CurvePoint | PaidAction


@dataclass(slots=True)
class StateChanges:
    """What to write in one transaction. `rows`: by kind and key; None deletes. `must_last`: it must survive a power cut too,
    because no node would report it again (a ban, a revoked token, a machine that costs money)."""

    rows: dict[tuple[RowKind, str], Row | None] = field(default_factory=dict)
    log: list[tuple[LogKind, LogLine]] = field(default_factory=list)
    must_last: bool = False


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Everything that was written. Of events, samples and paid actions only the newest, oldest first."""

    groups: tuple[OpenGroup, ...] = ()
    leases: tuple[Lease, ...] = ()
    members: tuple[Member, ...] = ()
    tokens: tuple[Token, ...] = ()
    machines: tuple[RentedMachine, ...] = ()
    events: tuple[LoggedEvent, ...] = ()
    samples: tuple[CurvePoint, ...] = ()
    paid: tuple[PaidAction, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)


# ---- as rows


def _read_as(hint: Any) -> Any:
    """How a field of this type is read: a message from the hex digits of its bytes, anything else as pydantic reads it."""
    if isinstance(hint, type) and issubclass(hint, Message):
        return Annotated[hint, pydantic.PlainValidator(lambda digits: hint.FromString(bytes.fromhex(digits)))]
    return hint


class _RowForm:
    """The JSON of a dataclass: all its fields except `left_out`, which get their defaults when it is read, as do those that an
    earlier release did not write."""

    def __init__(self, of: Callable[..., Any], *left_out: str) -> None:
        self._of, hints = of, get_type_hints(of)
        saved = {field.name: field.default for field in fields(of) if field.name not in left_out}  # type: ignore[arg-type]
        self._names = list(saved)
        read = {
            name: (_read_as(hints[name]), ... if default is MISSING else default) for name, default in saved.items()
        }
        # Bytes as hex digits: parts of a stop string may be no UTF-8.
        as_hex = pydantic.ConfigDict(val_json_bytes="hex")
        self._model = pydantic.create_model("Row", __config__=as_hex, **read)  # type: ignore[call-overload]

    def to_json(self, row: object) -> str:
        values = {name: getattr(row, name) for name in self._names}
        return pydantic_core.to_json(values, bytes_mode="hex", fallback=lambda m: m.SerializeToString().hex()).decode()

    def from_json(self, text: str) -> Any:
        read = self._model.model_validate_json(text)
        return self._of(**{name: getattr(read, name) for name in self._names})


@dataclass(frozen=True, slots=True)
class _Text:
    value: str


# A lease's speed is measured anew after a restart; what holds for a group until its next lease is found out anew.
_ROWS = {
    "groups": _RowForm(
        OpenGroup, "avoid", "preferred", "not_before", "waits_until", "moves", "made_by", "last_worker", "confirmed"
    ),
    "leases": _RowForm(Lease, "tokens_before", "measured_from"),
    "members": _RowForm(
        Member, "record", "reach", "cut_at", "has_left", "is_restored", "heartbeat_at", "measures", "wanted_reason",
        "is_barred_by_record", "paused", "price_limit", "usd_standby", "last_activation",
    ),
    "tokens": _RowForm(Token, "peers", "silent"),
    "token_peers": _RowForm(TokenPeer),
    "machines": _RowForm(RentedMachine),
    "meta": _RowForm(_Text),
}  # fmt: skip
_LOGS = {"events": _RowForm(LoggedEvent), "samples": _RowForm(CurvePoint), "paid": _RowForm(PaidAction)}


class SqlStore:
    """The state at a database URL; one process writes at a time. `write` writes all of a transaction or nothing, and what it wrote
    survives a crash of the process once it returns. `mark`: the file beside it with the count of changes that must last; None for a
    copy that is only inspected."""

    def __init__(self, url: str, run_id: RunId, mark: Path | None = None) -> None:
        self._engine, self._mark, self._lasting = _engine_of(url), mark, 0
        self._writing, self._checkpointing, self._is_open = threading.RLock(), threading.Lock(), True
        self._where = self._engine.url.render_as_string(hide_password=True)
        name = self._engine.url.database
        self._file = Path(name) if self._engine.dialect.name == "sqlite" and name else None
        insert: Any = sqlite.insert if self._file is not None else postgresql.insert
        upsert = insert(_rows)
        # Built once, because building it costs more than running it.
        self._upsert = upsert.on_conflict_do_update(
            index_elements=[_rows.c.kind, _rows.c.key], set_={"json": upsert.excluded.json}
        )
        try:
            is_there = self._file is None or (self._file.exists() and self._file.stat().st_size)
            if not is_there and mark is not None and mark.exists():
                raise self._lost("the database that was there", "none")  # SQLite would open an empty one
            with self._engine.begin() as connection:
                self._check_pages(connection)
                self._lasting = self._claim(connection, run_id)
            if self._lasting < (counted := self._counted()):
                raise self._lost(f"all of {counted} changes that must last", f"the first {self._lasting}")
            self._count()
            self._inode = self._file.stat().st_ino if self._file is not None else 0
        except BaseException as error:
            self._engine.dispose()
            if isinstance(error, _DRIVER_ERRORS):
                raise self._error(error) from None
            raise

    def _check_pages(self, connection: Connection) -> None:
        """Runs SQLite's own check of its page tree, and of tables against their indices: no row is missing."""
        if self._file is None:
            return
        problems = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            raise self._damaged("; ".join(problems))

    def _claim(self, connection: Connection, run_id: RunId) -> int:
        """Makes the tables of a new state; refuses the state of another run or schema. Returns the changes in it that must last."""
        _meta.create(connection, checkfirst=True)
        meta = {row.key: row.value for row in connection.execute(sa.select(_meta))}
        if not meta:
            _metadata.create_all(connection)
            meta = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id, "lasting": "0"}
            connection.execute(sa.insert(_meta), [{"key": key, "value": value} for key, value in meta.items()])
        if meta.get("run_id") != run_id:
            raise StateError(f"{self._where}: expected the state of run {run_id!r}, got that of {meta.get('run_id')!r}")
        if (version := meta.get("schema_version")) != str(SCHEMA_VERSION):
            raise StateError(
                f"{self._where}: expected a state of schema {SCHEMA_VERSION}, got {version}: use the echo2 that made it"
            )
        return int(meta.get("lasting", "0"))

    def write(self, changes: StateChanges) -> None:
        """DiskFull or StateError if the changes cannot be written."""
        if changes.rows or changes.log:
            with self._writing:
                self._write(changes)

    def _write(self, changes: StateChanges) -> None:
        rows, dropped = [], []
        for (kind, key), row in changes.rows.items():
            if row is None:
                dropped.append({"of_kind": kind, "of_key": key})
            else:
                text = _ROWS[kind].to_json(_Text(row) if isinstance(row, str) else row)
                rows.append({"kind": kind, "key": key, "json": text})
        lines = [{"kind": kind, "json": _LOGS[kind].to_json(line)} for kind, line in changes.log]
        try:
            with self._engine.begin() as connection:
                if rows:
                    connection.execute(self._upsert, rows)
                if dropped:
                    is_it = (_rows.c.kind == sa.bindparam("of_kind")) & (_rows.c.key == sa.bindparam("of_key"))
                    connection.execute(sa.delete(_rows).where(is_it), dropped)
                if lines:
                    connection.execute(sa.insert(_lines), lines)
                if changes.must_last:
                    update = sa.update(_meta).where(_meta.c.key == "lasting")
                    connection.execute(update.values(value=str(self._lasting + 1)))
        except SQLAlchemyError as error:
            raise self._error(error) from None
        if changes.must_last:
            self._lasting += 1
            self._sync_log()
            self._count()

    def _sync_log(self) -> None:
        if self._file is None:
            return  # PostgreSQL syncs each transaction by itself
        try:
            here().files.sync_path(self._file.with_name(f"{self._file.name}-wal"))
        except FileNotFoundError:
            raise self._rescued() from None
        except OSError as error:
            raise self._error(error) from None

    def _counted(self) -> int:
        """The number in the file of the count; 0 without a file."""
        if self._mark is None or not self._mark.exists():
            return 0
        try:
            return int(self._mark.read_bytes() or b"0")  # empty: the disk was full as it was begun
        except (OSError, ValueError):
            raise StateError(
                f"{self._mark}: expected the count of the coordinator's changes, found it damaged. If the database beside it is "
                "whole, remove it; else restore both from a backup"
            ) from None

    def _count(self) -> None:
        """Writes the count in place, in one write, and syncs it."""
        if self._mark is None:
            return
        try:
            handle = os.open(self._mark, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                here().files.write_at(handle, [b"%020d\n" % self._lasting], 0)
                here().files.sync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise self._error(error) from None

    def _lost(self, expected: str, actual: str) -> StateError:
        return StateError(
            f"{self._where}: expected {expected}, found {actual}; bans, revoked tokens and money spent may be missing. "
            f"Restore a backup of the database (docs/runbook.md). To go on with what is there, remove {self._mark}"
        )

    def load(self) -> StateSnapshot:
        try:
            with self._engine.connect() as connection:
                records = connection.execute(sa.select(_rows).order_by(_rows.c.kind, _rows.c.key)).all()
                logs = {kind: _newest(connection, kind) for kind in _LOGS}
        except _DRIVER_ERRORS as error:
            raise self._error(error) from None
        rows: dict[str, list[tuple[str, Any]]] = {kind: [] for kind in _ROWS}
        try:
            for kind, key, text in records:
                rows[kind].append((key, _ROWS[kind].from_json(text)))
            read = {kind: tuple(_LOGS[kind].from_json(text) for text in texts) for kind, texts in logs.items()}
            values = {kind: tuple(row for _, row in rows[kind]) for kind in ("groups", "leases", "members", "machines")}
            tokens = _tokens_of([row for _, row in rows["tokens"]], [row for _, row in rows["token_peers"]])
            return StateSnapshot(**values, **read, tokens=tokens, meta={key: row.value for key, row in rows["meta"]})
        except (ValueError, KeyError, TypeError, DecodeError, EchoError) as error:
            raise self._damaged(f"a row cannot be read: {error}") from None

    def prune(self, events_max: int, samples_max: int, paid_max: int) -> None:
        """Deletes all but the newest lines of each log."""
        try:
            with self._writing, self._engine.begin() as connection:
                for kind, count in (("events", events_max), ("samples", samples_max), ("paid", paid_max)):
                    is_it = _lines.c.kind == kind
                    newest = sa.select(_lines.c.id).where(is_it).order_by(_lines.c.id.desc()).offset(count).limit(1)
                    if (last := connection.execute(newest).scalar()) is not None:
                        connection.execute(sa.delete(_lines).where(is_it, _lines.c.id <= last))
        except SQLAlchemyError as error:
            raise self._error(error) from None

    def checkpoint(self) -> None:
        """Folds SQLite's log into the database file while writes go on, so that the log starts over. Thread-safe."""
        with self._checkpointing:
            if self._file is None or not self._is_open:
                return
            if not self._file.exists() or self._file.stat().st_ino != self._inode:
                raise self._rescued()
            try:
                with self._engine.connect() as connection:
                    for _ in range(CHECKPOINT_TRIES):
                        folded = connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").one()
                        if folded[1] == folded[2]:
                            return
            except SQLAlchemyError as error:
                raise self._error(error) from None

    def close(self) -> None:
        with self._checkpointing:
            self._is_open = False
            self._engine.dispose()

    def _rescued(self) -> EchoError:
        """The error of a database that was removed or replaced while it was open. Saves what it held beside it first, through a
        connection that is open: a new one would make an empty database in its place."""
        assert self._file is not None, "only files are removed"
        whole = self._file.with_name(f"{self._file.name}.rescued")
        try:
            with self._writing, self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                whole.unlink(missing_ok=True)
                connection.exec_driver_sql("VACUUM INTO ?", (str(whole),))
            here().files.sync_path(whole)
        except (OSError, SQLAlchemyError) as error:
            return self._error(error)
        return StateError(
            f"{self._where}: expected the coordinator's database to stay there, it was removed or replaced while it ran. The run's "
            f"state is in {whole}: to go on with it, rename it to {self._file.name}, without -wal and -shm files"
        )

    def _damaged(self, what: str) -> StateError:
        return StateError(
            f"{self._where}: expected a whole database, found it damaged ({what}). Restore a backup of it (docs/runbook.md)"
        )

    def _error(self, error: Exception) -> EchoError:
        text = str(getattr(error, "orig", None) or error).strip()
        if getattr(error, "errno", None) in NO_ROOM or any(word in text for word in _FULL_WORDS):
            return DiskFull(f"{self._where}: expected room for the coordinator's state, got: {text}")
        if self._file is None and isinstance(error, OperationalError):  # its server may be back in a moment
            return Unreachable(f"{self._where}: expected the database to answer, got: {text}")
        if isinstance(error, ValueError) or any(word in text for word in _DAMAGE_WORDS):
            return self._damaged(text)
        return StateError(f"{self._where}: {text}")


def _engine_of(url: str) -> Engine:
    engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def _on_connect(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES_MAX}")
            cursor.close()

    return engine


def _newest(connection: Connection, kind: str) -> list[str]:
    newest = sa.select(_lines.c.json).where(_lines.c.kind == kind).order_by(_lines.c.id.desc())
    texts = connection.execute(newest.limit(SAMPLE_LINES * SAMPLES_MAX if kind == "samples" else EVENTS_MAX)).scalars()
    return list(texts)[::-1]


def _tokens_of(tokens: Iterable[Token], uses: Iterable[TokenPeer]) -> tuple[Token, ...]:
    by_id = {token.token_id: token for token in tokens}
    for use in sorted(uses, key=lambda use: use.silent_since or 0.0):
        token = by_id[use.token_id]
        token.peers.add(use.peer_id)
        if use.silent_since is not None:
            token.silent[use.peer_id] = use.silent_since
    return tuple(by_id.values())


class StateWriter:
    """Collects changes until `flush`, which returns only once everything noted before it is saved, in one transaction. Rows are
    noted by reference, so an object that changes again is written as it is then."""

    def __init__(self, store: SqlStore, tokens: TokenBook) -> None:
        self.store, self._tokens = store, tokens
        self._changes = StateChanges()
        self._flushes = 0
        self.events: deque[LoggedEvent] = deque(maxlen=EVENTS_MAX)
        self.samples: deque[CurvePoint] = deque(maxlen=SAMPLES_MAX)
        self.paid: deque[PaidAction] = deque(maxlen=EVENTS_MAX)

    def restore(self, saved: StateSnapshot) -> None:
        self.events.extend(saved.events)
        self.paid.extend(saved.paid)
        for sample in saved.samples:
            self._add_point(sample)

    def save(self, kind: RowKind, key: str, row: Row | None) -> None:
        """Notes a row; None deletes it."""
        self._changes.rows[kind, key] = row

    def meta(self, key: str, value: str) -> None:
        self.save("meta", key, value)

    def require_sync(self) -> None:
        """Makes the next flush sync to disk before it returns. Only for rare changes, because it waits for the disk."""
        self._changes.must_last = True

    def event(self, event: LoggedEvent) -> None:
        self.events.append(event)
        self._changes.log.append(("events", event))

    def paid_action(self, action: PaidAction) -> None:
        self.paid.append(action)
        self._changes.log.append(("paid", action))

    def sample(self, sample: CurvePoint) -> None:
        """Adds a point of the curves in place of those of its step and later: a learner may go back to a checkpoint."""
        self._add_point(sample)
        self._changes.log.append(("samples", sample))

    def _add_point(self, sample: CurvePoint) -> None:
        while self.samples and self.samples[-1].step >= sample.step:
            self.samples.pop()
        self.samples.append(sample)

    def flush(self) -> None:
        """Writes all noted changes. DiskFull or StateError if they cannot be written."""
        changes, self._changes = self._changes, StateChanges()
        for token_id, peer_id in sorted(self._tokens.changed_peers):
            token = self._tokens.tokens[token_id]
            use = TokenPeer(token_id, peer_id, token.silent.get(peer_id)) if peer_id in token.peers else None
            changes.rows["token_peers", f"{token_id} {peer_id}"] = use
        self._tokens.changed_peers.clear()
        self.store.write(changes)
        self._flushes += 1
        if self._flushes % PRUNE_EVERY_FLUSHES == 0:
            self.store.prune(EVENTS_MAX, SAMPLE_LINES * SAMPLES_MAX, PAID_MAX)
