"""A cloud behind three shell commands: a machine is a folder, its home, and a process that runs the script it was given."""

import os
import shlex
import signal
from pathlib import Path

_START = """
machine={folder}/$ECHO2_MACHINE_ID; mkdir -p "$machine"; cat > "$machine/script"; echo "$ECHO2_MACHINE_ID" >> {folder}/started
{environment} HOME="$machine" setsid bash "$machine/script" > "$machine/log" 2>&1 < /dev/null & echo $! > "$machine/pid"
"""
# Without `--`, which dash's own kill does not know.
_STOP = 'kill -9 "-$(cat {folder}/$ECHO2_MACHINE_ID/pid)"; rm {folder}/$ECHO2_MACHINE_ID/pid'
_LIST = """
for pid in {folder}/*/pid; do
  machine=$(dirname "$pid"); [ -e "$pid" ] && echo "$(basename "$machine") $(cat "$machine/notice" 2>/dev/null)"
done; true
"""


class CommandCloud:
    """`environment`: what a machine's processes have, beside HOME; None: what the commands have."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir()
        given = (
            [] if environment is None else ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        )
        words = {"folder": shlex.quote(str(folder)), "environment": shlex.join(given)}
        self.settings = {
            "start": _START.format(**words), "stop": _STOP.format(**words), "list": _LIST.format(**words),
        }  # fmt: skip

    def started(self) -> list[str]:
        path = self.folder / "started"
        return path.read_text().split() if path.exists() else []

    def script(self, machine_id: str) -> str:
        return (self.folder / machine_id / "script").read_text()

    def log(self, machine_id: str) -> str:
        return (self.folder / machine_id / "log").read_text()

    def say(self, machine_id: str, notice: str) -> None:
        (self.folder / machine_id / "notice").write_text(notice)

    def close(self) -> None:
        for path in self.folder.glob("*/pid"):
            if group := int(path.read_text()):  # 0 would be the group of the tests themselves
                os.killpg(group, signal.SIGKILL)
