"""The coordinator's state in SQL: SQLite (WAL) in the run's folder by default, or PostgreSQL by its URL.

Guarantees: see `StateStore`. SQLite runs with synchronous=NORMAL: what `write` has written survives a kill of the process; a power
cut may lose the last moments, which the learner's list of groups and the workers' held leases repair. Changes that no node would
report again (`must_last`) are synced before `write` returns; any other `write` waits for no disk: `checkpoint`, on the thread that
calls it, folds the log into the database file and does the fsyncs. The schema has a version and is migrated forward, one step at
a time, in a transaction; a newer schema than ours is refused. A database that is missing, damaged or older than its mark is refused
as well, by SQLite's own check, a checksum of each group, lease, member, token and machine (row_sums), and the mark beside it
(store_mark).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from google.protobuf.message import DecodeError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from echo2.base.errors import DiskFull, EchoError, StateError
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId
from echo2.coordinator.lease_events import GroupPhase, Lease, OpenGroup
from echo2.coordinator.membership import Liveness, Member, OperatorSetting
from echo2.coordinator.provisioning import MachineState, RentedMachine
from echo2.coordinator.runtime import row_sums
from echo2.coordinator.runtime.store_mark import StoreMark
from echo2.coordinator.saved import CurvePoint, LoggedEvent, PaidAction, SavedState, StoreChanges
from echo2.coordinator.tokens import Token
from echo2.outside import here
from echo2.wire.coordinator import heartbeat_from_message, heartbeat_to_message, worker_hello_from_message
from echo2.wire.coordinator import worker_hello_to_message as hello_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2, rollout_pb2
from echo2.wire.rollout import group_from_message, group_to_message

SCHEMA_VERSION = 4
CHECKPOINT_TRIES = 3
LOG_PAGES_MAX = 16_384
"""A log of 64 MiB (in pages) is folded in by `write` itself, in case `checkpoint` is not called."""
Row = dict[str, Any]
Rows = dict[str, list[Row]]
_DRIVER_ERRORS = (SQLAlchemyError, sqlite3.Error, ValueError)
"""What opening a database may raise. ValueError, because SQLite reads part of it on connect, and damaged text fails to decode."""
_DAMAGE_WORDS = ("malformed", "not a database", "decode")
_STORE_ID, _WRITTEN = "store_id", "transactions"  # in `meta`, for the mark
_COUNT = f"UPDATE meta SET value = '{{}}' WHERE key = '{_WRITTEN}'"
EVENTS_LOADED = 5_000
SAMPLES_LOADED = 4_000

_metadata = sa.MetaData()
_Text, _Real, _Int, _Bytes = sa.Text, sa.Double, sa.BigInteger, sa.LargeBinary
_meta = sa.Table(
    "meta", _metadata, sa.Column("key", _Text, primary_key=True), sa.Column("value", _Text, nullable=False)
)
_groups = sa.Table(
    "groups", _metadata,
    sa.Column("group_id", _Text, primary_key=True), sa.Column("spec", _Bytes, nullable=False),
    sa.Column("phase", _Text, nullable=False), sa.Column("since", _Real, nullable=False),
    sa.Column("attempts", _Int, nullable=False), sa.Column("refusals", _Int, nullable=False),
    sa.Column("lease_id", _Text), sa.Column("not_before", _Real, nullable=False),
    sa.Column("expected_tokens", _Real, nullable=False),
    sa.Column(row_sums.COLUMN, _Text, nullable=False),
)  # fmt: skip
_leases = sa.Table(
    "leases", _metadata,
    sa.Column("lease_id", _Text, primary_key=True), sa.Column("group_id", _Text, nullable=False),
    sa.Column("worker_id", _Text, nullable=False), sa.Column("attempt", _Int, nullable=False),
    sa.Column("granted_at", _Real, nullable=False), sa.Column("deadline", _Real, nullable=False),
    sa.Column("progress_at", _Real, nullable=False), sa.Column("finished_rollouts", _Int, nullable=False),
    sa.Column("tokens", _Int, nullable=False), sa.Column("is_recalled", sa.Boolean, nullable=False),
    sa.Column(row_sums.COLUMN, _Text, nullable=False),
)  # fmt: skip
_members = sa.Table(
    "members", _metadata,
    sa.Column("peer_id", _Text, primary_key=True), sa.Column("hello", _Bytes, nullable=False),
    sa.Column("heartbeat", _Bytes, nullable=False), sa.Column("joined_at", _Real, nullable=False),
    sa.Column("heard_at", _Real, nullable=False), sa.Column("setting", _Text, nullable=False),
    sa.Column("setting_reason", _Text, nullable=False), sa.Column("is_wanted", sa.Boolean, nullable=False),
    sa.Column("activation_since", _Real, nullable=False), sa.Column("usd_spent", _Real, nullable=False),
    sa.Column("metered_until", _Real, nullable=False), sa.Column("liveness", _Text, nullable=False),
    sa.Column(row_sums.COLUMN, _Text, nullable=False),
)  # fmt: skip
_tokens = sa.Table(
    "tokens", _metadata,
    sa.Column("token_id", _Text, primary_key=True), sa.Column("hash", _Text, nullable=False),
    sa.Column("role", _Text, nullable=False), sa.Column("label", _Text, nullable=False),
    sa.Column("created_at", _Real, nullable=False), sa.Column("expires_at", _Real, nullable=False),
    sa.Column("use_limit", _Int, nullable=False), sa.Column("is_revoked", sa.Boolean, nullable=False),
    sa.Column("peers", _Text, nullable=False),
    sa.Column(row_sums.COLUMN, _Text, nullable=False),
)  # fmt: skip
_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_events = sa.Table(
    "events", _metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True), sa.Column("unix_s", _Real, nullable=False),
    sa.Column("kind", _Text, nullable=False), sa.Column("text", _Text, nullable=False),
)  # fmt: skip
_samples = sa.Table(
    "samples", _metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True), sa.Column("fields", _Text, nullable=False),
)  # fmt: skip
_paid = sa.Table(
    "paid_actions", _metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True), sa.Column("fields", _Text, nullable=False),
)  # fmt: skip
_machines = sa.Table(
    "machines", _metadata,
    sa.Column("machine_id", _Text, primary_key=True), sa.Column("offer", _Text, nullable=False),
    sa.Column("provider", _Text, nullable=False), sa.Column("label", _Text, nullable=False),
    sa.Column("state", _Text, nullable=False), sa.Column("usd_per_hour", _Real, nullable=False),
    sa.Column("rented_at", _Real, nullable=False), sa.Column("ended_at", _Real),
    sa.Column("token_id", _Text, nullable=False), sa.Column("command", _Text, nullable=False),
    sa.Column("notice", _Text, nullable=False),
    sa.Column(row_sums.COLUMN, _Text, nullable=False),
)  # fmt: skip


def _add_paid_actions(connection: Connection) -> None:
    _paid.create(connection, checkfirst=True)


def _add_machines(connection: Connection) -> None:
    _machines.create(connection, checkfirst=True)


def _add_sums(connection: Connection) -> None:
    for table in _SUMMED:
        row_sums.add_sums(connection, table)


_SUMMED = (_groups, _leases, _members, _tokens, _machines)
_MIGRATIONS: dict[int, Callable[[Connection], None]] = {2: _add_paid_actions, 3: _add_machines, 4: _add_sums}
"""For each schema version, the step that migrates from the version before it."""


class SqlStore:
    """`StateStore` on a database URL; one process writes at a time."""

    def __init__(self, url: str, run_id: RunId, mark_path: Path | None = None) -> None:
        """`mark_path`: file of the mark (store_mark); None for a copy that is only inspected."""
        self._engine = _engine_of(url)
        self._written = 0  # transactions over this database's whole life
        self._upserts: dict[str, Any] = {}
        self._checkpointing, self._is_open = threading.Lock(), True
        self._where = self._engine.url.render_as_string(hide_password=True)
        self._insert: Any = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        self._mark = StoreMark(mark_path, self._where) if mark_path is not None else None
        try:
            if self._mark is not None and (database := self._database_file()):
                self._mark.check_is_there(database)
            with self._engine.begin() as connection:
                self._check_pages(connection)
                self._migrate(connection, run_id)
                self._follow_mark(connection)
        except BaseException as error:
            self._engine.dispose()
            if isinstance(error, _DRIVER_ERRORS):
                raise self._error(error) from None
            raise

    def _database_file(self) -> Path | None:
        name = self._engine.url.database
        return Path(name) if self._engine.dialect.name == "sqlite" and name else None

    def _check_pages(self, connection: Connection) -> None:
        """Runs SQLite's own check of its page tree, and of tables against their indices."""
        if self._engine.dialect.name != "sqlite":
            return
        problems = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            raise self._damaged("; ".join(problems))

    def _damaged(self, what: str) -> StateError:
        return StateError(
            f"{self._where}: expected a whole database, found it damaged ({what}). Restore a backup of it (docs/runbook.md)"
        )

    def _follow_mark(self, connection: Connection) -> None:
        """Compares the database with its mark; makes a mark if there is none yet."""
        if self._mark is None:
            return
        meta = {row.key: row.value for row in connection.execute(sa.select(_meta))}
        self._written = int(meta.get(_WRITTEN, "0"))
        if self._mark.store_id:
            self._mark.check(meta.get(_STORE_ID, ""), self._written)
        store_id = self._mark.open(self._written, meta.get(_STORE_ID, ""))
        noted = {_STORE_ID: store_id, _WRITTEN: str(self._written)}
        self._put(connection, _meta, [{"key": key, "value": value} for key, value in noted.items()])

    def _migrate(self, connection: Connection, run_id: RunId) -> None:
        _meta.create(connection, checkfirst=True)
        meta = {row.key: row.value for row in connection.execute(sa.select(_meta))}
        if not meta:
            _metadata.create_all(connection)
            rows = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id}
            connection.execute(sa.insert(_meta), [{"key": key, "value": value} for key, value in rows.items()])
            return
        if meta.get("run_id") != run_id:
            raise StateError(f"{self._where}: expected the state of run {run_id!r}, got that of {meta.get('run_id')!r}")
        version = int(meta.get("schema_version", "0"))
        if not 1 <= version <= SCHEMA_VERSION:
            raise StateError(
                f"{self._where}: expected a state of schema 1 to {SCHEMA_VERSION}, got {version}: use the echo2 "
                "that made it"
            )
        for step in range(version + 1, SCHEMA_VERSION + 1):
            _MIGRATIONS[step](connection)
        connection.execute(sa.update(_meta).where(_meta.c.key == "schema_version").values(value=str(SCHEMA_VERSION)))

    def write(self, changes: StoreChanges) -> None:
        if changes.is_empty():
            return
        try:
            with self._engine.begin() as connection:
                self._put(connection, _meta, ({"key": k, "value": v} for k, v in changes.meta.items()))
                self._put(connection, _groups, map(_group_row, changes.groups))
                self._put(connection, _leases, map(_lease_row, changes.leases))
                self._put(connection, _members, map(_member_row, changes.members))
                self._put(connection, _tokens, map(_token_row, changes.tokens))
                self._put(connection, _machines, map(_machine_row, changes.machines))
                _delete(connection, _groups.c.group_id, changes.groups_dropped)
                _delete(connection, _leases.c.lease_id, changes.leases_dropped)
                _append(connection, _events, [asdict(event) for event in changes.events])
                _append(connection, _samples, [{"fields": json.dumps(asdict(one))} for one in changes.samples])
                _append(connection, _paid, [{"fields": json.dumps(asdict(one))} for one in changes.paid])
                if self._mark is not None:
                    connection.exec_driver_sql(_COUNT.format(self._written + 1))
        except SQLAlchemyError as error:
            raise self._error(error) from None
        self._written += 1
        if self._mark is not None:
            self._mark.note(self._written, is_safe=self._engine.dialect.name != "sqlite")
        if changes.must_last:
            self._sync_log()

    def _sync_log(self) -> None:
        """Syncs SQLite's log up to the last transaction. PostgreSQL syncs each transaction by itself."""
        if (database := self._database_file()) is None:
            return
        try:
            here().files.sync_path(database.with_name(f"{database.name}-wal"))
        except OSError as error:
            raise self._error(error) from None
        if self._mark is not None:
            self._mark.note_safe(self._written)

    def _put(self, connection: Connection, table: sa.Table, rows: Iterable[dict[str, Any]]) -> None:
        found = list(row_sums.summed(table, rows) if table in _SUMMED else rows)
        if not found:
            return
        if table.name not in self._upserts:
            self._upserts[table.name] = self._upsert(table)
        connection.execute(self._upserts[table.name], found)

    def _upsert(self, table: sa.Table) -> Any:
        """The upsert statement of a table; cached, because building it costs more than running it."""
        key = next(iter(table.primary_key.columns))
        statement = self._insert(table)
        update = {column.name: statement.excluded[column.name] for column in table.columns if column is not key}
        return statement.on_conflict_do_update(index_elements=[key], set_=update)

    def load(self) -> SavedState:
        try:
            with self._engine.connect() as connection:
                rows = {
                    table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
                    for table in (_meta, *_SUMMED)
                }
                events = _newest(connection, _events, EVENTS_LOADED)
                samples = _newest(connection, _samples, SAMPLES_LOADED)
                paid = _newest(connection, _paid, EVENTS_LOADED)
        except _DRIVER_ERRORS as error:
            raise self._error(error) from None
        rows |= {table.name: row_sums.checked(table, rows[table.name], self._where) for table in _SUMMED}
        try:
            return _saved_state(rows, events, samples, paid)
        except (ValueError, KeyError, TypeError, EchoError, DecodeError) as error:
            raise self._damaged(f"a row cannot be read: {error}") from None

    def prune(self, events_kept: int, samples_kept: int) -> None:
        try:
            with self._engine.begin() as connection:
                for table, kept in ((_events, events_kept), (_samples, samples_kept)):
                    last = connection.execute(sa.select(sa.func.max(table.c.id))).scalar() or 0
                    connection.execute(sa.delete(table).where(table.c.id <= last - kept))
        except SQLAlchemyError as error:
            raise self._error(error) from None

    def checkpoint(self) -> None:
        """Folds SQLite's log into the database file while writes go on, so that the log starts over. Thread-safe. Does nothing for
        PostgreSQL."""
        with self._checkpointing:
            if self._engine.dialect.name != "sqlite" or not self._is_open:
                return
            reached = self._written
            try:
                with self._engine.connect() as connection:
                    for _ in range(CHECKPOINT_TRIES):  # writes during a try remain in the log and keep it growing
                        found = connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").one()
                        if found[1] == found[2]:
                            break
                    else:
                        return
            except SQLAlchemyError as error:
                raise self._error(error) from None
            if self._mark is not None:
                self._mark.note_safe(reached)

    def close(self) -> None:
        with self._checkpointing:
            self._is_open = False
            self._engine.dispose()
            if self._mark is not None:
                self._mark.close()

    def _error(self, error: Exception) -> DiskFull | StateError:
        text = str(getattr(error, "orig", None) or error).strip()
        if "disk is full" in text or "No space left" in text or "disk I/O error" in text:
            return DiskFull(f"{self._where}: expected room for the coordinator's state, got: {text}")
        if isinstance(error, ValueError) or any(word in text for word in _DAMAGE_WORDS):
            return self._damaged(text)
        return StateError(f"{self._where}: {text}")


