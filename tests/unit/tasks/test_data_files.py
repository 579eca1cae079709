"""Data files: the usual columns in every layout, and errors that name the file, the row and what was found."""

import codecs
import gzip
import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

from echo2.base.errors import TaskError
from echo2.tasks import data_files
from echo2.tasks.data_files import ColumnChoice, local_data_set, paths_to_show, read_math_rows
from echo2.tasks.task import ChatMessage

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
ROWS = [
    {"prompt": "1+1?", "answer": "2", "data_source": "sums"},
    {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "sums"},
    {"question": "3+3?", "answer": "three and three\n#### 6"},
]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_content_in_parts_lists_of_one_answer_and_lists_as_text_are_read_as_what_they_mean(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How much "}, {"type": "text", "text": "is 2+2?"}]
    exported = [{"content": None, "from": "human", "value": "2+2?"}]  # one schema for two layouts
    rows: list[dict[str, object]] = [
        {"prompt": [{"from": "human", "value": "1+1?"}], "answer": 2},
        {"prompt": [{"role": "user", "content": parts}], "expected_answer": ["$4$"]},
        {"prompt": "10^400?", "answer": 10**400},  # beyond any float
        {"prompt": exported, "answer": "4"},
    ]
    no_chats = ['[{"role": "admin", "name": "x"}]', '[{"content": [1, 2]}]', "[{'role': 'user"]
    rows += [{"prompt": f"{text}?", "answer": text} for text in no_chats]
    read = [*map(read_math_rows, (write_jsonl(tmp_path / f"{at}.jsonl", [row]) for at, row in enumerate(rows)))]
    assert [row.answer for (row,) in read] == ["2", "$4$", "1" + "0" * 400, "4", *no_chats]
    asked = ["1+1?", "How much is 2+2?", "2+2?"]
    assert [row.prompt for (row,) in read if type(row.prompt) is tuple] == [
        (ChatMessage("user", one),) for one in asked
    ]


LINES, ARRAY = "".join(json.dumps(row) + "\n" for row in ROWS).encode(), json.dumps(ROWS, indent=1).encode()


@pytest.mark.parametrize("content", [LINES, LINES.replace(b"\n", b"\r\n"), ARRAY], ids=["lines", "CRLF", "array"])
@pytest.mark.parametrize("ending", ["x.jsonl", "x.json", "x.jsonl.gz", "folder/train.json.gz"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "BOM"])
def test_text_is_read_however_it_was_written(tmp_path: Path, content: bytes, ending: str, mark: bytes) -> None:
    file = tmp_path / ending
    file.parent.mkdir(exist_ok=True)
    packed: Callable[[bytes], bytes] = gzip.compress if ending.endswith("gz") else bytes
    file.write_bytes(packed(mark + content))
    rows = read_math_rows(file if file.parent == tmp_path else file.parent)
    assert [row.answer for row in rows] == ["2", "4", "6"]
    assert rows[1].prompt == (ChatMessage("system", "Be brief."), ChatMessage("user", "2+2?"))
    assert [row.data_source for row in rows] == ["sums", "sums", ""]


def test_a_lone_file_is_read_the_users_columns_come_first_and_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    (tmp_path / "tables").mkdir()
    for csv in ("x.csv", "tables/train.csv"):
        (tmp_path / csv).write_text("a,b\n")
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "train.jsonl").symlink_to(tmp_path / "blob")
    lone = write_jsonl(
        tmp_path / "lone" / "problems.jsonl", [{"prompt": "no", "q": "yes", "answer": " ", "a": "2"}]
    ).parent
    for path, said, split in (
        ("half.jsonl.gz", r"half\.jsonl\.gz: expected it whole", "train"), ("x.csv", "got .csv", "train"),
        ("tables", "found none that ends in .jsonl, ", "train"),
        ("set", r"files of split 'test', found train.jsonl", "test"), ("nowhere", "found nothing there", "train"),
        ("lone", "the argument answer_column names another", "train"),
        ("gone", r"gone: expected files that can be read, got: .*train\.jsonl", "train"),
        ("x" * 300, "expected files that can be read, got: .* too long", "train"),
    ):  # fmt: skip
        with pytest.raises(TaskError, match=said):
            read_math_rows(tmp_path / path, split)
    flat = write_jsonl(tmp_path / "flat.jsonl", [{"prompt": "1+1?", "reward_model.ground_truth": "2"}])
    assert [row.answer for row in read_math_rows(flat)] == ["2"], "a column with a point in its name"
    (row,) = read_math_rows(lone, columns=ColumnChoice("q", "a"))
    assert (row.prompt, row.answer) == ("yes", "2")


