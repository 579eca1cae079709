"""What a contained process on this machine sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.contain import box
from echo2.contain.box import View, box_command, bubblewrap, containment_problem, view_here
from tests.patience import WAIT_S

needs_namespaces = pytest.mark.skipif(bool(containment_problem()), reason="nothing can be contained on this machine")


def seen(code: str, *arguments: str, **view: tuple[str, ...]) -> str:
    command = box_command(bubblewrap().path, view_here(**view), 1 << 20, [sys.executable, "-P", "-c", code, *arguments])  # type: ignore[arg-type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.stdout + done.stderr


@needs_namespaces
def test_the_packages_and_the_readable_are_seen_and_the_hidden_are_not(tmp_path: Path) -> None:
    """Also where a hidden folder lies within what is shown, and what is shown deeper within it."""
    seen_of = {
        "data/rows.jsonl": True,
        "data/run/identity.key": False,
        "data/run/venv/x.py": True,
        "other/secret": False,
    }
    for name in seen_of:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    code = "import sys, os, echo2, numpy; [print(p, os.path.exists(p)) for p in sys.argv[1:]]"
    names = {str(tmp_path / name): is_seen for name, is_seen in seen_of.items()}
    data = tmp_path / "data"
    found = seen(code, *names, readable=(str(data), str(data / "run" / "venv")), hidden=(str(data / "run"),))
    assert found.splitlines() == [f"{name} {is_seen}" for name, is_seen in names.items()]


@needs_namespaces
def test_a_users_package_is_seen_and_what_lies_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("value = 7")
    (tmp_path / "beside.py").write_text("value = 8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert seen("import mine; print(mine.value)", modules=("mine",)).strip() == "7"
    assert "No module named 'beside'" in seen("import beside", modules=("mine",))


@needs_namespaces
def test_packages_that_a_pth_file_adds_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one virtual environment lies over another."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "below.py").write_text("value = 9")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert seen("import below; print(below.value)").strip() == "9"


@needs_namespaces
def test_relative_paths_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("row")
    monkeypatch.chdir(tmp_path)
    assert seen("print(open('rows.jsonl').read())", readable=("rows.jsonl",)).strip() == "row"


def test_home_and_what_is_missing_are_not_readable() -> None:
    with pytest.raises(ConfigError, match="less than the whole home"):
        view_here(readable=("~",))
    with pytest.raises(ConfigError, match="less than the whole home"):
        view_here(readable=("/",))
    with pytest.raises(ConfigError, match="found nothing there"):
        view_here(readable=("/no/such/thing",))
    for path in ("relative", "/a/../b", ""):
        with pytest.raises(ConfigError, match="expected absolute paths"):
            box_command("bwrap", View((path,)), 1 << 20, ["python"])


def test_a_bwrap_that_does_not_work_is_told_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(box, "_candidates", lambda: iter([str(broken)]))
    bubblewrap.cache_clear()
    try:
        with pytest.raises(ResourceError, match="user namespaces.*uid map: Permission denied"):
            bubblewrap()
        assert "Permission denied" in containment_problem()
    finally:
        bubblewrap.cache_clear()
