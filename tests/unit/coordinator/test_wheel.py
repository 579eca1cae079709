"""The wheel for rented machines: what is in it, who gets it over the enrolment port, and what the script there refuses."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import grpc
import pytest
from cryptography.exceptions import InvalidSignature

from echo2.base.errors import ConfigError
from echo2.coordinator.money.providers import fetch_wheel, machine_setup
from echo2.coordinator.operator import Commands
from echo2.trust.identity import Identity, JoinLink
from tests.unit.coordinator.test_daemon import options, running

PACKAGE = Path(machine_setup.__file__).parents[3]


def test_the_wheel_holds_this_code_and_its_metadata_and_is_the_same_each_time() -> None:
    made = machine_setup.running_wheel()
    archive = zipfile.ZipFile(io.BytesIO(made.data))
    files = {path.relative_to(PACKAGE.parent).as_posix(): path for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert {name for name in archive.namelist() if name.startswith("echo2/")} == expected
    assert all(archive.read(name) == files[name].read_bytes() for name in expected)
    metadata = made.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert b"\nProvides-Extra: worker\n" in archive.read(f"{metadata}/METADATA")
    assert b"echo-worker = echo2.cli.worker:main" in archive.read(f"{metadata}/entry_points.txt")
    assert f"{metadata}/licenses/LICENSE" in archive.namelist()
    assert archive.read(f"{metadata}/RECORD").count(b"\n") == len(archive.namelist())
    assert made.sha256 == hashlib.sha256(made.data).hexdigest()
    machine_setup.running_wheel.cache_clear()
    assert machine_setup.running_wheel() == made


def test_without_an_installation_there_is_none_and_it_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    machine_setup.running_wheel.cache_clear()
    monkeypatch.setattr(machine_setup, "distribution", missing)
    with pytest.raises(ConfigError, match=r'expected an installed echo2 .* or set install = "git\+URL"'):
        machine_setup.running_wheel()


async def test_a_holder_of_a_token_gets_the_wheel_and_does_not_use_the_token_up(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.links["worker"])
        token, _ = Commands(daemon.hub, "h", 1, [], {}).create_token("worker", "one", 60.0, 1)
        before = {one: set(kept.peers) for one, kept in daemon.hub.tokens.tokens.items()}
        assert await asyncio.to_thread(fetch_wheel.fetched, str(link)) == machine_setup.running_wheel().data
        assert {one: set(kept.peers) for one, kept in daemon.hub.tokens.tokens.items()} == before
        assert token.token_id in before
        stranger = JoinLink(link.host, link.port, link.peer_id, "x" * 43)
        with pytest.raises(grpc.RpcError) as refused:
            await asyncio.to_thread(fetch_wheel.fetched, str(stranger))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        other = JoinLink(link.host, link.port, Identity.generate().peer_id, link.token)
        with pytest.raises(InvalidSignature):  # before the token is shown
            await asyncio.to_thread(fetch_wheel.fetched, str(other))


def test_another_wheel_than_the_pinned_one_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "echo2.whl"
    monkeypatch.setenv("ECHO2_JOIN_LINK", "echo2://h:1/p?token=t")
    monkeypatch.setattr(fetch_wheel, "fetched", lambda link: b"another")
    monkeypatch.setattr("sys.argv", ["-", machine_setup.running_wheel().sha256, str(target)])
    with pytest.raises(SystemExit, match="expected a wheel with the SHA-256 .*: the coordinator was changed since"):
        fetch_wheel.main()
    assert not target.exists()
    monkeypatch.setattr("sys.argv", ["-", hashlib.sha256(b"another").hexdigest(), str(target)])
    fetch_wheel.main()
    assert target.read_bytes() == b"another"
