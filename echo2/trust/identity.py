"""Node identities: ed25519 keys, join links that pin them, and certificates that bind TLS keys to them.

Guarantees: a certificate that parses here carries the libp2p TLS extension, and the identity that it names signed that
extension. TLS keys are P-256 (gRPC's TLS library negotiates no ed25519); the ed25519 identity vouches for them.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import functools
import hashlib
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import base58
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nacl.exceptions import BadSignatureError

from echo2.base.errors import BadSignature, ConfigError, NotAllowed, TrustError
from echo2.base.ids import PeerId, RunId
from echo2.base.units import address_of

LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")  # libp2p TLS specification
_HANDSHAKE_PREFIX = b"libp2p-tls-handshake:"  # libp2p TLS specification
# DER of SEQUENCE { OCTET STRING (36 bytes of key), OCTET STRING (64 bytes of signature) }.
_SIGNED_KEY = re.compile(rb"\x30\x68\x04\x24(.{36})\x04\x40(.{64})", re.DOTALL)
TLS_SECRET_BYTES = 64  # FIPS 186-5 A.2.1: 64 bits more than the order at least
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # FIPS 186-5, D.1.2.3
CLOCK_SKEW_S = 300.0  # clocks without NTP drift by minutes; a certificate must be in force at once
AUTHORITY_LIFETIME_S = 10 * 365 * 86400.0  # beyond any run: it cannot be renewed within one
NODE_LIFETIME_S = 30 * 86400.0  # renewed after 20 of 30 days, so ten days of absence are no loss


class Role(enum.StrEnum):
    """A node's role in a run; part of its certificate."""

    COORDINATOR = "coordinator"
    LEARNER = "learner"
    WORKER = "worker"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The peer of a connection, proven by its certificate. `token_id`: id of the join token that admitted it."""

    peer_id: PeerId
    role: Role
    token_id: str = ""


class Identity:
    """A node's long-lived ed25519 key."""

    __slots__ = ("_key", "peer_id")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id_of(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, raw: bytes) -> Identity:
        return cls(Ed25519PrivateKey.from_private_bytes(raw))

    def private_bytes(self) -> bytes:
        return self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def _without_token(text: str) -> str:
    """A malformed join link, fit for an error message: without its token."""
    before, mark, _ = text.partition("token")  # what follows may be `=`, or that as a URL writes it
    return repr(before[:200] + mark + ("=…" if mark else ""))


@dataclass(frozen=True, slots=True)
class JoinLink:
    """`echo2://HOST:PORT/PEER_ID?token=...`: where to enrol, which peer to expect there, and the token that permits it."""

    host: str
    port: int
    peer_id: PeerId
    token: str

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Parses a link; ConfigError names the malformed part."""
        shape = "echo2://HOST:PORT/PEER_ID?token=TOKEN"
        try:
            parts = urllib.parse.urlsplit(text.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"join link: expected {shape}, got {_without_token(text)} ({error})") from None
        if parts.scheme != "echo2" or not host or not port:
            raise ConfigError(f"join link: expected {shape}, got {_without_token(text)}")
        peer_id = parts.path.strip("/")
        try:
            public_key_of(peer_id)
        except TrustError as error:
            raise ConfigError(f"join link: expected {shape}; {error}") from None
        tokens = urllib.parse.parse_qs(parts.query).get("token", [])
        if len(tokens) != 1 or not 0 < len(tokens[0]) <= 256:
            raise ConfigError(f"join link: expected one token of at most 256 characters, as in {shape}")
        return cls(host, port, PeerId(peer_id), tokens[0])

    @property
    def address(self) -> str:
        return address_of(self.host, self.port)

    def __str__(self) -> str:
        return f"echo2://{self.address}/{self.peer_id}?token={urllib.parse.quote(self.token, safe='')}"


class TlsKey:
    """A P-256 key for TLS handshakes; an identity vouches for it."""

    __slots__ = ("key",)

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self.key = key

    @classmethod
    def generate(cls) -> TlsKey:
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def of(cls, secret: bytes) -> TlsKey:
        """Derives a key from `TLS_SECRET_BYTES` random bytes: twice the curve's size, so that all keys are equally likely."""
        assert len(secret) == TLS_SECRET_BYTES, "too few bytes for a key"
        return cls(ec.derive_private_key(1 + int.from_bytes(secret, "big") % (_P256_ORDER - 1), ec.SECP256R1()))

    @classmethod
    def from_pem(cls, pem: bytes) -> TlsKey:
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise TrustError(f"TLS key: expected a P-256 key in PEM, got something else ({error})") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TrustError(f"TLS key: expected a P-256 key, got {type(key).__name__}")
        return cls(key)

    def to_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def spki_der(self) -> bytes:
        """The public key as certificates hold it."""
        return _spki_of(self.key)

    def sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self.key, hashes.SHA256(), ecdsa_deterministic=True).public_bytes(Encoding.PEM)


