"""Identifiers, as distinct types so that mypy keeps them apart."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""libp2p peer ID of a node, base58 text (`12D3KooW…`)."""

RunId = NewType("RunId", str)
"""Names one training run; chosen by the coordinator's config."""

Version = NewType("Version", int)
"""A published policy, numbered by the step at which it was published; 0 is the base checkpoint."""

Step = NewType("Step", int)
"""Number of completed optimiser steps."""

GroupId = NewType("GroupId", str)
"""One prompt with its n rollouts."""

LeaseId = NewType("LeaseId", str)
"""One attempt by one worker at one group."""