def _engine_of(url: str) -> Engine:
    engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def _on_connect(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "foreign_keys=ON"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES_MAX}")
            cursor.close()

    return engine


def _delete(connection: Connection, column: sa.Column[Any], keys: list[str]) -> None:
    if keys:
        connection.execute(sa.delete(column.table).where(column == sa.bindparam("_key")), [{"_key": k} for k in keys])


def _append(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)


def _newest(connection: Connection, table: sa.Table, count: int) -> list[dict[str, Any]]:
    rows = connection.execute(sa.select(table).order_by(table.c.id.desc()).limit(count)).mappings()
    return [dict(row) for row in rows][::-1]


def _saved_state(rows: Rows, events: list[Row], samples: list[Row], paid: list[Row]) -> SavedState:
    return SavedState(
        groups=tuple(_group_of(row) for row in rows["groups"]),
        leases=tuple(_lease_of(row) for row in rows["leases"]),
        members=tuple(_member_of(row) for row in rows["members"]),
        tokens=tuple(_token_of(row) for row in rows["tokens"]),
        events=tuple(LoggedEvent(row["unix_s"], row["kind"], row["text"]) for row in events),
        samples=tuple(CurvePoint(**json.loads(row["fields"])) for row in samples),
        paid=tuple(PaidAction(**json.loads(row["fields"])) for row in paid),
        machines=tuple(RentedMachine(**{**row, "state": MachineState(row["state"])}) for row in rows["machines"]),
        meta={row["key"]: row["value"] for row in rows["meta"] if row["key"] not in (_STORE_ID, _WRITTEN)},
    )


