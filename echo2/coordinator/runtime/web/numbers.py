"""Numbers that JSON can represent."""

from __future__ import annotations

import math


def finite(value: float | None, digits: int = 6) -> float | None:
    """The rounded value; None (unknown) if it is not finite, because JSON has no infinity."""
    return round(value, digits) if value is not None and math.isfinite(value) else None