def _extension(identity: Identity, key: TlsKey) -> x509.UnrecognizedExtension:
    signature = identity.sign(_HANDSHAKE_PREFIX + key.spki_der())
    public = marshalled_public_key(public_key_of(identity.peer_id))
    return x509.UnrecognizedExtension(LIBP2P_EXTENSION, b"\x30\x68\x04\x24" + public + b"\x04\x40" + signature)


def _peer_bound_to(extensions: x509.Extensions, spki_der: bytes, what: str) -> PeerId:
    """The identity that signed `spki_der` in the libp2p extension; TrustError if it is missing or forged."""
    try:
        extension = extensions.get_extension_for_oid(LIBP2P_EXTENSION).value
    except x509.ExtensionNotFound:
        raise TrustError(f"{what}: expected the libp2p TLS extension, got none") from None
    assert isinstance(extension, x509.UnrecognizedExtension)
    match = _SIGNED_KEY.fullmatch(extension.value)
    if match is None:
        raise TrustError(f"{what}: expected an ed25519 key and its signature in the libp2p TLS extension")
    peer_id = peer_id_of(unmarshalled_public_key(match[1]))
    try:
        verify_signature(peer_id, _HANDSHAKE_PREFIX + spki_der, match[2])
    except BadSignature:
        raise BadSignature(f"{what}: its libp2p TLS extension names {peer_id}, which did not sign this key") from None
    return peer_id


def _spki_of(item: x509.Certificate | x509.CertificateSigningRequest | ec.EllipticCurvePrivateKey) -> bytes:
    return item.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _name(common_name: str, role: Role, run_id: str, token_id: str = "") -> x509.Name:
    if not 0 < len(run_id) <= 64:
        raise ConfigError(f"run id: expected 1 to 64 characters, got {len(run_id)}")
    attributes = [
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, run_id),
        x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role.value),
        x509.NameAttribute(NameOID.COMMON_NAME, common_name),
    ]
    if token_id:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, token_id))
    return x509.Name(attributes)


def _builder(
    name: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now_unix_s: float, lifetime_s: float
) -> x509.CertificateBuilder:
    """A builder whose serial number is derived from content and time: the same request at the same moment gives the same one."""
    spki_der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    serial = hashlib.sha256(f"{now_unix_s!r} {lifetime_s!r} {issuer} {name} ".encode() + spki_der).digest()[:19]
    begin = datetime.fromtimestamp(now_unix_s - CLOCK_SKEW_S, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .serial_number(1 + int.from_bytes(serial, "big"))
        .public_key(public_key)
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(seconds=CLOCK_SKEW_S + lifetime_s))
    )


def _as_leaf(builder: x509.CertificateBuilder, peer_id: PeerId) -> x509.CertificateBuilder:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name_of(peer_id))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )


