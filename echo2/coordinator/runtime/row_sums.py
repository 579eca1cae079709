"""Adds a checksum to each row of the tables that matter, because SQLite has no checksums of its pages.

Guarantees: a row that differs from what was written raises a `StateError` that names table and key. Leaves to others: missing
rows (SQLite's own check compares tables with their indices; store_mark).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sqlalchemy as sa
import xxhash
from sqlalchemy.engine import Connection

from echo2.base.errors import StateError

COLUMN = "sum"


def summed(table: sa.Table, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with their checksums, for writing."""
    for row in rows:
        yield {**row, COLUMN: _sum_of(table, row)}


def checked(table: sa.Table, rows: Iterable[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The rows without their checksums, as they were given to `summed`. StateError if a checksum does not match. `where`: the
    database, for the message."""
    found = []
    for row in rows:
        said = row.pop(COLUMN)
        try:
            is_whole = said == _sum_of(table, row)
        except (ValueError, TypeError):  # a value of the wrong type, such as bytes for a number
            is_whole = False
        if not is_whole:
            key = next(iter(table.primary_key.columns)).name
            raise StateError(
                f"{where}: expected row {row[key]!r} of {table.name} with the sum {said}, found it changed on the disk. "
                "Restore a backup of the database (docs/runbook.md)"
            )
        found.append(row)
    return found


def add_sums(connection: Connection, table: sa.Table) -> None:
    """Adds checksums to a table that an older release made."""
    columns = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
    if COLUMN not in columns:
        connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {COLUMN} TEXT NOT NULL DEFAULT ''"))
    key = next(iter(table.primary_key.columns))
    for row in connection.execute(sa.select(table)).mappings().all():
        plain = {name: value for name, value in row.items() if name != COLUMN}
        said = _sum_of(table, plain)
        connection.execute(sa.update(table).where(key == row[key.name]).values({COLUMN: said}))


def _sum_of(table: sa.Table, row: dict[str, Any]) -> str:
    """The checksum of a row, over values as the database returns them: an integer in a column of reals comes back as a float."""
    values = [None if row[name] is None else kind(row[name]) for name, kind in _kinds(table)]
    return xxhash.xxh3_64_hexdigest(repr(values).encode())


@functools.cache
def _kinds(table: sa.Table) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(column.name, _kind(column.type)) for column in table.columns if column.name != COLUMN]


def _kind(said: Any) -> Callable[[Any], Any]:
    for of_column, kind in ((sa.Boolean, bool), (sa.Double, float), (sa.LargeBinary, bytes), (sa.BigInteger, int)):
        if isinstance(said, of_column):
            return kind
    return str
