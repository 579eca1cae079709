"""The bubblewrap command of a view."""

from __future__ import annotations

import pytest

from echo2.base.errors import ConfigError
from echo2.contain.box import View, box_command


def test_all_is_unshared_nothing_is_writable_and_no_variable_is_passed_on() -> None:
    said = box_command("bwrap", View(("/usr",), (("/lib", "usr/lib"),)), 1 << 20, ["python"])
    for flag in (
        "--unshare-user",
        "--unshare-all",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ):
        assert flag in said
    text = " ".join(said)
    assert "--bind " not in text.replace("--ro-bind ", "").replace("--dev-bind ", "")
    assert "--proc" not in said
    assert text.endswith("--remount-ro / -- python")
    assert "--as-pid-1" in said and text.count("--cap-add") == 1 and "--cap-drop ALL --cap-add CAP_SYS_ADMIN" in text
    assert text.index("--cap-drop ALL") < text.index("--remount-ro /")


def test_a_hidden_folder_is_masked_within_what_is_shown_and_what_lies_deeper_is_shown_again() -> None:
    view = View(("/data", "/data/run/venv", "/usr"), hidden=("/data/run", "/elsewhere"))
    text = " ".join(box_command("bwrap", view, 1 << 20, ["python"]))
    assert text.index("--ro-bind /data /data") < text.index("--tmpfs /data/run ")
    assert text.index("--tmpfs /data/run ") < text.index("--ro-bind /data/run/venv")
    assert "/elsewhere" not in text


@pytest.mark.parametrize("path", ["relative", "/a/../b", ""])
def test_paths_are_absolute(path: str) -> None:
    with pytest.raises(ConfigError, match="expected absolute paths"):
        box_command("bwrap", View((path,)), 1 << 20, ["python"])
