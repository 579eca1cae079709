"""Keys in files, enrolment, and gRPC channels and servers on mutual TLS.

Guarantees: a channel talks to exactly the peer it was opened for (its certificate's DNS name is derived from the peer
ID, and only the run's authority can issue it); a server built here refuses clients without a certificate of the run;
secret files can be read only by their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from echo2.base.errors import (
    NO_ROOM,
    BadToken,
    ConfigError,
    DiskFull,
    EchoError,
    NotAllowed,
    StateError,
    TrustError,
    Unreachable,
    VersionMismatch,
)
from echo2.base.ids import PeerId, RunId
from echo2.outside import here, monotonic, unix_now
from echo2.outside.guard import FairShare
from echo2.outside.net import Dialled, Shown
from echo2.trust.calls import GatedServer
from echo2.trust.identity import (
    TLS_SECRET_BYTES,
    Identity,
    JoinLink,
    NodeCertificate,
    PeerIdentity,
    Role,
    RunAuthority,
    TlsKey,
    certificate_of,
    certificate_request,
    dns_name_of,
    self_signed_certificate,
)
from echo2.trust.ports import DOORS, ENROLMENT, KEEPALIVE, STREAM_WINDOW_BYTES, PortLimits, remote_of

PROTOCOL_VERSION = 2  # version of all messages, and of the delta containers within them
IDENTITY_BYTES, CHECK_BYTES = 32, 8  # an ed25519 seed (RFC 8032); 8 bytes of its hash find any cut or flip of the file
# Useless under another identity, so a missing key beside them is damage.
_BOUND_TO_IDENTITY = ("authority.pem", "authority.key", "credentials.json")
CALLS_END_WITHIN_S = 2.0  # a daemon that stops hands partial work back within 2 s
MESSAGE_BYTES_MAX = 16 << 20
"""Twice the largest report (wire/bounds.CALLS); channels of calls that carry more have options of their own."""
_log = logging.getLogger("echo2.trust")


def write_secret(path: Path, data: bytes) -> None:
    """Writes `data` atomically, readable only by the owner. DiskFull if there is no room for it: the old content stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")  # another command may write the same file just now
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if here().files.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            here().files.sync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)  # another process would not take its name again
        if error.errno not in NO_ROOM:
            raise
        raise DiskFull(f"{path}: expected room for {len(data)} bytes, got {error.strerror}") from None
    here().files.rename(temporary, path)
    here().files.sync_path(path.parent)


def read_secret(path: Path) -> bytes:
    """Reads a secret; TrustError if other users can read the file."""
    try:
        status = path.stat()
        if status.st_mode & 0o077:
            raise TrustError(f"{path}: expected mode 0600, got {status.st_mode & 0o777:04o}; run chmod 600 on it")
        return path.read_bytes()
    except OSError as error:
        raise StateError(
            f"{path}: expected to read it as user {os.geteuid()}, got: {error.strerror}{_owner(path)}"
        ) from None


def _owner(path: Path) -> str:
    """A hint naming the owner of the file or, if that cannot be read, of its folder."""
    for place in (path, path.parent):
        with contextlib.suppress(OSError):
            return f" ({place} is of user {place.stat().st_uid}: start as that user, or chown it)"
    return ""


def load_or_create_identity(folder: Path) -> Identity:
    """The identity in `folder`/identity.key; created on first use, but never next to files bound to an earlier one."""
    path = folder / "identity.key"
    if not path.exists():
        if left := [name for name in _BOUND_TO_IDENTITY if (folder / name).exists()]:
            raise StateError(
                f"{path}: expected it beside {left[0]}, found none. Restore it from a backup; or empty {folder} to begin as "
                "a new node, which needs a join link (a coordinator then begins a new run)"
            )
        write_secret(path, _with_check(here().rng.randbytes(IDENTITY_BYTES)))
    data = read_secret(path)
    raw = data[:IDENTITY_BYTES]
    if data != _with_check(raw):
        raise StateError(
            f"{path}: expected {IDENTITY_BYTES} bytes of a key and their checksum, found {len(data)} bytes that differ "
            "from what was written. Restore it from a backup"
        )
    return Identity.from_private_bytes(raw)


def _with_check(raw: bytes) -> bytes:
    return raw + hashlib.sha256(raw).digest()[:CHECK_BYTES]


