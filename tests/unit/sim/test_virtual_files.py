"""A power cut in the virtual world takes what a real one may take, and nothing else."""

import os
import random
import sqlite3
from pathlib import Path

import pytest

from echo2.sim.machine import VirtualDisk, VirtualFiles


def test_of_a_file_what_was_synced_stays(tmp_path: Path) -> None:
    disk = VirtualDisk(tmp_path)
    files = VirtualFiles(disk, lambda: 1.0, lambda: None)
    handle = os.open(disk.folder / "journal", os.O_CREAT | os.O_WRONLY)
    files.write(handle, b"a" * 100)
    files.sync(handle)
    files.write(handle, b"b" * 100)
    os.close(handle)
    disk.crash()
    assert (disk.folder / "journal").stat().st_size == 200, "a kill loses nothing"
    assert disk.power_cut(random.Random(1)) == 1
    assert 100 <= (disk.folder / "journal").stat().st_size < 200


@pytest.mark.parametrize(("is_synced", "names"), [(False, {"old", "new"}), (True, {"new"})])
def test_a_folder_has_its_new_name_for_certain_once_that_is_synced(
    tmp_path: Path, is_synced: bool, names: set[str]
) -> None:
    found = set()
    for seed in range(12):
        disk = VirtualDisk(tmp_path / str(seed))
        files = VirtualFiles(disk, lambda: 1.0, lambda: None)
        (disk.folder / "old").mkdir()
        (disk.folder / "old" / "part").write_bytes(b"a" * 100)
        files.sync_path(disk.folder / "old" / "part")
        files.rename(disk.folder / "old", disk.folder / "new")
        if is_synced:
            files.sync_path(disk.folder)
        disk.crash()
        disk.power_cut(random.Random(seed))
        (folder,) = disk.folder.iterdir()
        assert (folder / "part").stat().st_size == 100
        found.add(folder.name)
    assert found == names


def test_a_file_that_a_full_disk_leaves_empty_has_a_virtual_time(tmp_path: Path) -> None:
    disk = VirtualDisk(tmp_path)
    files = VirtualFiles(disk, lambda: 7.0, lambda: None)
    disk.is_full = True
    for write in (files.write, lambda handle, data: files.write_at(handle, [data], 0)):
        handle = os.open(disk.folder / "chunks", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        with pytest.raises(OSError, match="No space"):
            write(handle, b"a")
        os.close(handle)
        assert (disk.folder / "chunks").stat().st_mtime == 7.0, "files are read again in the order of their times"


def rows_after_a_power_cut(folder: Path, seed: int, synced_after: int = -1) -> int:
    disk = VirtualDisk(folder)
    writing = sqlite3.connect(disk.folder / "state.sqlite", isolation_level=None)
    writing.execute("PRAGMA journal_mode=WAL")
    writing.execute("PRAGMA synchronous=NORMAL")
    writing.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")
    for number in range(30):
        writing.execute("INSERT INTO rows VALUES (?, ?)", (number, "x" * 500))
        if number == 9:
            writing.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if number == synced_after:
            VirtualFiles(disk, lambda: 0.0, lambda: None).sync_path(disk.folder / "state.sqlite-wal")
    disk.crash()
    writing.close()
    disk.power_cut(random.Random(seed))
    reading = sqlite3.connect(disk.folder / "state.sqlite")
    assert reading.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = [number for (number,) in reading.execute("SELECT number FROM rows ORDER BY number")]
    reading.close()
    assert found == list(range(len(found))), "the last transactions are lost, none in between"
    return len(found)


def test_of_a_database_what_a_checkpoint_has_folded_in_stays_and_what_came_since_may_be_lost(tmp_path: Path) -> None:
    counts = [rows_after_a_power_cut(tmp_path / str(seed), seed) for seed in range(12)]
    assert all(10 <= count <= 30 for count in counts)
    assert len(set(counts)) > 4


def test_what_was_synced_of_a_databases_log_stays(tmp_path: Path) -> None:
    counts = [rows_after_a_power_cut(tmp_path / str(seed), seed, synced_after=24) for seed in range(12)]
    assert min(counts) == 25 and max(counts) > 25
