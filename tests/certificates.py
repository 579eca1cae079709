"""Credentials as enrolment gives them."""

from echo2.outside import unix_now
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.tls import Credentials


def issued(
    authority: RunAuthority,
    role: Role = Role.WORKER,
    coordinator_address: str = "nowhere:1",
    *,
    identity: Identity | None = None,
    token_id: str = "",
) -> Credentials:
    """`identity` None: a new one; `token_id`: of the token that it was admitted with."""
    identity, key = identity or Identity.generate(), TlsKey.generate()
    certificate = authority.issue(certificate_request(identity, key), role, unix_now(), token_id=token_id)
    own = authority.identity.peer_id
    return Credentials(
        identity, key.to_pem(), certificate, authority.certificate_pem, authority.run_id, own, coordinator_address
    )
