"""A data set by its path or by its id on the Hugging Face hub, as a folder of this machine.

Guarantees: what is in the hub's cache is taken as it stands, so that a run meets the same rows at every start; the hub is
asked only for what is not there, and not where HF_HUB_OFFLINE is 1. Leaves to others: reading the files (data_files).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from echo2.base.errors import TaskError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES = ["*.jsonl", "*.parquet", "*.arrow"]


def local_data_set(path: str) -> Path:
    """The file or folder at `path`; of a hub id, its folder in the cache, fetched if need be."""
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
    """What a process must see to read `folder`: files of the hub's cache are links into the folder above."""
    kept = folder.parent.parent
    return kept if folder.parent.name == "snapshots" and kept.name.startswith("datasets--") else folder


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()


def _cached(hub_id: str) -> Path | None:
    """The snapshot that `refs/main` names, else the newest."""
    folder = _cache() / f"datasets--{hub_id.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()).is_dir():
        return named
    return max(folder.glob("snapshots/*"), key=lambda snapshot: snapshot.stat().st_mtime, default=None)
