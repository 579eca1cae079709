"""What a cloud's metadata service says of this machine beside its end: the price that its renter tagged it with.

Guarantees: never an error; a service that does not answer says nothing, within `ANSWER_S`. Leaves to others: what to do
with the text (worker/price), the notice of preemption (runtime/preemption).
"""

from __future__ import annotations

from echo2.worker.price import PRICE_TAG
from echo2.worker.runtime.preemption import CLOUDS, NoticeSource, answer_of

TAGS = {
    "aws": f"http://169.254.169.254/latest/meta-data/tags/instance/{PRICE_TAG}",
    "gcp": f"http://metadata.google.internal/computeMetadata/v1/instance/attributes/{PRICE_TAG}",
}


def tagged_price(cloud: str) -> str | None:
    """The text of the machine's price tag; None where there is none, or the cloud keeps no such tags."""
    if cloud not in TAGS:
        return None
    notice = CLOUDS[cloud]
    return answer_of(NoticeSource(TAGS[cloud], notice.headers, "", notice.token_url, notice.token_header))
