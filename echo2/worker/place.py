"""Finds a rented machine's provider and region from environment variables that the provider sets."""

from __future__ import annotations

import json
from collections.abc import Mapping

from echo2.worker.options import MachinePlace

CHARS_MAX = 64


def place_of(declared: MachinePlace, environment: Mapping[str, str]) -> MachinePlace:
    """The declared provider and region; what was not declared is filled in from the variables of RunPod, Vast.ai or SkyPilot.

    Each is printable and at most `CHARS_MAX` characters; empty: not known.
    """
    found = _found(environment)
    return MachinePlace(_line(declared.provider or found.provider), _line(declared.region or found.region))


def _found(environment: Mapping[str, str]) -> MachinePlace:
    if "RUNPOD_POD_ID" in environment:
        return MachinePlace("runpod", environment.get("RUNPOD_DC_ID", ""))
    if "VAST_CONTAINERLABEL" in environment:
        return MachinePlace("vast.ai")
    try:
        cluster = json.loads(environment.get("SKYPILOT_CLUSTER_INFO", "{}"))
    except ValueError:
        return MachinePlace()
    if not isinstance(cluster, dict):
        return MachinePlace()
    return MachinePlace(str(cluster.get("cloud") or "").lower(), str(cluster.get("region") or ""))


def _line(text: str) -> str:
    return "".join(c for c in text[:CHARS_MAX] if c.isprintable())
