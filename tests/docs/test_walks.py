"""The lives of a rollout, a chunk, a plan and a field in ARCHITECTURE.md name functions that exist, and are as short as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOP = re.compile(r"^(\d+)\. `([\w/]+\.py):(?:(\w+)\.)?(\w+)` ", re.MULTILINE)
WALKS = {"rollout": 16, "chunk": 10, "plan": 9, "heartbeat's field": 4}


@pytest.mark.parametrize(("what", "count"), WALKS.items())
def test_a_walk_names_functions_that_exist(what: str, count: int) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walk = text.split(f"## Life of a {what}\n", 1)[1].split("\n## ", 1)[0]
    hops = HOP.findall(walk)
    assert [int(number) for number, *_ in hops] == list(range(1, count + 1))
    assert f"{count} hops" in walk
    for _, file, owner, name in hops:
        tree = ast.parse((ROOT / "echo2" / file).read_text())
        scopes = (
            [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner] if owner else [tree]
        )
        nodes = [node for scope in scopes for node in scope.body]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file} has no {owner}.{name}"
