"""What a rented machine runs: a script that installs echo2, and one that joins the run. Both read the link from ECHO2_JOIN_LINK.

Guarantees: echo2 itself comes from the coordinator (its own wheel, whose SHA-256 is in the script) or from the git address that the
offer names; never by its name from a package index, where anybody may have taken that name. Its libraries come from the machine's
index. Settings of the offer that are read here: see `KEYS`.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import io
import logging
import shlex
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import echo2
from echo2.base.errors import ConfigError
from echo2.coordinator.fleet.enrolment import TOKEN_CHARS_MAX, Callers
from echo2.coordinator.hub import Hub
from echo2.coordinator.money.provisioning import MachineOffer, ObservedMachine
from echo2.wire.gen.echo2.v1 import enrolment_pb2, enrolment_pb2_grpc

# Makes a wheel of the running installation and serves it on the enrolment port, to machines that the run rents.
#
# Guarantees: the wheel holds the code that this process runs; the same code makes the same bytes, so that a machine's set-up can
# name their SHA-256; only the holder of a valid join token gets it, and no use of the token is counted.

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


KEYS = ("install", "extra", "setup", "arguments")
"""`install`: `wheel` (from this coordinator, the default) or `git+URL`. `extra`: `worker` (vLLM, the default) or `engine`. `setup`:
commands to run instead of the script, for an image that holds echo2. `arguments`: more options of echo-worker."""
EXTRAS = ("worker", "engine")  # of pyproject.toml
LINK_VARIABLE = "ECHO2_JOIN_LINK"  # not on a command line, which all users can read

# --system-site-packages: an image that holds torch or vLLM need not fetch it again.
_PREPARE = """\
set -eu
export HOME="${HOME:-/root}"
if ! echo '#include <gmp.h>' | cc -E - >/dev/null 2>&1 && command -v apt-get >/dev/null; then
  if [ "$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi
  $sudo apt-get update -q
  $sudo apt-get install -y -q build-essential python3-dev python3-venv libgmp-dev
fi
for python in python3 python3.13 python3.12 python3.11; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
done || { echo "echo2: expected Python 3.11 or newer on this machine: choose another image" >&2; exit 1; }
"$python" -m venv --system-site-packages "$HOME/echo2-env"
"""
_FROM_GIT = """\
"$HOME/echo2-env/bin/python" -m pip install {requirement}
"""
_FROM_COORDINATOR = """\
"$HOME/echo2-env/bin/python" -m pip install 'grpcio>=1.71' 'protobuf>=6.33,<7' 'cryptography>=44'
"$HOME/echo2-env/bin/python" - {sha256} "$HOME/{wheel}" <<'END_OF_FETCH'
{fetch}END_OF_FETCH
"$HOME/echo2-env/bin/python" -m pip install --force-reinstall --no-deps "$HOME/{wheel}"
"$HOME/echo2-env/bin/python" -m pip install "$HOME/{wheel}[{extra}]"
"""
_JOIN = """\
set -eu
export HOME="${{HOME:-/root}}" PATH="${{HOME:-/root}}/echo2-env/bin:$PATH"
umask 077
printf %s "${variable}" > "$HOME/echo2-join.link"
exec echo-worker join "@$HOME/echo2-join.link" {options}
"""


def install_script(offer: MachineOffer) -> str:
    """A shell script that installs echo2 into ~/echo2-env. ConfigError for settings that would not."""
    if setup := offer.setting("setup", ""):
        return f"set -eu\n{setup}\n"
    source, extra = offer.setting("install", "wheel"), offer.setting("extra", EXTRAS[0])
    if extra not in EXTRAS:
        raise ConfigError(f"offer {offer.name}: extra: expected one of {', '.join(EXTRAS)}, got {extra[:40]!r}")
    if source.startswith("git+"):
        return _PREPARE + _FROM_GIT.format(requirement=shlex.quote(f"echo2[{extra}] @ {source}"))
    if source != "wheel":
        raise ConfigError(
            f"offer {offer.name}: install: expected wheel (from this coordinator) or git+URL, got {source[:80]!r}: the name echo2 "
            "on a package index is not this project's"
        )
    wheel = running_wheel()
    fetch = files(__package__).joinpath("fetch_wheel.py").read_text()
    return _PREPARE + _FROM_COORDINATOR.format(sha256=wheel.sha256, wheel=wheel.name, fetch=fetch, extra=extra)


def join_script(offer: MachineOffer, machine_id: str, base: list[str]) -> str:
    """A shell script that becomes the worker `machine_id`. `base`: arguments that name the base checkpoint."""
    arguments = ["--name", machine_id, "--worker.is_spot", str(offer.is_spot).lower(), *base]
    options = f"{shlex.join(arguments)} {offer.setting('arguments', '')}".strip()
    return _JOIN.format(variable=LINK_VARIABLE, options=options)


def base_arguments(model_path: str) -> list[str]:
    """Arguments that name the base checkpoint: a worker looks for it on its machine or the hub before it asks peers for weights."""
    return ["--model.path", model_path] if model_path else []


def join_command(join_link: str, model_path: str = "") -> str:
    return shlex.join(["echo-worker", "join", join_link, *base_arguments(model_path)])


class ManualProvider:
    """`rent` returns the command. `observe` is always empty, because the provider cannot see what a person does."""

    def __init__(self, offer: MachineOffer, model_path: str = "") -> None:
        offer.allow()
        self._model_path = model_path

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
        return join_command(join_link, self._model_path)

    async def release(self, machine_id: str) -> None:
        """Does nothing: the person has to end the machine."""

    async def observe(self) -> dict[str, ObservedMachine]:
        return {}
