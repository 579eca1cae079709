"""libp2p peer IDs of ed25519 keys, as text and as DNS names. Guarantees: text, key and DNS name map one to one.

Implemented here because importing py-libp2p takes about a second at start-up; a test compares it with libp2p's types.
"""

from __future__ import annotations

import base64
import functools

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from echo2.base.errors import BadSignature, TrustError
from echo2.base.ids import PeerId

# protobuf PublicKey{Type: Ed25519, Data: 32 bytes}, and that wrapped in the identity multihash (code 0, length 36).
_KEY_PREFIX = bytes.fromhex("08011220")
_MULTIHASH_PREFIX = bytes.fromhex("0024")
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DNS_SUFFIX = ".peer.echo2"
PEER_ID_CHARACTERS_MAX = 64


def _base58_encode(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def _base58_decode(text: str) -> bytes:
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise TrustError(f"peer ID: expected base58, got {character!r} in {text!r}")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def marshalled_public_key(raw_public_key: bytes) -> bytes:
    """libp2p's protobuf form of a raw ed25519 public key."""
    assert len(raw_public_key) == 32, f"an ed25519 public key has 32 bytes, not {len(raw_public_key)}"
    return _KEY_PREFIX + raw_public_key


def unmarshalled_public_key(data: bytes) -> bytes:
    """The raw key inside libp2p's protobuf form."""
    if len(data) != 36 or not data.startswith(_KEY_PREFIX):
        raise TrustError(f"public key: expected a libp2p ed25519 key of 36 bytes, got {len(data)} bytes")
    return data[len(_KEY_PREFIX) :]


def peer_id_of(raw_public_key: bytes) -> PeerId:
    """The peer ID of a raw ed25519 public key."""
    return PeerId(_base58_encode(_MULTIHASH_PREFIX + marshalled_public_key(raw_public_key)))


def public_key_of(peer_id: str) -> bytes:
    """The raw ed25519 public key inside a peer ID."""
    if not 0 < len(peer_id) <= PEER_ID_CHARACTERS_MAX:
        raise TrustError(f"peer ID: expected 1 to {PEER_ID_CHARACTERS_MAX} characters, got {len(peer_id)}")
    data = _base58_decode(peer_id)
    if not data.startswith(_MULTIHASH_PREFIX):
        raise TrustError(f"peer ID: expected one of an ed25519 key (12D3KooW...), got {peer_id!r}")
    return unmarshalled_public_key(data[len(_MULTIHASH_PREFIX) :])


def dns_name_of(peer_id: str) -> str:
    """The DNS name that a peer's certificates carry; base32, because DNS names do not keep case."""
    return base64.b32encode(public_key_of(peer_id)).decode().rstrip("=").lower() + _DNS_SUFFIX


@functools.lru_cache(maxsize=1024)
def _verifier(peer_id: str) -> Ed25519PublicKey:
    """Cached, because every chunk is checked against the same publisher's key."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def verify_signature(peer_id: str, message: bytes, signature: bytes) -> None:
    """Raises BadSignature unless `signature` is `peer_id`'s over `message`."""
    try:
        _verifier(peer_id).verify(signature, message)
    except InvalidSignature:
        raise BadSignature(f"expected a signature by {peer_id}, got one that does not verify") from None
