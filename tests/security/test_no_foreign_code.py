"""Nothing that comes from a peer is ever executed: by reading the sources, and by trying."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from echo2.base.errors import EchoError
from tests.fuzz_targets import TARGETS

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", sorted((ROOT / "echo2").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_load_no_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not MODULES & {alias.name.split(".")[0] for alias in node.names}, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS, f"line {node.lineno}: {node.func.id}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            assert ast.unparse(node.func.value) not in ("torch", "np", "numpy", "yaml"), f"line {node.lineno}"


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_pickle_sent_to_a_decoder_is_not_executed(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        with contextlib.suppress(EchoError, DecodeError):  # the second: gRPC refuses the message before we see it
            TARGETS[name].decode(pickle.dumps(Bomb(mark), protocol))
        assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works where it is unpickled"