def load_or_create_authority(folder: Path, identity: Identity, run_id: RunId) -> RunAuthority:
    """The run's authority kept in `folder`; created on first use. StateError if the folder belongs to another run."""
    key_path, certificate_path = folder / "authority.key", folder / "authority.pem"
    missing = [path for path in (key_path, certificate_path) if not path.exists()]
    if len(missing) == 2:
        new = RunAuthority.create(identity, run_id, unix_now(), new_tls_key())
        write_secret(key_path, new.key_pem())
        write_secret(certificate_path, new.certificate_pem)
    elif missing:
        left = key_path if missing == [certificate_path] else certificate_path
        # It may have been killed between the two writes; then the key has signed nothing yet.
        first = f". On a run's very first start, remove {key_path}" if left == key_path else ""
        raise StateError(f"{missing[0]}: expected it beside {left.name}, found none; restore it from a backup{first}")
    try:
        authority = RunAuthority(identity, TlsKey.from_pem(read_secret(key_path)), read_secret(certificate_path))
        authority.certificate.check_issuer(authority.certificate_pem)
    except (TrustError, ValueError) as error:
        raise StateError(
            f"{folder}: expected the run's authority as it was made, found {error}; restore {key_path.name} and "
            f"{certificate_path.name} from a backup"
        ) from None
    if authority.run_id != run_id:
        raise StateError(f"{folder}: expected the authority of run {run_id!r}, got that of {authority.run_id!r}")
    return authority


@dataclass(slots=True)
class Credentials:
    """Everything that a node needs to talk to the others of its run. All parts of a process share one object: `renew` takes
    effect for new connections, and for servers at their next handshake. Open connections are not touched."""

    identity: Identity
    tls_key_pem: bytes
    certificate: NodeCertificate
    authority_pem: bytes
    run_id: RunId
    coordinator_peer_id: PeerId
    coordinator_address: str
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def renew(self, tls_key_pem: bytes, certificate: NodeCertificate) -> None:
        certificate.check_peer(self.peer_id)
        certificate.check_issuer(self.authority_pem)
        with self._lock:
            self.tls_key_pem, self.certificate = tls_key_pem, certificate

    def key_and_certificate(self) -> tuple[bytes, bytes]:
        """The matching key and certificate in PEM; thread-safe."""
        with self._lock:
            return self.tls_key_pem, self.certificate.pem

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def role(self) -> Role:
        return self.certificate.role

    def check(self, now_unix_s: float) -> None:
        """TrustError unless everything belongs together and is currently valid."""
        authority = NodeCertificate.parse(self.authority_pem, "the run's authority")
        authority.check_peer(self.coordinator_peer_id)
        self.certificate.check_peer(self.peer_id)
        self.certificate.check_issuer(self.authority_pem)
        self.certificate.check_time(now_unix_s)
        if self.certificate.spki_der != TlsKey.from_pem(self.tls_key_pem).spki_der():
            raise TrustError(f"certificate of {self.peer_id}: it belongs to another TLS key than that beside it")


def save_credentials(folder: Path, credentials: Credentials) -> None:
    fields = {
        "tls_key_pem": credentials.tls_key_pem.decode(),
        "certificate_pem": credentials.certificate.pem.decode(),
        "authority_pem": credentials.authority_pem.decode(),
        "run_id": credentials.run_id,
        "coordinator_peer_id": credentials.coordinator_peer_id,
        "coordinator_address": credentials.coordinator_address,
    }
    write_secret(folder / "credentials.json", json.dumps({**fields, "check": _check_of(fields)}, indent=1).encode())


