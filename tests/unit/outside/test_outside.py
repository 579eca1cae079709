"""The outside is inherited by everything that a daemon starts, and only by that."""

import asyncio
import contextlib
import errno
import gc
import random
import socket
import warnings
from pathlib import Path

import pytest
import torch

from echo2.base.errors import DiskFull
from echo2.base.ids import Step, Version
from echo2.learner.options import LearnerLimits
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore
from echo2.outside import MACHINE, Machine, entered, here, monotonic, unix_now
from echo2.outside.files import MachineFiles
from echo2.outside.net import accepted
from echo2.trust.identity import TLS_SECRET_BYTES, Identity, RunAuthority, TlsKey
from echo2.trust.tls import load_or_create_identity, write_secret


class StoppedClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def unix_now(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def since_boot(self) -> float:
        return self.now


def outside_at(now: float) -> Machine:
    machine = Machine()
    machine.clock = StoppedClock(now)
    return machine


async def test_tasks_timers_and_threads_have_the_outside_of_who_started_them() -> None:
    async def told() -> list[float]:
        later: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.001, lambda: later.set_result(unix_now()))
        return [unix_now(), monotonic(), await asyncio.to_thread(unix_now), await later]

    tasks = []
    for now in (1.0, 2.0):
        with entered(outside_at(now)):
            tasks.append(asyncio.create_task(told()))
    assert here() is MACHINE and await asyncio.gather(*tasks) == [[1.0] * 4, [2.0] * 4]


def test_keys_follow_from_the_randomness_that_is_handed_in(tmp_path: Path) -> None:
    def made(folder: str, seed: int) -> tuple[Identity, bytes]:
        machine = outside_at(1e9)
        machine.rng = random.Random(seed)
        with entered(machine):
            identity = load_or_create_identity(tmp_path / folder)
            key = TlsKey.of(machine.rng.randbytes(TLS_SECRET_BYTES))
            return identity, RunAuthority.create(identity, "run", unix_now(), key).certificate_pem  # type: ignore[arg-type]

    first, again, other = made("a", 1), made("b", 1), made("c", 2)
    assert first[0].peer_id == again[0].peer_id and first[1] == again[1]
    assert first[0].peer_id != other[0].peer_id


class Watched(MachineFiles):
    """Notes what is done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def write(self, handle: int, data: bytes | memoryview) -> int:
        self.done.append("write")
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        self.done.append("sync")

    def sync_path(self, path: Path) -> None:
        self.done.append(f"sync {path.name}")

    def rename(self, old: Path, new: Path) -> None:
        self.done.append(f"rename to {new.name}")
        super().rename(old, new)


def test_secrets_and_checkpoints_are_synced_before_they_have_their_names_and_the_names_after(tmp_path: Path) -> None:
    machine = Machine()
    machine.files = files = Watched()
    with entered(machine):
        write_secret(tmp_path / "keys" / "identity.key", b"x" * 32)
        assert files.done == ["write", "sync", "rename to identity.key", "sync keys"]
        assert (tmp_path / "keys" / "identity.key").read_bytes() == b"x" * 32
        files.done.clear()
        store = CheckpointStore(tmp_path / "checkpoints", LearnerLimits(free_bytes_min=1))
        weights = {"w": torch.ones(3)}
        checkpoint = Checkpoint(Step(1), {}, weights, Version(1), {"journal_from": 0})
        store.begin(checkpoint)
        store.save(checkpoint)
    named = files.done.index("rename to step-00000001")
    names = {path.name for path in (tmp_path / "checkpoints" / "step-00000001").iterdir()}
    assert {f"sync {name}" for name in names} <= set(files.done[:named]), "every file first"
    assert "sync checkpoints" in files.done[named:]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(0, DiskFull), (errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EACCES, PermissionError)],
)
def test_a_secret_not_taken_whole_replaces_no_old_one(tmp_path: Path, error: int, kind: type[Exception]) -> None:
    class Full:
        def write(self, handle: int, data: bytes | memoryview) -> int:
            if error:
                raise OSError(error, "as the disk says")
            return 1

    write_secret(tmp_path / "key", b"old")
    machine = Machine()
    machine.files = Full()  # type: ignore[assignment]
    with entered(machine), pytest.raises(kind):
        write_secret(tmp_path / "key", b"new")
    assert (tmp_path / "key").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@contextlib.contextmanager
def listening():  # type: ignore[no-untyped-def]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        listener.setblocking(False)
        yield listener


def test_one_that_comes_in_the_turn_in_which_the_accepting_ends_is_left_to_the_listener() -> None:
    async def scene() -> None:
        for turns in range(5):
            with listening() as listener:
                accepting = asyncio.create_task(accepted(listener))
                await asyncio.sleep(0)
                with socket.create_connection(listener.getsockname()):
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    accepting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        taken, _ = await accepting
                        taken.close()
                    del accepting
        gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(scene())
