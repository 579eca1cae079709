"""When a certificate is renewed."""

from __future__ import annotations

import time

from echo2.base.ids import RunId
from echo2.trust.enrolment import renewal_due_unix_s
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request

DAY_S = 86_400.0


def test_a_certificate_of_thirty_days_is_renewed_with_ten_days_left() -> None:
    now = time.time()
    authority = RunAuthority.create(Identity.generate(), RunId("run"), now)
    issued = authority.issue(certificate_request(Identity.generate(), TlsKey.generate()), Role.WORKER, now)
    left_s = issued.not_after_unix_s - renewal_due_unix_s(issued)
    assert 9.5 * DAY_S < left_s < 10.5 * DAY_S
    assert renewal_due_unix_s(issued) > now
