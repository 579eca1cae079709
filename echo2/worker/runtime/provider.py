"""Reads the machine's price from a tag at the cloud's metadata service, if its renter set one.

Guarantees: never raises; a service that does not answer within `ANSWER_S` a request counts as having no tag. Leaves to others:
parsing the text (worker/price), preemption notices (runtime/preemption).
"""

from __future__ import annotations

from echo2.worker.price import PRICE_TAG
from echo2.worker.runtime.preemption import CLOUDS, NoticeSource, answer_of

TAGS = {
    "aws": f"http://169.254.169.254/latest/meta-data/tags/instance/{PRICE_TAG}",
    "gcp": f"http://metadata.google.internal/computeMetadata/v1/instance/attributes/{PRICE_TAG}",
}


def tagged_price(cloud: str) -> str | None:
    """The text of the machine's price tag; None if there is none or the cloud is not in `TAGS`."""
    if cloud not in TAGS:
        return None
    notice = CLOUDS[cloud]
    return answer_of(NoticeSource(TAGS[cloud], notice.headers, "", notice.token_url, notice.token_header))
