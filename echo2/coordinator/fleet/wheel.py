"""Makes a wheel of the running installation and serves it on the enrolment port, to machines that the run rents.

Guarantees: the wheel holds the code that this process runs; the same code makes the same bytes, so that a machine's set-up can name
their SHA-256; only the holder of a valid join token gets it, and no use of the token is counted.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import io
import logging
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import echo2
from echo2.base.errors import ConfigError
from echo2.coordinator.fleet.enrolment import TOKEN_CHARS_MAX, Callers
from echo2.coordinator.hub import Hub
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc

BLOCK_BYTES = 256 << 10  # below gRPC's limit of a message
_WHEEL = "Wheel-Version: 1.0\nGenerator: echo2\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold
_log = logging.getLogger("echo2.coordinator")


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    data: bytes
    sha256: str


@functools.cache
def running_wheel() -> Wheel:
    """The wheel, made once in this process. ConfigError if the package was never installed: its requirements are then unknown."""
    try:
        installed = distribution("echo2")
    except PackageNotFoundError:
        raise ConfigError(
            "wheel for rented machines: expected an installed echo2 to make it from, found only its files; install this checkout "
            '(pip install -e .), or set install = "git+URL" in the offer\'s settings'
        ) from None
    data = _packed(dict(_files(installed)), f"echo2-{installed.version}.dist-info")
    return Wheel(f"echo2-{installed.version}-py3-none-any.whl", data, hashlib.sha256(data).hexdigest())


def _files(installed: Distribution) -> Iterator[tuple[str, bytes]]:
    package, metadata = Path(echo2.__file__).parent, f"echo2-{installed.version}.dist-info"
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"echo2/{path.relative_to(package).as_posix()}", path.read_bytes()
    for name in ("METADATA", "entry_points.txt"):
        yield f"{metadata}/{name}", (installed.read_text(name) or "").encode()
    yield f"{metadata}/WHEEL", _WHEEL.encode()
    for file in installed.files or ():
        if ".dist-info/licenses/" in file.as_posix():
            yield file.as_posix(), file.read_binary()


def _packed(files: dict[str, bytes], metadata: str) -> bytes:
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{metadata}/RECORD"] = f"{record}{metadata}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return packed.getvalue()


class SetupService(enrolment_pb2_grpc.SetupServicer):
    """Serves the wheel to machines that have a join token and no certificate yet."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._callers = hub, Callers(hub, "wheel")

    async def FetchWheel(
        self, request: enrolment_pb2.WheelRequest, context: Any
    ) -> AsyncIterator[enrolment_pb2.WheelBlock]:
        async with self._callers.answered(context):
            host, now = self._callers.admit(context)
            token = self._hub.tokens.look_up(request.token[:TOKEN_CHARS_MAX], host, now)
            wheel = await asyncio.to_thread(running_wheel)
        _log.info("%s fetches %s with token %s", host, wheel.name, token.token_id)
        for at in range(0, len(wheel.data), BLOCK_BYTES):
            yield enrolment_pb2.WheelBlock(data=wheel.data[at : at + BLOCK_BYTES])
