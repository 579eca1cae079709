"""Fetches echo2's wheel from the coordinator. Runs on a rented machine that has no echo2 yet, as `python - SHA256 FILE`.

The join link in ECHO2_JOIN_LINK names the port and the identity there. Guarantees: the token is shown only to that identity; the
file is written only if it has the expected SHA-256. Needs grpcio and cryptography, nothing of echo2. Tries `TRIES` times.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import sys
import time
import urllib.parse
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # of peer ids
LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")  # libp2p's TLS specification
FETCH_S, RETRY_S, TRIES = 120.0, 5.0, 60  # a coordinator that is started again is back in five minutes


def checked_certificate(host: str, port: int, peer_id: str) -> x509.Certificate:
    """The certificate that the port shows, after the check that the link's identity signed its key."""
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE  # checked below, against the link
    unchecked.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), timeout=20) as plain, unchecked.wrap_socket(plain) as secure:
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    signed = b"libp2p-tls-handshake:" + certificate.public_key().public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    number = 0
    for character in peer_id:
        number = number * 58 + BASE58.index(character)
    key = number.to_bytes(38, "big")[-32:]  # at the end of a peer ID
    extension = certificate.extensions.get_extension_for_oid(LIBP2P_EXTENSION).value
    assert isinstance(extension, x509.UnrecognizedExtension)
    Ed25519PublicKey.from_public_bytes(key).verify(extension.value[-64:], signed)
    return certificate


def fetched(link: str) -> bytes:
    """The wheel. The messages of FetchWheel have the form of StringValue and BytesValue: one field, number 1."""
    parts = urllib.parse.urlsplit(link.strip())
    host, port, token = parts.hostname or "", parts.port or 0, urllib.parse.parse_qs(parts.query)["token"][0]
    certificate = checked_certificate(host, port, parts.path.strip("/"))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    name = names.get_values_for_type(x509.DNSName)[0]
    options = (("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0))
    trusted = grpc.ssl_channel_credentials(certificate.public_bytes(Encoding.PEM))
    with grpc.secure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", trusted, options) as channel:
        call = channel.unary_stream("/echo2.v1.Setup/FetchWheel", StringValue.SerializeToString, BytesValue.FromString)
        return b"".join(block.value for block in call(StringValue(value=token), timeout=FETCH_S))


def main() -> None:
    expected, path = sys.argv[1:3]
    for tries_left in reversed(range(TRIES)):
        try:
            wheel = fetched(os.environ["ECHO2_JOIN_LINK"])
            break
        except (OSError, grpc.RpcError) as error:
            is_final = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
            if is_final or not tries_left:
                sys.exit(f"echo2: expected the wheel from the run's coordinator, got: {error}")
            time.sleep(RETRY_S)
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != expected:
        sys.exit(
            f"echo2: expected a wheel with the SHA-256 {expected}, got {digest}: the coordinator was changed since this machine "
            "was rented; release the machine and rent another"
        )
    Path(path).write_bytes(wheel)


if __name__ == "__main__":
    main()
