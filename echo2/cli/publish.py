"""`echo2 publish`: hands a model folder, or the files behind a URL, to the fleet that `echo2 serve` serves."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener, urlopen

from echo2.base.errors import ConfigError, EchoError, Unreachable

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"  # as transformers writes them
_ANSWER_WITHIN_S = 600.0  # 70 billion parameters from a disk of 250 MB/s
_FETCH_WITHIN_S = 60.0  # of silence


def publish(args: argparse.Namespace, _: Sequence[str]) -> int:
    learner = args.run if (args.run / "gateway.url").exists() else args.run / "learner"
    try:
        url, key = (learner / "gateway.url").read_text().strip(), (learner / "gateway.key").read_text().strip()
    except OSError:
        raise ConfigError(f"--run: expected the folder of a run that echo2 serve serves, got {args.run}") from None
    with tempfile.TemporaryDirectory(dir=learner) as scratch:
        is_url = args.folder.lower().startswith(("http://", "https://"))
        folder = fetched(args.folder, Path(scratch)) if is_url else Path(args.folder).resolve()
        answer = handed_in(url, key, {"version": args.version, "folder": str(folder), "is_last": args.last})
    print(f"version {answer['newest_version']} is on its way to the fleet")
    return 0


def handed_in(url: str, key: str, body: dict[str, object]) -> dict[str, object]:
    """Posts `body` to the gateway at `url`; returns its answer. Raises `ConfigError` with what it refused."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        request = Request(f"{url}/v1/versions", json.dumps(body).encode(), headers)
        try:
            answer = build_opener(ProxyHandler({})).open(request, timeout=_ANSWER_WITHIN_S)
        except HTTPError as refusal:
            answer = refusal
        with answer:
            reply: dict[str, object] = json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        raise Unreachable(f"{url}: expected the gateway of echo2 serve there: {error}") from None
    if "error" in reply:
        refused = reply["error"]
        raise ConfigError(str(refused["message"] if isinstance(refused, dict) else refused))
    return reply


def fetched(url: str, scratch: Path) -> Path:
    """Fetches a model's config and tensors from `url` into `scratch`. Raises `Unreachable` for a file that is not there."""
    _fetch(url, "config.json", scratch)
    names = [_ONE_FILE]
    with suppress(EchoError, ValueError, LookupError, TypeError):  # a model in one file has no index, or a page there
        _fetch(url, _INDEX, scratch)
        names = sorted({Path(name).name for name in json.loads((scratch / _INDEX).read_text())["weight_map"].values()})
    for name in names:
        _fetch(url, name, scratch)
    return scratch


def _fetch(url: str, name: str, scratch: Path) -> None:
    address = f"{url.rstrip('/')}/{name}"
    try:
        with urlopen(address, timeout=_FETCH_WITHIN_S) as source, (scratch / name).open("wb") as file:
            shutil.copyfileobj(source, file)
    except (OSError, HTTPException, ValueError) as error:
        raise Unreachable(f"{address}: expected a file of the model: {error}") from None