def _group_row(group: OpenGroup) -> dict[str, Any]:
    return {
        "group_id": group.spec.group_id, "spec": group_to_message(group.spec).SerializeToString(),
        "phase": group.phase.value, "since": group.since, "attempts": group.attempts, "refusals": group.refusals,
        "lease_id": group.lease_id, "not_before": group.not_before, "expected_tokens": group.expected_tokens,
    }  # fmt: skip


def _group_of(row: dict[str, Any]) -> OpenGroup:
    return OpenGroup(
        spec=group_from_message(rollout_pb2.GroupSpec.FromString(row["spec"])), phase=GroupPhase(row["phase"]),
        since=row["since"], attempts=row["attempts"], refusals=row["refusals"],
        lease_id=LeaseId(row["lease_id"]) if row["lease_id"] else None, not_before=row["not_before"],
        expected_tokens=row["expected_tokens"],
    )  # fmt: skip


def _lease_row(lease: Lease) -> dict[str, Any]:
    row = asdict(lease)
    del row["tokens_before"], row["measured_from"]  # for its speed, which is measured anew after a restart
    return row


def _lease_of(row: dict[str, Any]) -> Lease:
    named = {"lease_id": LeaseId(row["lease_id"]), "group_id": GroupId(row["group_id"])}
    return Lease(**{**row, **named, "worker_id": PeerId(row["worker_id"])})


