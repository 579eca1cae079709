"""Reads problems from local files: JSON lines or a JSON array, by gzip too, parquet, or a folder in Hugging Face layout.

Guarantees: rows come in a fixed order (files by name, rows in file order); a missing column, an empty cell or a broken line raises
a `TaskError` that names the file, the row and what was found; a prompt that comes again, in other spaces or capitals too, is left
out, so that no problem is both held out and trained on.

Columns. The prompt is `prompt`, `problem` or `question`: text, or a chat as a list of {role, content}, where content is text or
parts of type text. The answer is `answer`, `ground_truth`, `reward_model.ground_truth`, `final_answer`, `expected_answer` or
`target`; if it is a worked answer that ends in `#### 42`, only the part after the mark counts. `data_source` is kept if present.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import BufferedIOBase
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from echo2.base.errors import TaskError
from echo2.tasks.mathematics import MathRow
from echo2.tasks.task import ChatMessage, Prompt

PROMPT_COLUMNS = ("prompt", "problem", "question")  # names in common data sets, most specific first
# As above; `reward_model.ground_truth` is verl's.
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer", "target")
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")  # the hub's, `save_to_disk`'s, text
ROWS_MAX = 5_000_000  # some GB as Python objects: the learner keeps all rows
SHOWN_BYTES = 60  # of a line that cannot be read
LINE_BYTES_MAX = 16 << 20  # a prompt of a million tokens, four times
ARRAY_BYTES_MAX = 1 << 30  # it is read whole, which takes ten times as much memory
ROWS = 1024  # of parquet, in memory at a time, where a row may be a chat of a megabyte
FILES_MAX = 10_000  # a folder with more is not a split of one data set
LINKS_SHOWN_MAX = 1024  # each is a mount and three words of bubblewrap's 9,000
# What a folder says about itself.
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}  # the hub's names, and short ones
_WORKED_ANSWER_MARK = "####"  # GSM8K's format
# A chat written by JSON or by Python; a list of other things may be an answer.
_CHAT_AS_TEXT = re.compile(
    r"""\[\s*\{(?=.*['"]role['"]\s*:\s*['"](system|user|assistant|tool)['"])\s*['"](role|content)['"]\s*:""", re.DOTALL
)

_SHOWN_APART = ("images", "image", "videos", "video", "audio")  # what no prompt shows to a language model

CHAT_COLUMNS = ("messages", "conversations", "conversation")  # names in common data sets
# Of a table; other columns may be large, or hold what Python cannot.
_READ = (
    *PROMPT_COLUMNS, *ANSWER_COLUMNS, "data_source", *_SHOWN_APART, *CHAT_COLUMNS, "completion", "system", "tools",
)  # fmt: skip

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^/]*)")  # Hugging Face's name of a part
Row = Mapping[str, object]
_log = logging.getLogger("echo2.tasks")


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
    rows: dict[bytes, MathRow] = {}
    repeated = contrary = 0
    for row, where in _rows_under(path, split, subset, choice):
        read = _math_row(row, where, choice)
        words = " ".join(str(read.prompt).split())
        key = _digest(words.casefold())
        like = rows.get(key, read)
        is_other = like.answer != read.answer and " ".join(str(like.prompt).split()) != words  # X beside x
        first = rows.setdefault(_digest(words) if is_other else key, read)
        repeated += first is not read
        contrary += first.answer != read.answer
    if repeated:
        _log.warning(
            "data set %s: %d of %d rows repeat an earlier prompt and are left out, %d of them with another answer",
            path, repeated, repeated + len(rows), contrary,
        )  # fmt: skip
    return list(rows.values())


def _rows_under(
    path: Path, split: str, subset: str = "", choice: ColumnChoice | None = None
) -> Iterator[tuple[Row, str]]:
    """Yields the rows of all files with their places, for messages. TaskError if there is none, or there are too many."""
    count, columns = 0, {*_READ, *((choice.prompt, choice.answer) if choice else ())}
    try:
        for file in data_files(path, split, subset):
            for number, row in enumerate(_rows_of(file, columns), start=1):
                count += 1
                if count > ROWS_MAX:
                    raise TaskError(f"data set {path}: expected at most {ROWS_MAX} rows, got more")
                yield row, f"{file.name} row {number}"
    except OSError as error:  # one may not read it, a link leads nowhere
        raise TaskError(f"data set {path}: expected files that can be read, got: {error}") from None
    if not count:
        raise TaskError(f"data set {path}: expected rows, found none in split {split!r}")


def data_files(path: Path, split: str, subset: str = "") -> list[Path]:
    """Returns the file itself, or the folder's files of `split` (`train-00000-of-00002.parquet`, `train/*.arrow`, ...)."""
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise TaskError(f"data set {path}: expected one of {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
        return [path]
    if not path.is_dir():
        raise TaskError(f"data set {path}: expected a file or folder, found nothing there")
    files = sorted(p for suffix in SUFFIXES for p in path.rglob(f"*{suffix}") if not p.name.startswith("cache-"))
    hidden = {p for p in files if any(part.startswith(".") for part in p.relative_to(path).parts)}  # an editor's copies
    files = [p for p in files if p.name not in _ABOUT and p not in hidden]
    chosen = [p for p in files if split in _split_words(p.relative_to(path))]
    if not chosen and len(files) == 1 and not _SPLITS & _split_words(files[0].relative_to(path)):
        chosen = files  # the only file, whose name speaks of no split
    # The folder of a configuration: `main/train-00000-of-00001.parquet` -> main.
    above = ([part for part in p.relative_to(path).parts[:-1] if part not in (split, "data")] for p in chosen)
    folders = sorted({folder[0] for folder in above if folder})
    of_subset = [p for p in chosen if subset in p.relative_to(path).parts[:-1]] if subset else chosen
    if folders and (not of_subset or (len(folders) > 1 and not subset)):
        raise TaskError(
            f"data set {path}: expected the argument subset to be one of {', '.join(folders)}, got {subset or 'none'}"
        )
    chosen = of_subset
    if not chosen or len(chosen) > FILES_MAX:
        names = ", ".join(str(p.relative_to(path)) for p in files[:8]) or f"none that ends in {', '.join(SUFFIXES)}"
        raise TaskError(
            f"data set {path}: expected 1 to {FILES_MAX} files of split {split!r}, found {names}; the argument split names another"
        )
    shards: dict[tuple[str, int], set[int]] = {}
    for at in filter(None, (_SHARD.fullmatch(p.relative_to(path).as_posix()) for p in chosen)):
        shards.setdefault((f"{at[1]}-…-of-{at[3]}{at[4]}", int(at[3])), set()).add(int(at[2]))
    for (name, count), numbers in shards.items():
        if missing := sorted({number + (count in numbers) for number in range(count)} - numbers):  # some count from 1
            lost = ", ".join(map(str, missing[:8]))
            _log.warning(
                "data set %s: %d of %d parts of %s are there, without %s", path, len(numbers), count, name, lost
            )
    return chosen


def _split_words(relative: Path) -> set[str]:
    """Returns the words that may name the split, the folders and the file name up to its first - . or _:
    `data/train-00000-of-00002.parquet` -> {data, train}."""
    stem = relative.name.replace("_", "-").replace(".", "-").split("-")[0]
    return {*relative.parts[:-1], stem}


def _rows_of(file: Path, columns: Collection[str]) -> Iterator[Row]:
    with file.open("rb") as stream:
        start = stream.read(1 << 10)
    if start.startswith(b"version https://git-lfs."):
        raise TaskError(
            f"data file {file}: expected its content, got the pointer that Git LFS leaves in its place; `git lfs pull`"
        )
    return _columnar_rows(file, start, columns) if file.suffix in (".parquet", ".arrow") else _json_rows(file, start)


def _json_rows(file: Path, start: bytes) -> Iterator[Row]:
    """The rows of JSON lines or of one array, whatever the file is called; compressed or not."""
    try:
        with gzip.open(file) if start.startswith(b"\x1f\x8b") else file.open("rb") as stream:
            is_array = stream.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            stream.seek(0)
            yield from (_array_rows if is_array else _json_lines)(file, stream)
    except (EOFError, OSError, zlib.error) as error:
        raise TaskError(f"data file {file}: expected it whole, got: {error}") from error


def _json_lines(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
        if len(line) > LINE_BYTES_MAX:
            raise TaskError(f"{file.name} line {number}: expected at most {LINE_BYTES_MAX} bytes")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            text = line[:SHOWN_BYTES].decode(errors="replace")
            raise TaskError(
                f"{file.name} line {number}: expected a JSON object in one line of UTF-8, got {text!r}: {error}"
            ) from error
        yield _object(row, f"{file.name} line {number}")


def _array_rows(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    text = stream.read(ARRAY_BYTES_MAX + 1)
    if len(text) > ARRAY_BYTES_MAX:
        raise TaskError(f"{file.name}: expected an array of at most {ARRAY_BYTES_MAX} bytes; write it as JSON lines")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file.name}: expected a JSON array of objects, got {error}") from error
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{file.name} row {number}")


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _digest(words: str) -> bytes:
    """Kept instead of the words: millions of prompts are in memory once already."""
    return hashlib.blake2b(words.encode(), digest_size=16).digest()


def _columnar_rows(file: Path, start: bytes, columns: Collection[str]) -> Iterator[Row]:
    """The rows with what `columns` hold; of others, they have the names."""
    try:
        from pyarrow import ArrowException, ipc, parquet
    except ImportError as error:
        raise TaskError(f"{file}: the package pyarrow is not installed ({error})") from error
    known = {part for column in columns for part in (column, column.split(".")[0])}

    def rows(names: Sequence[str], batches: Callable[[list[str]], Iterable[Any]]) -> Iterator[Row]:
        nothing, read = dict.fromkeys(names), [name for name in names if name in known]
        for batch in batches(read or list(names)):
            yield from (nothing | row for row in batch.to_pylist())

    try:
        if file.suffix == ".parquet":
            table = parquet.ParquetFile(file)
            yield from rows(table.schema_arrow.names, lambda read: table.iter_batches(ROWS, columns=read))
            return
        is_file = start.startswith(b"ARROW1")  # what pyarrow and pandas write; datasets writes streams
        with (ipc.open_file if is_file else ipc.open_stream)(str(file)) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield from rows(reader.schema.names, lambda read: (batch.select(read) for batch in batches))
    except (ArrowException, OSError, ValueError, KeyError) as error:  # or a text or time that Python has no object for
        text = f"expected whole {file.suffix[1:]} with values that Python can hold"
        raise TaskError(f"data file {file}: {text}, got {type(error).__name__}: {error}") from error


def _math_row(row: Row, where: str, choice: ColumnChoice) -> MathRow:
    if apart := [name for name in _SHOWN_APART if row.get(name)]:
        raise TaskError(f"{where}: expected a prompt of text alone, got a column {apart[0]} beside it")
    prompt = _prompt(_cell(row, choice.prompt, PROMPT_COLUMNS, "prompt_column", where), where)
    answer = _answer(_cell(row, choice.answer, ANSWER_COLUMNS, "answer_column", where), where)
    if _WORKED_ANSWER_MARK in answer:
        answer = answer.rpartition(_WORKED_ANSWER_MARK)[2]
        if not answer.strip():
            raise TaskError(f"{where}: expected the answer after {_WORKED_ANSWER_MARK}, found none")
    return MathRow(prompt, answer.strip(), str(row.get("data_source") or ""), where)


def _cell(row: Row, chosen: str, usual: tuple[str, ...], argument: str, where: str) -> object:
    names = (chosen,) if chosen else usual
    for name in names:
        value: object = row
        for part in [name] if name in row else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != [] and not (isinstance(value, str) and not value.strip()):
            return value
    raise TaskError(
        f"{where}: expected a column {' or '.join(names)} with something in it, got {', '.join(map(str, row)) or 'none'}; "
        f"the argument {argument} names another"
    )


def _answer(value: object, where: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        return _answer(value[0], where)
    if isinstance(value, str):
        return _text(value, where)
    if (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float | Decimal) and isfinite(value)
    ):
        return str(value)
    raise TaskError(
        f"{where}: expected one answer as text or number, got {value!r:.80}; write several as one text, such as $3, -3$"
    )


def _prompt(value: object, where: str) -> Prompt:
    if isinstance(value, str):
        return _text(value, where)
    messages = _messages(value, "", f"{where} prompt")
    if messages[-1].role == "assistant":
        raise TaskError(f"{where}: expected a prompt to be answered, got one that ends with the assistant's message")
    return messages


def _text(value: str, where: str) -> str:
    """The text, unless no tokenizer could read it, or it is a chat that was written as text."""
    if _CHAT_AS_TEXT.match(value) or (not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise TaskError(
            f"{where}: expected text of whole characters, or a chat as a list instead of text, got {value[:80]!r}"
        )
    return value


def _content(value: object, where: str) -> str:
    """A message's text, whole or in parts."""
    if isinstance(value, str):
        return _text(value, where)
    parts = value if isinstance(value, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if texts and len(texts) == len(parts):
        return _text("".join(texts), where)
    raise TaskError(f"{where}: expected a message's content as text, or as parts of type text, got {str(value)[:80]!r}")


# ---- conversations

# Who speaks, in ShareGPT's words too.
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"human": "user", "gpt": "assistant"}
# Fields in which others keep a part of what the model writes.
_WRITTEN_APART = ("tool_calls", "reasoning_content", "thinking")

Conversation = tuple[ChatMessage, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """Reads the conversations under `path`, each once: chats in a column of `CHAT_COLUMNS`, or a `prompt` with its `completion`, as
    texts or chats. Raises `TaskError` with row and column for one that cannot be trained on."""
    return list(dict.fromkeys(_conversation(row, where) for row, where in _rows_under(path, "train")))


def _conversation(row: Row, where: str) -> Conversation:
    column = next((name for name in CHAT_COLUMNS if row.get(name)), "completion")
    if apart := [name for name in ("system", "tools") if str(row.get(name) or "[]").strip() not in ("", "[]")]:
        raise TaskError(f"{where} column {column}: expected it to say everything, got a column {apart[0]} beside it")
    if column != "completion":
        messages = _messages(row[column], "", f"{where} column {column}")
    elif row.get("prompt") and row.get("completion"):
        asked = _messages(row["prompt"], "user", f"{where} column prompt")
        messages = (*asked, *_messages(row["completion"], "assistant", f"{where} column completion"))
    else:
        raise TaskError(
            f"{where}: expected a column {', '.join(CHAT_COLUMNS)}, or prompt and completion, with something in it, got "
            f"{', '.join(map(str, row)) or 'none'}"
        )
    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not turns or turns[0] == 0 or any(after == before + 1 for before, after in pairwise(turns)):
        raise TaskError(
            f"{where} column {column}: expected turns of the assistant, each after another role's message, got the roles "
            f"{', '.join(message.role for message in messages)[:80]}"
        )
    return messages[: turns[-1] + 1]


def _messages(value: object, role: str, where: str) -> Conversation:
    """`role`: whose message a bare text is; empty: it is refused."""
    if isinstance(value, str) and role:
        return (ChatMessage(role, value),)
    if not isinstance(value, list) or not value:
        raise TaskError(f"{where}: expected text or a list of {{role, content}}, got {str(value)[:80]!r}")
    return tuple(_message(item, f"{where} message {number}") for number, item in enumerate(value, start=1))


def _message(value: object, where: str) -> ChatMessage:
    fields = value if isinstance(value, Mapping) else {}
    role = _ROLES.get(str(fields.get("role") or fields.get("from") or ""))
    if role is None:
        raise TaskError(f"{where}: expected a role among {', '.join(_ROLES)}, got {str(value)[:80]!r}")
    if apart := [name for name in _WRITTEN_APART if fields.get(name)]:
        raise TaskError(
            f"{where}: expected calls of tools and thoughts in the content, as the model writes them, got {apart[0]} beside it"
        )
    content = _content(fields.get("value") if (said := fields.get("content")) is None else said, where)
    if role == "assistant" and not content.strip():
        raise TaskError(f"{where}: expected something that the assistant says, got an empty content")
    return ChatMessage(role, content)


_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")  # OWNER/NAME
_FILES = [f"*{suffix}" for suffix in SUFFIXES]  # nothing else of a repository is fetched


def local_data_set(path: str) -> Path:
    """Returns the file or folder at `path`; for a hub ID, its folder in the cache, downloaded if missing. Raises `TaskError` if the
    download fails or is not allowed."""
    local = Path(os.path.expanduser(path))  # noqa: PTH111 - which leaves ~nobody as it is
    if not _HUB_ID.fullmatch(path) or local.exists():
        return local
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, path, repo_type="dataset", allow_patterns=_FILES, cache_dir=_cache())
    lacks = "found neither"
    try:
        return Path(fetch(local_files_only=True))
    except FileNotFoundError as error:
        snapshots = _cache() / f"datasets--{path.replace('/', '--')}" / "snapshots"
        if part := getattr(error, "snapshot_path", ""):  # of a download that was broken off: it goes on below
            lacks = f"got: {error} Or name the folder {part}, if what it has is enough"
        elif fetched_by_commit := max(snapshots.glob("*"), key=lambda snapshot: snapshot.stat().st_mtime, default=None):
            return fetched_by_commit
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise TaskError(
            f"data set {path}: expected a folder or one in the hub's cache {_cache()}, {lacks} (HF_HUB_OFFLINE is 1)"
        )
    try:
        return Path(fetch())
    except Exception as error:  # noqa: BLE001  the hub's client raises whatever its transport does
        raise TaskError(f"data set {path}: no such folder here, and not to be had from the hub: {error}") from None


def paths_to_show(data: Path) -> list[Path]:
    """Returns what a contained process must see to read `data`, whose files may be links: to `blobs` beside `snapshots` in the
    hub's cache, or to anywhere."""
    cached = data.parent.parent
    if data.parent.name == "snapshots" and cached.name.startswith("datasets--"):
        return [cached]
    links = (path.resolve() for path in data.rglob("*") if path.is_symlink() and path.exists())
    return [data, *islice(links, LINKS_SHOWN_MAX)]


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
