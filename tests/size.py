"""How large the repository is: `python -m tests.size [--json]` or `make size`.

Lines are physical lines of Python, blank ones and comments included, without generated code. A module constant is an
upper-case name bound at a module's top level; it has a reason where a comment stands on its lines or on the line above, or a
docstring under it. Of those without one, numbers are told apart: somebody has chosen them.
"""

import ast
import json
import re
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from echo2.config.load import option_names

ROOT = Path(__file__).resolve().parent.parent
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")


def python_files(folder: Path) -> list[Path]:
    """Python files under `folder`, without generated code."""
    return sorted(path for path in folder.rglob("*.py") if not {"gen", "__pycache__"} & set(path.parts))


def line_count(paths: list[Path]) -> int:
    """Physical lines of `paths` together."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


class Constants(NamedTuple):
    """Module constants of a file: how many, how many without a reason, and how many of those are numbers."""

    count: int = 0
    bare: int = 0
    bare_numbers: int = 0


def _names(node: ast.Assign | ast.AnnAssign) -> int:
    """Upper-case names that a statement binds; `A, B = 1, 2` binds two."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return sum(isinstance(part, ast.Name) and bool(CONSTANT.match(part.id)) for part in flat)


def _is_number(value: ast.expr | None) -> bool:
    """Made of numbers alone, so that somebody has chosen it: `1 << 20`, `2.5`, `(8, 16)`."""
    leaves = [
        part for part in ast.walk(value or ast.Constant("")) if isinstance(part, (ast.Constant, ast.Name, ast.Call))
    ]
    return all(isinstance(leaf, ast.Constant) and isinstance(leaf.value, (int, float)) for leaf in leaves)


def constants(source: str) -> Constants:
    """A constant has a reason where a comment stands on its lines or on the line above, or a docstring under it. Type variables
    and aliases are no constants."""
    lines, body = source.splitlines(), ast.parse(source).body
    count = bare = numbers = 0
    for node, after in zip_longest(body, body[1:]):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not _names(node):
            continue
        if re.match(r"(TypeVar|NewType|\w+\.NDArray)\b", ast.unparse(node.value or node)):
            continue
        own = lines[node.lineno - 1 : node.end_lineno]
        has_reason = (
            (node.lineno > 1 and lines[node.lineno - 2].startswith("#"))
            or any("  # " in line for line in own)
            or (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
        )
        count += _names(node)
        bare += 0 if has_reason else _names(node)
        numbers += _names(node) if not has_reason and _is_number(node.value) else 0
    return Constants(count, bare, numbers)


def word_count() -> dict[str, int]:
    """Words of what people read: pages under docs/, DESIGN pages, README files and the changelog; reference pages apart."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("echo2/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
    pages += ROOT.glob("benchmarks/*.md")
    made = [page for page in pages if "reference" in page.parts]
    return {
        "written": sum(len(page.read_text("utf-8").split()) for page in pages if page not in made),
        "generated reference": sum(len(page.read_text("utf-8").split()) for page in made),
    }


def measure() -> dict[str, object]:
    """Every figure by name, in the order in which they are printed."""
    product = python_files(ROOT / "echo2")
    sources = [path.read_text("utf-8") for path in product]
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in product)
    largest, largest_count = folders.most_common(1)[0]
    counted = [constants(source) for source in sources]
    words = word_count()
    return {
        "product lines": line_count(product),
        "product files": len(product),
        "files in the largest folder": largest_count,
        "largest folder": largest,
        "folders above 25 files": sum(count > 25 for count in folders.values()),
        "classes": sum(isinstance(node, ast.ClassDef) for source in sources for node in ast.walk(ast.parse(source))),
        "options": len(option_names()),
        "module constants": sum(found.count for found in counted),
        "module constants without a reason": sum(found.bare for found in counted),
        "of these, numbers": sum(found.bare_numbers for found in counted),
        "test lines": line_count(python_files(ROOT / "tests")),
        "test files": len(python_files(ROOT / "tests")),
        "benchmark lines": line_count(python_files(ROOT / "benchmarks")),
        "words in pages": words["written"],
        "words in generated reference": words["generated reference"],
    }


def main() -> None:
    """Prints the figures, one a line; with `--json` as an object."""
    figures = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:36}{value:>12,}" if isinstance(value, int) else f"{name:36}{value:>12}")


if __name__ == "__main__":
    main()