def _member_row(member: Member) -> dict[str, Any]:
    return {
        "peer_id": member.peer_id, "hello": hello_to_message(member.hello).SerializeToString(),
        "heartbeat": heartbeat_to_message(member.heartbeat).SerializeToString(), "joined_at": member.joined_at,
        "heard_at": member.heard_at, "setting": member.setting.value, "setting_reason": member.setting_reason,
        "is_wanted": member.is_wanted, "activation_since": member.activation_since, "usd_spent": member.usd_spent,
        "metered_until": member.metered_until, "liveness": member.last_liveness.value,
    }  # fmt: skip


def _member_of(row: dict[str, Any]) -> Member:
    hello = coordinator_pb2.WorkerHello.FromString(row["hello"])
    heartbeat = coordinator_pb2.Heartbeat.FromString(row["heartbeat"])
    whose = f"saved worker {row['peer_id']}"
    return Member(
        peer_id=PeerId(row["peer_id"]), hello=worker_hello_from_message(hello, whose), joined_at=row["joined_at"],
        heard_at=row["heard_at"], heartbeat=heartbeat_from_message(heartbeat, whose),
        setting=OperatorSetting(row["setting"]), setting_reason=row["setting_reason"], is_wanted=row["is_wanted"],
        activation_since=row["activation_since"], usd_spent=row["usd_spent"], metered_until=row["metered_until"],
        last_liveness=Liveness(row["liveness"]),
    )  # fmt: skip


def _machine_row(machine: RentedMachine) -> dict[str, Any]:
    return {**asdict(machine), "state": machine.state.value}


def _token_row(token: Token) -> dict[str, Any]:
    return {**asdict(token), "peers": json.dumps(sorted(token.peers))}


def _token_of(row: dict[str, Any]) -> Token:
    return Token(**{**row, "peers": {PeerId(peer) for peer in json.loads(row["peers"])}})