def certificate_request(identity: Identity, key: TlsKey) -> bytes:
    """DER of a request for `key`, vouched for by `identity`; sent by joiners."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    builder = builder.add_extension(_extension(identity, key), critical=False)
    return builder.sign(key.key, hashes.SHA256(), ecdsa_deterministic=True).public_bytes(Encoding.DER)


def self_signed_certificate(identity: Identity, key: TlsKey, now_unix_s: float, run_id: RunId) -> bytes:
    """PEM of the coordinator's certificate for the enrolment port, where no common authority exists yet."""
    name = _name(identity.peer_id, Role.COORDINATOR, run_id)
    builder = _builder(name, name, key.key.public_key(), now_unix_s, AUTHORITY_LIFETIME_S)
    builder = _as_leaf(builder, identity.peer_id).add_extension(_extension(identity, key), critical=False)
    return key.sign(builder)


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """The contents of a certificate of this project, after its libp2p extension was checked."""

    pem: bytes
    peer_id: PeerId
    role: Role
    run_id: RunId
    not_before_unix_s: float
    not_after_unix_s: float
    spki_der: bytes
    token_id: str = ""

    @property
    def whose(self) -> PeerIdentity:
        return PeerIdentity(self.peer_id, self.role, self.token_id)

    @classmethod
    def parse(cls, certificate: bytes, what: str = "certificate") -> NodeCertificate:
        """Parses PEM or DER. Checks the extension and the name, but not the issuer or the time."""
        try:
            is_pem = certificate.lstrip().startswith(b"-----")
            read = x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate
            parsed = read(certificate)
            spki_der = _spki_of(parsed)
            extensions = parsed.extensions
            fields = {a.oid: str(a.value) for a in parsed.subject}
            role = Role(fields.get(NameOID.ORGANIZATIONAL_UNIT_NAME, ""))
        except (ValueError, UnsupportedAlgorithm) as error:
            raise TrustError(f"{what}: expected an X.509 certificate of a run, got something else ({error})") from None
        peer_id = _peer_bound_to(extensions, spki_der, what)
        if fields.get(NameOID.COMMON_NAME) != peer_id:
            raise TrustError(f"{what}: expected the name {peer_id}, got {fields.get(NameOID.COMMON_NAME)!r}")
        return cls(
            pem=parsed.public_bytes(Encoding.PEM),
            peer_id=peer_id,
            role=role,
            run_id=RunId(fields.get(NameOID.ORGANIZATION_NAME, "")),
            not_before_unix_s=parsed.not_valid_before_utc.timestamp(),
            not_after_unix_s=parsed.not_valid_after_utc.timestamp(),
            spki_der=spki_der,
            token_id=fields.get(NameOID.SERIAL_NUMBER, ""),
        )

    def check_time(self, now_unix_s: float) -> None:
        """TrustError if it is not valid at `now_unix_s`."""
        if not self.not_before_unix_s <= now_unix_s <= self.not_after_unix_s:
            begin, end = (datetime.fromtimestamp(t, UTC) for t in (self.not_before_unix_s, self.not_after_unix_s))
            raise TrustError(
                f"certificate of {self.role} {self.peer_id}: expected now to lie between {begin:%Y-%m-%d %H:%M} and "
                f"{end:%Y-%m-%d %H:%M} UTC, got {datetime.fromtimestamp(now_unix_s, UTC):%Y-%m-%d %H:%M} by this machine's clock; "
                "if that is not the time, set the clock (timedatectl set-ntp true)"
            )

    def check_peer(self, peer_id: PeerId) -> None:
        """TrustError if it belongs to another peer."""
        if self.peer_id != peer_id:
            raise TrustError(f"expected the peer {peer_id}, got a certificate of {self.peer_id}")

    def check_role(self, *allowed: Role) -> None:
        """NotAllowed if its role is not one of `allowed`."""
        if self.role not in allowed:
            wanted = " or ".join(role.value for role in allowed)
            raise NotAllowed(f"expected the role {wanted}, got {self.role.value} of {self.peer_id}")

    def check_issuer(self, authority_pem: bytes) -> None:
        """TrustError if it was not issued by the authority."""
        try:
            certificate = x509.load_pem_x509_certificate(self.pem)
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise TrustError(f"certificate of {self.peer_id}: expected one issued by this run's authority") from None


@functools.lru_cache(maxsize=4096)
def certificate_of(data: bytes) -> NodeCertificate:
    """A peer's, which shows it again and again."""
    return NodeCertificate.parse(data, "the peer's certificate")


