"""A simulated WAN link, for experiments on one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Limits of the link; 0: not limited. A node delays everything that it sends by half of `rtt_s`."""

    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rtt_s: float = 0.0

    @property
    def is_off(self) -> bool:
        return not (self.uplink_bytes_per_s or self.downlink_bytes_per_s or self.rtt_s)
