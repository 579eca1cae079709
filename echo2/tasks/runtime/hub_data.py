"""Finds a data set by its path or Hugging Face hub ID, as a local file or folder.

Guarantees: a copy in the hub's cache is used as it is, so that a run gets the same rows at every start; the hub is asked only for
data sets not in the cache, and never if HF_HUB_OFFLINE is 1. Leaves to others: reading the files (data_files).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from echo2.base.errors import TaskError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES = ["*.jsonl", "*.parquet", "*.arrow"]


def local_data_set(path: str) -> Path:
    """Returns the file or folder at `path`; for a hub ID, its folder in the cache, downloaded if missing. Raises `TaskError` if the
    download fails or is not allowed."""
    local = Path(path).expanduser()
    if local.exists() or not _HUB_ID.fullmatch(path):
        return local
    cached = _cached(path)
    if cached is not None:
        return cached
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise TaskError(
            f"data set {path}: expected a folder or one in the hub's cache {_cache()}, found neither (HF_HUB_OFFLINE is 1)"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=_FILES))
    except Exception as error:  # noqa: BLE001  the hub's client raises whatever its transport does
        raise TaskError(f"data set {path}: no such folder here, and not to be had from the hub: {error}") from None


def folder_to_show(folder: Path) -> Path:
    """Returns the folder that a contained process must see to read `folder`: files in the hub's cache are links to `blobs` beside
    `snapshots`."""
    kept = folder.parent.parent
    return kept if folder.parent.name == "snapshots" and kept.name.startswith("datasets--") else folder


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()


def _cached(hub_id: str) -> Path | None:
    """Returns the cached snapshot that `refs/main` names, else the newest one, else None."""
    folder = _cache() / f"datasets--{hub_id.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()).is_dir():
        return named
    return max(folder.glob("snapshots/*"), key=lambda snapshot: snapshot.stat().st_mtime, default=None)
