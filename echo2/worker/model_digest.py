"""The digest over config and tensor table with which a worker checks that it has the learner's model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from echo2.base.errors import VersionMismatch


def model_digest(config_json: bytes, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """SHA-256, in hex, of the transformers config and the published tensors' names, shapes and dtypes."""
    table = sorted([name, list(shape), dtype] for name, shape, dtype in tensors)
    return hashlib.sha256(config_json + json.dumps(table).encode()).hexdigest()


def check_model(expected: str, config_json: bytes, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
    """Raises VersionMismatch unless the received weights belong to the model that the learner announced (digest `expected`)."""
    found = model_digest(config_json, tensors)
    if found != expected:
        raise VersionMismatch(
            f"the learner's model: expected weights of digest {expected[:16]}, as it announced, those that came have "
            f"{found[:16]}: names, shapes or types of its tensors differ"
        )
