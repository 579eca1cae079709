"""Identifiers, as distinct types so that mypy keeps them apart."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)  # libp2p peer ID of a node, base58 text (`12D3KooW…`)

RunId = NewType("RunId", str)  # names one training run; chosen by the coordinator's config

Version = NewType("Version", int)
"""A published policy, numbered by the step at which it was published; 0 is the base checkpoint."""

Step = NewType("Step", int)  # number of completed optimiser steps

GroupId = NewType("GroupId", str)  # one prompt with its n rollouts

LeaseId = NewType("LeaseId", str)  # one attempt by one worker at one group


def warm_groups(group_id: GroupId) -> tuple[GroupId, ...]:
    """The groups whose tokens the prompt of a later turn `GROUP.INDEX.TURN` extends, nearest first; empty for a first turn."""
    root, *rest = group_id.split(".")
    if len(rest) != 2 or not rest[1].isdigit():
        return ()
    turn = int(rest[1])
    before = [GroupId(f"{root}.{rest[0]}.{turn - 1}")] if turn > 1 else []
    return (*before, GroupId(root))
