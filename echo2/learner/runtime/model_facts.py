"""What workers learn about a model: its configuration, its digest, the tokens that end a completion.

Guarantees: the same bytes whether this project's trainer (model) or the user's (lent_trainer) holds the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def config_json_of(config: Any, more: Mapping[str, object] | None = None) -> bytes:
    """A transformers config as canonical JSON: sorted keys, no whitespace, without path and transformers version."""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return json.dumps({**fields, **(more or {})}, sort_keys=True, separators=(",", ":"), default=str).encode()


def digest_of(config_json: bytes, table: Iterable[tuple[str, Sequence[int]]], dtype: str) -> str:
    """sha256 over the config and the table of published tensors: names, shapes and their common dtype."""
    rows = sorted([name, list(shape), dtype] for name, shape in table)
    return hashlib.sha256(config_json + json.dumps(rows).encode()).hexdigest()


def stop_tokens_of(generation_config: Any, config: Any) -> tuple[int, ...]:
    """Tokens that end a completion: from the generation config, or from the model's config if that names none."""
    ends = getattr(generation_config, "eos_token_id", None)
    ends = ends if ends is not None else getattr(config, "eos_token_id", None)
    listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return tuple(int(token) for token in listed)
