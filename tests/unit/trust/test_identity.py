"""Identity, join links, certificates: bound to the ed25519 key, believed only when everything belongs together."""

import time

import base58
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, strategies as st

from echo2.base.errors import BadSignature, ConfigError, NotAllowed, TrustError
from echo2.base.ids import RunId
from echo2.trust import identity as module
from echo2.trust.enrolment import renewal_due_unix_s
from echo2.trust.identity import (
    Identity,
    JoinLink,
    NodeCertificate,
    Role,
    RunAuthority,
    TlsKey,
    certificate_request,
    dns_name_of,
    public_key_of,
    self_signed_certificate,
    verify_signature,
)

NOW = 1_700_000_000.0
RUN = RunId("a-run")
PEER = Identity.from_private_bytes(bytes(32)).peer_id
SHORT = base58.b58encode(base58.b58decode(PEER)[:-1]).decode()


def test_py_libp2p_has_our_peer_id_and_accepts_our_certificate() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID
    from libp2p.security.tls.certificate import verify_certificate_chain

    seed = bytes(range(32))
    identity = Identity.from_private_bytes(seed)
    assert identity.peer_id == ID.from_pubkey(create_new_key_pair(seed).public_key).to_string()
    pem = self_signed_certificate(identity, TlsKey.generate(), time.time(), RUN)
    key = verify_certificate_chain([x509.load_pem_x509_certificate(pem)])
    assert key.to_bytes() == public_key_of(identity.peer_id)


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_a_key_has_one_peer_id_and_dns_name_and_signs_its_message_and_no_other(seed: bytes, message: bytes) -> None:
    identity = Identity.from_private_bytes(seed)
    assert module.peer_id_of(public_key_of(identity.peer_id)) == identity.peer_id
    label = dns_name_of(identity.peer_id).split(".")[0]
    assert len(label) == 52 and label == label.lower()
    signature = identity.sign(message)
    verify_signature(identity.peer_id, message, signature)
    with pytest.raises(BadSignature):
        verify_signature(identity.peer_id, message + b"x", signature)
    longer = identity.sign(b"m" + message)
    for wrong in (longer, longer + b"m", longer[:-1], b"", bytes(64)):
        with pytest.raises(BadSignature):
            verify_signature(identity.peer_id, message, wrong)


@pytest.mark.parametrize(
    "text", ["", "12D3", "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKmEGo", "0OIl", "1" * 200, SHORT]
)
def test_peer_ids_of_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(TrustError):
        public_key_of(text)


@given(st.binary(min_size=32, max_size=32), st.text(min_size=1, max_size=60), st.integers(1, 65535))
def test_join_link_survives_being_written_and_read(seed: bytes, token: str, port: int) -> None:
    link = JoinLink("example.org", port, Identity.from_private_bytes(seed).peer_id, token)
    assert JoinLink.parse(str(link)) == link


@pytest.mark.parametrize(
    "text",
    [
        f"http://h:1/{PEER}?token=t", f"echo2://h/{PEER}?token=t", f"echo2://:1/{PEER}?token=t",
        f"echo2://h:99999/{PEER}?token=t", "echo2://h:1/notapeer?token=t", f"echo2://h:1/{PEER}",
        f"echo2://h:1/{PEER}?token={'t' * 257}", f"echo2://h:1/{PEER}?token=t&token=u", "echo2%3A//h%3A1/P%3Ftoken%3DSECRET",
    ],
)  # fmt: skip
def test_wrong_join_link_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="echo2://HOST:PORT/PEER_ID") as told:
        JoinLink.parse(text)
    assert "SECRET" not in str(told.value)


def test_issued_certificate_names_peer_role_and_run_and_the_authority_survives_being_kept() -> None:
    authority = RunAuthority.create(Identity.generate(), RUN, NOW)
    node, key = Identity.generate(), TlsKey.generate()
    certificate = authority.issue(certificate_request(node, key), Role.WORKER, NOW)
    assert (certificate.peer_id, certificate.role, certificate.run_id) == (node.peer_id, Role.WORKER, RUN)
    certificate.check_issuer(authority.certificate_pem)
    certificate.check_time(NOW)
    certificate.check_role(Role.LEARNER, Role.WORKER)
    left_s = certificate.not_after_unix_s - renewal_due_unix_s(certificate)
    assert 9.5 * 86400 < left_s < 10.5 * 86400, "of thirty days, ten are left to renew it"
    with pytest.raises(NotAllowed, match="learner"):
        certificate.check_role(Role.LEARNER)
    with pytest.raises(TrustError, match="expected now to lie between"):
        certificate.check_time(NOW + 400 * 86400)
    with pytest.raises(TrustError, match="this run's authority"):
        certificate.check_issuer(RunAuthority.create(Identity.generate(), RUN, NOW).certificate_pem)
    with pytest.raises(TrustError, match=authority.identity.peer_id):
        certificate.check_peer(authority.identity.peer_id)
    again = RunAuthority(authority.identity, TlsKey.from_pem(authority.key_pem()), authority.certificate_pem)
    assert again.run_id == RUN
    with pytest.raises(TrustError, match="another key"):
        RunAuthority(authority.identity, key, authority.certificate_pem)
    with pytest.raises(ConfigError, match="expected 1 to 64 characters, got 65"):
        RunAuthority.create(node, RunId("r" * 65), NOW)


def test_request_that_borrows_anothers_extension_is_refused() -> None:
    victim, victims_key, thief_key = Identity.generate(), TlsKey.generate(), TlsKey.generate()
    borrowed = x509.load_der_x509_csr(certificate_request(victim, victims_key)).extensions
    extension = borrowed.get_extension_for_oid(module.LIBP2P_EXTENSION).value
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, victim.peer_id)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name).add_extension(extension, critical=False)
    forged = builder.sign(thief_key.key, hashes.SHA256()).public_bytes(Encoding.DER)
    authority = RunAuthority.create(Identity.generate(), RUN, NOW)
    with pytest.raises(BadSignature, match="did not sign this key"):
        authority.issue(forged, Role.WORKER, NOW)


@given(st.binary(max_size=300))
def test_rubbish_requests_and_certificates_are_trust_errors(data: bytes) -> None:
    authority = _AUTHORITY
    with pytest.raises(TrustError):
        authority.issue(data, Role.WORKER, NOW)
    with pytest.raises(TrustError):
        NodeCertificate.parse(data)


_AUTHORITY = RunAuthority.create(Identity.generate(), RUN, NOW)