def test_a_problem_that_comes_again_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[dict[str, object]] = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(12)]
    spaced: list[dict[str, object]] = [{**row, "question": f" {row['question']}\n", "answer": "?"} for row in rows]
    names: list[dict[str, object]] = [{"question": f"{one[0]} / x?", "answer": one[1]} for one in ("x1", "X2", "X2")]
    names += [{"question": name, "answer": "7"} for name in ("Name?", "NAME?")]
    read = read_math_rows(write_jsonl(tmp_path / "x.jsonl", rows * 19 + spaced + names))
    expected = [row["question"] for row in (*rows, *names[:2], names[3])]
    assert [row.prompt for row in read] == expected, "X with another answer is another than x; with the same, it is not"
    assert "230 of 245 rows repeat an earlier prompt and are left out, 12 of them with another answer" in caplog.text


def test_parquet_and_arrow_folders_in_hugging_face_layout_give_the_split_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = arrow.Table.from_pylist([{"problem": "1+1?", "answer": "2"}, {"problem": "2+2?", "answer": "4"}])
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for split, part in (("train", table), ("test", table.slice(0, 1))):
        parquet.write_table(part, tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    write_jsonl(tmp_path / "hub" / "data" / ".ipynb_checkpoints" / "train-checkpoint.jsonl", ROWS)
    assert len(read_math_rows(tmp_path / "hub")) == 2
    assert len(read_math_rows(tmp_path / "hub", "test")) == 1
    parts = [write_jsonl(tmp_path / "parts" / f"train-0000{part}-of-00003.jsonl", ROWS) for part in (1, 2, 3)]
    assert len(read_math_rows(tmp_path / "parts")) == len(ROWS), "some count from 1"
    parts[2].unlink()
    with caplog.at_level(logging.WARNING):
        assert len(read_math_rows(tmp_path / "parts")) == len(ROWS)
    assert re.search("parts: 2 of 3 parts of train-.*-of-00003.jsonl are there, without 0", caplog.text)
    (tmp_path / "saved" / "train").mkdir(parents=True)
    with ipc.new_stream(str(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert [row.answer for row in read_math_rows(tmp_path / "saved")] == ["2", "4"]
    with ipc.new_file(str(tmp_path / "pandas.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert [row.answer for row in read_math_rows(tmp_path / "pandas.arrow")] == ["2", "4"]
    parquet.write_table(arrow.Table.from_pylist([{"problem": "x" * 10_000}] * 4096), tmp_path / "long.parquet")
    odd = arrow.table({"problem": ["1+1?"], "answer": arrow.array([Decimal("2.50")])})
    parquet.write_table(odd, tmp_path / "odd.parquet")
    assert [row.answer for row in read_math_rows(tmp_path / "odd.parquet")] == ["2.50"]
    zoned = odd.append_column("made", arrow.array([1], arrow.timestamp("s", "Europe/Nowhere")))
    parquet.write_table(zoned, tmp_path / "odd.parquet")
    with ipc.new_file(str(tmp_path / "odd.arrow"), zoned.schema) as writer:
        writer.write_table(zoned)
    for file in (tmp_path / "odd.parquet", tmp_path / "odd.arrow"):
        assert len(read_math_rows(file)) == 1, "a column that is not read may hold what Python cannot"
        with pytest.raises(TaskError, match=rf"{file.name}: expected whole .*Europe/Nowhere"):
            read_math_rows(file, columns=ColumnChoice("made"))
        with pytest.raises(TaskError, match="a column other with something in it, got problem, answer, made"):
            read_math_rows(file, columns=ColumnChoice("other"))
    rows, before = data_files._rows_of(tmp_path / "long.parquet", ["problem"]), arrow.total_allocated_bytes()
    assert next(iter(rows)) and arrow.total_allocated_bytes() - before < 20 << 20, "not all rows at once"


def hub_cache(home: Path, rows: list[dict[str, object]]) -> Path:
    """The layout that the hub's client leaves: snapshots are links to blobs."""
    kept = home / "hub" / "datasets--org--puzzles"
    for subset in ("main", "worked"):
        blob = write_jsonl(kept / "blobs" / subset, rows)
        for commit in ("aaa", "bbb"):
            link = kept / "snapshots" / commit / subset / "train-00000-of-00001.jsonl"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("aaa")
    return kept


def test_a_hub_id_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = hub_cache(tmp_path, ROWS)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = local_data_set("org/puzzles")
    assert folder == kept / "snapshots" / "aaa" and paths_to_show(folder) == [kept]
    rows = write_jsonl(tmp_path / "elsewhere" / "rows.jsonl", ROWS)
    (tmp_path / "links").mkdir()
    for name, target in {"train.jsonl": rows, "gone.jsonl": tmp_path / "gone"}.items():
        (tmp_path / "links" / name).symlink_to(target)
    assert paths_to_show(tmp_path / "links") == [tmp_path / "links", rows.resolve()] and paths_to_show(rows) == [rows]
    assert len(read_math_rows(folder, subset="main")) == 3
    for subset in ("", "test"):
        with pytest.raises(TaskError, match=f"argument subset to be one of main, worked, got {subset or 'none'}"):
            read_math_rows(folder, subset=subset)
    with pytest.raises(TaskError, match=r"org/other: expected a folder or one in the hub's cache"):
        local_data_set("org/other")
    with pytest.raises(TaskError, match="found nothing there"):
        read_math_rows(local_data_set("./org/puzzles"))
    files = [f"{subset}/train-0000{part}-of-00002.jsonl" for subset in ("main", "worked") for part in (0, 1)]
    write_tree_cache(str(kept), "aaa", dict.fromkeys(files, TreeCacheEntry(1, "b")))  # as a download begins
    with pytest.raises(TaskError, match=r"puzzles: expected a folder .* is incomplete: 4 file.* folder .*aaa, if"):
        local_data_set("org/puzzles")  # that was broken off


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "solution": "1"}\n', r"x.jsonl row 1: expected a column answer or .*got prompt, solution"),
        ('{"prompt": "x", "answer": ""}\n', "expected a column answer"),
        ('{"prompt": "[{\'content\': 1, \'role\': \'user\'}]", "answer": "1"}\n', "row 1: .* a chat as a list instead"),
        ('{"prompt": "x", "answer": "1"}\n{"prompt": 5, "answer": "1"}\n', "row 2 prompt: expected text or a list"),
        ('{"prompt": [{"role": "user", "content": null}], "answer": "1"}\n',
         "row 1 prompt message 1: expected a message's content as text, or as parts of type text, got 'None'"),
        ('{"prompt": "x", "answer": ["$3$", "$-3$"]}\n', "row 1: expected one answer .* write several as one text"),
        ('{"prompt": "x", "answer": {"value": 1}}\n', "row 1: expected one answer"),
        ('{"prompt": "<image> x", "images": ["x.png"], "answer": "1"}\n', "row 1: .* text alone, got a column images"),
        ("not json\n", "x.jsonl line 1: expected a JSON object in one line of UTF-8, got 'not json"),
        ("[1]\n", "row 1: expected a JSON object, got int"),
        ("[" * 100_000, "expected a JSON array of objects, got maximum recursion"),
        ("version https://git-lfs.example/spec/v1\noid sha256:ab\n", "x.jsonl: expected its content, got the pointer"),
        ('{"prompt": " ", "answer": "1"}\n', "row 1: expected a column prompt"),
        ('{"prompt": "x", "answer": "  "}\n', "row 1: expected a column answer"),
        ('{"prompt": "x", "answer": "2\\n####"}\n', "row 1: expected the answer after ####"),
        ('{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}\n', "prompt message 1: expected a role among"),
        ('{"prompt": "x", "answer": NaN}\n', "row 1: expected one answer as text or number, got nan"),
        ('{"prompt": "x", "answer": true}\n', "row 1: expected one answer as text or number, got True"),
        ('{"prompt": "\\ud83d", "answer": "1"}\n', "row 1: expected text of whole characters"),
        ('{"prompt": "[{\\"role\\": \\"user\\"}]", "answer": "1"}\n', "row 1: .* a chat as a list instead of text"),
        ('{"prompt": [{"role": null, "content": "x"}], "answer": "1"}\n', "prompt message 1: expected a role among"),
        ('{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "1"}], "answer": "1"}\n',
         "row 1: .* got one that ends with the assistant's message"),
        ("\n", "expected rows, found none"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        read_math_rows(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1xxxxPAR1", b"<!DOCTYPE html>"])
def test_a_damaged_file_of_columns_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=rf"x{suffix}: expected whole {suffix[1:]} with values"):
        read_math_rows(path)