def _check_of(fields: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[: 2 * CHECK_BYTES]


def load_credentials(folder: Path, identity: Identity) -> Credentials | None:
    """None if there are none, or they no longer hold: whoever was away until its certificate expired enrols anew."""
    path = folder / "credentials.json"
    if not path.exists():
        return None
    try:
        fields = json.loads(read_secret(path))
        if fields.pop("check", None) != _check_of(fields):
            raise ValueError("the checksum does not match")
        credentials = Credentials(
            identity=identity,
            tls_key_pem=fields["tls_key_pem"].encode(),
            certificate=NodeCertificate.parse(fields["certificate_pem"].encode(), str(path)),
            authority_pem=fields["authority_pem"].encode(),
            run_id=RunId(fields["run_id"]),
            coordinator_peer_id=PeerId(fields["coordinator_peer_id"]),
            coordinator_address=fields["coordinator_address"],
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: expected saved credentials, got something else ({error}); remove it and join again"
        ) from None
    try:
        credentials.check(unix_now())
    except TrustError as error:
        _log.info("%s: enrolling anew: %s", folder, error)
        return None
    return credentials


def coordinator_credentials(authority: RunAuthority, address: str) -> Credentials:
    """The coordinator's own credentials, for the port of the run's services at `address`."""
    key = new_tls_key()
    request = certificate_request(authority.identity, key)
    certificate = authority.issue(request, Role.COORDINATOR, unix_now(), lifetime_s=365 * 86400.0)
    return Credentials(
        authority.identity, key.to_pem(), certificate, authority.certificate_pem, authority.run_id,
        authority.identity.peer_id, address,
    )  # fmt: skip


def new_tls_key() -> TlsKey:
    return TlsKey.of(here().rng.randbytes(TLS_SECRET_BYTES))


def enrolment_server_credentials(authority: RunAuthority) -> Shown:
    """For the enrolment port: a self-signed certificate with the coordinator's identity; clients have no certificate yet."""
    key = new_tls_key()
    pair = (key.to_pem(), self_signed_certificate(authority.identity, key, unix_now(), authority.run_id))
    return Shown(lambda: pair, None)


def server_credentials(credentials: Credentials) -> Shown:
    """Mutual TLS: the handshake refuses clients without a certificate of this run, and always uses the newest own certificate."""
    return Shown(credentials.key_and_certificate, credentials.authority_pem)


def _member(context: Any) -> tuple[str, float]:
    peer = peer_of(context)
    return peer.peer_id, FairShare.SHARE if peer.role is Role.WORKER else FairShare.OF_MANY


def new_server(limits: PortLimits) -> GatedServer:
    return GatedServer(limits, _member)


def new_enrolment_server() -> GatedServer:
    """Creates a server for callers that have no certificate yet; limits apply per address."""
    return GatedServer(ENROLMENT, lambda context: (remote_of(context.peer())[0], FairShare.SHARE))


def bind_server(server: GatedServer, address: str, certificates: Shown) -> int:
    """Listens on `address` (port 0: any) and returns the port; PortBusy if the address is taken."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"listen address: expected HOST:PORT, got {address!r}")
    return server.listen(host, int(port), certificates)


async def calls_have_ended() -> None:
    """Waits until gRPC's tasks for all calls have ended; a process with servers awaits this last. `server.stop` does not wait
    for them; if the loop ends first, it cancels them and gRPC prints a traceback for each."""
    until = monotonic() + CALLS_END_WITHIN_S
    while (left_s := until - monotonic()) > 0:  # one task a call, found by its coroutine's name
        calls = [t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__name__", "") == "_schedule_rpc_coro"]
        if not calls:
            return
        await asyncio.wait(calls, timeout=left_s)


def open_channel(
    address: str, expected_peer_id: PeerId, credentials: Credentials, options: Sequence[tuple[str, int | str]] = ()
) -> grpc.aio.Channel:
    """Opens a channel to `expected_peer_id` at `address`. Any other peer there fails the handshake."""
    pair = credentials.key_and_certificate()
    dialled = Dialled(dns_name_of(expected_peer_id), credentials.authority_pem, pair)
    return here().net.channel(address, dialled, channel_options(options))


def open_enrolment_channel(link: JoinLink, shown_pem: bytes) -> grpc.aio.Channel:
    """Opens a channel to a join link's port, which must show exactly the certificate that was checked."""
    return here().net.channel(link.address, Dialled(dns_name_of(link.peer_id), shown_pem), channel_options())


def channel_options(options: Sequence[tuple[str, int | str]] = ()) -> list[tuple[str, int | str]]:
    """A channel's options; `options` override the defaults."""
    defaults = {
        **KEEPALIVE,
        "grpc.http2.lookahead_bytes": STREAM_WINDOW_BYTES,
        "grpc.max_send_message_length": MESSAGE_BYTES_MAX,
        "grpc.max_receive_message_length": MESSAGE_BYTES_MAX,
        "grpc.initial_reconnect_backoff_ms": 250,
        "grpc.max_reconnect_backoff_ms": 5_000,
        "grpc.enable_http_proxy": 0,
    }
    return list({**defaults, **dict(options)}.items())


def peer_of(context: Any, *roles: Role) -> PeerIdentity:
    """The caller, from the client certificate that the handshake verified. TrustError if there is none, NotAllowed for one of
    none of these roles."""
    pems = context.auth_context().get("x509_pem_cert", [])
    if not pems:
        raise TrustError(f"caller {context.peer()}: expected a client certificate of the run, got none")
    certificate = certificate_of(bytes(pems[0]))
    certificate.check_time(unix_now())
    identity = certificate.whose
    DOORS.know(context.peer(), identity.peer_id, is_trusted=identity.role is not Role.WORKER)
    if roles and identity.role not in roles:
        wanted = " or ".join(roles)
        raise NotAllowed(f"{identity.peer_id}: expected the role {wanted}, its certificate says {identity.role.value}")
    return identity


# The inverse of calls._STATUS.
_ERRORS_BY_STATUS: dict[grpc.StatusCode, type[EchoError]] = {
    grpc.StatusCode.UNAUTHENTICATED: BadToken,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.FAILED_PRECONDITION: VersionMismatch,
    grpc.StatusCode.INVALID_ARGUMENT: TrustError,
}


_GRPCS_OWN_WORDS = {
    "onnection refused": "nothing listens there",
    "Stream removed": "the connection has ended",
    "Socket closed": "the connection has ended",
    "onnection reset": "the connection has ended",
    "failed to connect": "no connection could be made",
}
"""What gRPC itself says of a connection names sockets and its own parts; for each a phrase of it, and what it means."""


def error_of(error: grpc.aio.AioRpcError, peer: str) -> EchoError:
    """Our exception for a gRPC status, with the server's message, or in words what became of the connection."""
    kind, text = _ERRORS_BY_STATUS.get(error.code(), Unreachable), error.details() or error.code().name
    meant = next((words for phrase, words in _GRPCS_OWN_WORDS.items() if phrase in text), text)
    return kind(f"{peer}: {meant if kind is Unreachable else text}")
