"""Reads problems from local files: JSON lines, parquet, or a folder in Hugging Face layout.

Guarantees: rows come in a fixed order (files by name, rows in file order); a missing column, an empty cell or a broken line raises
a `TaskError` that names the file, the row and what was found. Leaves to others: downloading (hub_data); callers pass a local path.

Columns. The prompt is `prompt`, `problem` or `question`: text, or a chat as a list of {role, content}. The answer is
`answer`, `ground_truth`, `reward_model.ground_truth`, `final_answer` or `target`; if it is a worked answer that ends in `#### 42`,
only the part after the mark counts. `data_source` is kept if present.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import TaskError
from echo2.tasks.mathematics import MathRow
from echo2.tasks.task import ChatMessage, Prompt

PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "target")
SUFFIXES = (".jsonl", ".parquet", ".arrow")
ROWS_MAX = 5_000_000
LINE_BYTES_MAX = 16 << 20
FILES_MAX = 10_000
_WORKED_ANSWER_MARK = "####"
_NO_PYARROW = "{}: the package pyarrow is not installed ({})"

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Columns that the user names; empty: try the usual names."""

    prompt: str = ""
    answer: str = ""


def read_math_rows(
    path: Path, split: str = "train", columns: ColumnChoice | None = None, subset: str = ""
) -> list[MathRow]:
    """Reads all problems under `path`. In a folder, reads the files of `split`, and of `subset` if there are several."""
    choice = columns or ColumnChoice()
    rows: list[MathRow] = []
    for file in data_files(path, split, subset):
        for number, row in enumerate(_rows_of(file), start=1):
            rows.append(_math_row(row, f"{file.name} row {number}", choice))
            if len(rows) > ROWS_MAX:
                raise TaskError(f"data set {path}: expected at most {ROWS_MAX} rows, got more")
    if not rows:
        raise TaskError(f"data set {path}: expected rows, found none in split {split!r}")
    return rows


def data_files(path: Path, split: str, subset: str = "") -> list[Path]:
    """Returns the file itself, or the folder's files of `split` (`train-00000-of-00002.parquet`, `train/*.arrow`, ...)."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise TaskError(f"data set {path}: expected one of {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
        return [path]
    if not path.is_dir():
        raise TaskError(f"data set {path}: expected a file or folder, found nothing there")
    found = sorted(p for suffix in SUFFIXES for p in path.rglob(f"*{suffix}") if not p.name.startswith("cache-"))
    chosen = [p for p in found if split in _split_words(p.relative_to(path))]
    folders = sorted({folder for p in chosen if (folder := _subset_of(p.relative_to(path), split))})
    if subset:
        chosen = [p for p in chosen if subset in p.relative_to(path).parts[:-1]]
    elif len(folders) > 1:
        raise TaskError(f"data set {path}: expected the argument subset, one of {', '.join(folders)}")
    if not chosen or len(chosen) > FILES_MAX:
        names = ", ".join(str(p.relative_to(path)) for p in found[:8]) or "no data files"
        raise TaskError(f"data set {path}: expected 1 to {FILES_MAX} files of split {split!r}, found {names}")
    return chosen


def _subset_of(relative: Path, split: str) -> str:
    """Returns the folder of the data set's configuration, '' if none: `main/train-00000-of-00001.parquet` -> main."""
    own = [part for part in relative.parts[:-1] if part not in (split, "data")]
    return own[0] if own else ""


def _split_words(relative: Path) -> set[str]:
    """Returns the words that may name the split, the folders and the file name up to its first - . or _:
    `data/train-00000-of-00002.parquet` -> {data, train}."""
    stem = relative.name.replace("_", "-").replace(".", "-").split("-")[0]
    return {*relative.parts[:-1], stem}


def _rows_of(file: Path) -> Iterator[Row]:
    match file.suffix:
        case ".jsonl":
            return _json_lines(file)
        case ".parquet":
            return _parquet_rows(file)
        case _:
            return _arrow_rows(file)


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
            if len(line) > LINE_BYTES_MAX:
                raise TaskError(f"{file.name} line {number}: expected at most {LINE_BYTES_MAX} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TaskError(f"{file.name} line {number}: expected a JSON object, got {error}") from error
            if not isinstance(row, dict):
                raise TaskError(f"{file.name} line {number}: expected a JSON object, got {type(row).__name__}")
            yield row


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TaskError(_NO_PYARROW.format(file, error)) from error
    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _arrow_rows(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ipc
    except ImportError as error:
        raise TaskError(_NO_PYARROW.format(file, error)) from error
    with ipc.open_stream(str(file)) as reader:
        for batch in reader:
            yield from batch.to_pylist()


def _math_row(row: Row, where: str, choice: ColumnChoice) -> MathRow:
    prompt = _prompt(_cell(row, (choice.prompt,) if choice.prompt else PROMPT_COLUMNS, where), where)
    answer = str(_cell(row, (choice.answer,) if choice.answer else ANSWER_COLUMNS, where))
    if _WORKED_ANSWER_MARK in answer:
        answer = answer.rpartition(_WORKED_ANSWER_MARK)[2]
    return MathRow(prompt, answer.strip(), str(row.get("data_source") or ""))


def _cell(row: Row, names: tuple[str, ...], where: str) -> object:
    for name in names:
        value: object = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value not in ("", []):
            return value
    raise TaskError(f"{where}: expected a column {' or '.join(names)}, got {', '.join(map(str, row)) or 'none'}")


def _prompt(value: object, where: str) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        messages = [
            ChatMessage(str(m["role"]), str(m["content"]))
            for m in value
            if isinstance(m, Mapping) and "role" in m and "content" in m
        ]
        if messages and len(messages) == len(value):
            return tuple(messages)
    raise TaskError(f"{where}: expected a prompt as text or as a list of {{role, content}}, got {str(value)[:80]!r}")
