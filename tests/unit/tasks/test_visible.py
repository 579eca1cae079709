"""What of a user's own code contained rewards see: every layout that Python itself imports, however long its chains are."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.tasks.visible import own_modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_folders_without_an_init_file_are_packages_too(folder: Path) -> None:
    for path, text in {
        "kit/mine.py": "import first\nfrom kit import second\nfrom kit.deep import third\ndef late():\n    import fifth",
        "kit/second.py": "import torch, json",
        "kit/deep/third.py": "import fourth",
        "first.py": "", "fourth.py": "", "fifth.py": "", "unused.py": "",
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    modules = own_modules("kit.mine:Task")
    assert modules[0] == "kit" and set(modules) == {"kit", "first", "fourth", "fifth"}


def test_a_long_chain_and_files_that_are_no_python_end_nothing(folder: Path) -> None:
    for number in range(400):
        (folder / f"link{number}.py").write_text(f"import link{number + 1}")
    (folder / "link400.py").write_text("import wrong\nimport nul\nimport last")
    (folder / "wrong.py").write_text('print "of another Python"')
    (folder / "nul.py").write_bytes(b"\0")
    (folder / "last.py").touch()
    assert {"link0", "link400", "last"} <= set(own_modules("link0:Task"))
