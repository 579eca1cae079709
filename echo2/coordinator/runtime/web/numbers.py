"""Numbers as JSON has them."""

from __future__ import annotations

import math


def finite(value: float | None, digits: int = 6) -> float | None:
    """JSON has no infinity; what is not finite is not known."""
    return round(value, digits) if value is not None and math.isfinite(value) else None
