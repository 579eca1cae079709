"""One name for one idea: no class of the product shares its name with another."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.tidy.test_layout import PACKAGE, nodes_of, sources


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 500, "the classes of the product are read"
    assert not {name: where for name, where in places.items() if len(where) > 1}
