"""What a contained process on this machine sees."""

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
def test_the_packages_and_the_readable_are_seen_and_the_hidden_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a hidden folder lies within what is shown, and what is shown deeper within it; relative paths mean the same; and
    where a link leads to either, or out of where ".." seems to."""
    seen_of = {
        "data/rows.jsonl": True, "data/run/identity.key": False, "data/run/venv/x.py": True, "other/secret": False,
    }  # fmt: skip
    for name in seen_of:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code = "import sys, os, echo2, numpy; [print(p, os.path.exists(p)) for p in sys.argv[1:]]"
    for name, target in (("link", "data"), ("to_run", "data/run")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for data, run in (("data", "data/run"), ("link", "data/run"), ("data", "to_run"), ("data", "to_run/../run")):
        asked = [f"../{name.replace('data', data)}" for name in seen_of]
        found = seen(code, *asked, readable=(f"../{data}", str(tmp_path / data / "run/venv")), hidden=(f"../{run}",))
        assert [line.split()[1] == "True" for line in found.splitlines()] == [*seen_of.values()], (data, run)


@needs_namespaces
def test_a_users_package_and_those_that_a_pth_file_adds_are_seen_and_what_lies_beside_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter as where one virtual environment lies over another."""
    for name, value in (("mine/__init__.py", 7), ("beside.py", 8), ("site-packages/below.py", 9)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"value = {value}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert seen("import mine, below; print(mine.value, below.value)", modules=("mine",)).strip() == "7 9"
    assert "No module named 'beside'" in seen("import beside", modules=("mine",))


def test_home_and_what_is_missing_are_not_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").symlink_to(tmp_path / "disk/home")
    (tmp_path / "disk/home").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path, said in (
        ("~", "less than the whole home"),
        (str(tmp_path / "disk"), "less than the whole home"),
        ("/", "less than the whole home"),
        ("/no/such", "nothing there"),
    ):
        with pytest.raises(ConfigError, match=said):
            view_here(readable=(path,))
    for path in ("relative", "/a/../b", ""):
        with pytest.raises(ConfigError, match="expected absolute paths"):
            box_command("bwrap", View((path,)), 1 << 20, ["python"])


def test_a_bwrap_that_does_not_work_is_told_with_what_it_said_without_its_dot_for_more_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied. See a page.' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(box, "_candidates", lambda: iter([str(broken)]))
    bubblewrap.cache_clear()
    try:
        with pytest.raises(ResourceError, match="user namespaces.*uid map: Permission denied"):
            bubblewrap()
        assert containment_problem().endswith("uid map: Permission denied. See a page")
    finally:
        bubblewrap.cache_clear()