class RunAuthority:
    """The certificate authority of one run. Its certificate carries the coordinator's identity."""

    __slots__ = ("_key", "certificate", "identity")

    def __init__(self, identity: Identity, key: TlsKey, certificate_pem: bytes) -> None:
        self.identity = identity
        self._key = key
        self.certificate = NodeCertificate.parse(certificate_pem, "the run's authority")
        self.certificate.check_peer(identity.peer_id)
        if self.certificate.spki_der != key.spki_der():
            raise TrustError("the run's authority: its certificate is of another key")

    @classmethod
    def create(cls, identity: Identity, run_id: RunId, now_unix_s: float, key: TlsKey | None = None) -> RunAuthority:
        key = key or TlsKey.generate()
        # A distinct name: otherwise the coordinator's node certificate would look self-signed (issuer equal to subject).
        attributes = [*_name(identity.peer_id, Role.COORDINATOR, run_id)]
        name = x509.Name([*attributes, x509.NameAttribute(NameOID.DN_QUALIFIER, "authority")])
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        builder = (
            _builder(name, name, key.key.public_key(), now_unix_s, AUTHORITY_LIFETIME_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(_extension(identity, key), critical=False)
        )
        return cls(identity, key, key.sign(builder))

    @property
    def run_id(self) -> RunId:
        return self.certificate.run_id

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.pem

    def key_pem(self) -> bytes:
        """The secret key in PEM; store it in a file that only its owner can read."""
        return self._key.to_pem()

    def issue(
        self, request_der: bytes, role: Role, now_unix_s: float, lifetime_s: float = NODE_LIFETIME_S, token_id: str = ""
    ) -> NodeCertificate:
        """Issues a certificate to the identity that signed the request's extension. Does not check whether it may join.
        `token_id`: id of the join token that admits it, so that every node can tell newcomers of one link from those of others."""
        what = "certificate request"
        try:
            request = x509.load_der_x509_csr(request_der)
            is_signed = request.is_signature_valid
            public_key, extensions = request.public_key(), request.extensions
        except (ValueError, UnsupportedAlgorithm) as error:
            raise TrustError(f"{what}: expected DER of a PKCS#10 request, got something else ({error})") from None
        if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
            raise TrustError(f"{what}: expected a P-256 key, got {type(public_key).__name__}")
        if not is_signed:
            raise BadSignature(f"{what}: expected it signed by its own key")
        peer_id = _peer_bound_to(extensions, _spki_of(request), what)
        extension = extensions.get_extension_for_oid(LIBP2P_EXTENSION).value
        name = _name(peer_id, role, self.run_id, token_id)
        issuer = x509.load_pem_x509_certificate(self.certificate_pem).subject
        builder = _as_leaf(_builder(name, issuer, public_key, now_unix_s, lifetime_s), peer_id)
        return NodeCertificate.parse(self._key.sign(builder.add_extension(extension, critical=False)))


# protobuf PublicKey{Type: Ed25519, Data: 32 bytes}, and that wrapped in the identity multihash (code 0, length 36).
_KEY_PREFIX = bytes.fromhex("08011220")
_MULTIHASH_PREFIX = bytes.fromhex("0024")  # identity hash of 36 bytes: ed25519 peer IDs hold the key itself
_DNS_SUFFIX = ".peer.echo2"  # a name that no DNS has; a certificate is checked against it
PEER_ID_CHARACTERS_MAX = 64  # ed25519 peer IDs have 52


def marshalled_public_key(raw_public_key: bytes) -> bytes:
    assert len(raw_public_key) == 32, f"an ed25519 public key has 32 bytes, not {len(raw_public_key)}"
    return _KEY_PREFIX + raw_public_key


def unmarshalled_public_key(data: bytes) -> bytes:
    if len(data) != 36 or not data.startswith(_KEY_PREFIX):
        raise TrustError(
            f"public key: expected a libp2p ed25519 key of 36 bytes, got {len(data)} bytes that begin {data[:4].hex()}"
        )
    return data[len(_KEY_PREFIX) :]


def peer_id_of(raw_public_key: bytes) -> PeerId:
    return PeerId(base58.b58encode(_MULTIHASH_PREFIX + marshalled_public_key(raw_public_key)).decode())


@functools.lru_cache(maxsize=1024)  # every chunk is checked against the same publisher's key
def public_key_of(peer_id: str) -> bytes:
    if not 0 < len(peer_id) <= PEER_ID_CHARACTERS_MAX:
        raise TrustError(f"peer ID: expected 1 to {PEER_ID_CHARACTERS_MAX} characters, got {len(peer_id)}")
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        raise TrustError(f"peer ID: expected base58, got {peer_id!r}") from None
    if not data.startswith(_MULTIHASH_PREFIX):
        raise TrustError(f"peer ID: expected one of an ed25519 key (12D3KooW...), got {peer_id!r}")
    return unmarshalled_public_key(data[len(_MULTIHASH_PREFIX) :])


def dns_name_of(peer_id: str) -> str:
    """The DNS name that a peer's certificates carry; base32, because DNS names do not keep case."""
    return base64.b32encode(public_key_of(peer_id)).decode().rstrip("=").lower() + _DNS_SUFFIX


@functools.cache
def _opening() -> Callable[[bytes, bytes], bytes]:
    """libsodium's check, in a third of the time that OpenSSL's takes. Loaded on first use: many commands check nothing."""
    from nacl.bindings import crypto_sign_open

    return crypto_sign_open


def verify_signature(peer_id: str, message: bytes, signature: bytes) -> None:
    """Raises BadSignature unless `signature` is `peer_id`'s over `message`."""
    key = public_key_of(peer_id)
    with contextlib.suppress(BadSignatureError):
        if _opening()(signature + message, key) == message:  # a longer signature would be cut elsewhere
            return
    raise BadSignature(f"expected a signature by {peer_id}, got one that does not verify")
