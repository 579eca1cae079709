"""Records the demo as it runs: `docs/images/demo.svg`, the terminal, and `docs/images/dashboard.png`, the operator's page.

    python docs/record.py [--seed N] [--keep-cast FILE]        # or: make recording

The demo runs in a pseudo-terminal; what it prints is kept as an asciicast (version 2), gathered into FRAMES frames that play in
PLAYED_S, and `svg-term-cli` (npm) makes the picture of it. The page is taken by Playwright in the
system's Chromium, from the same run. What the run's summary says is kept beside the pictures, and the captions in README.md and
docs/index.md are written from it. Needs npx and Chromium. Waits: for the demo to end, RUN_S at most.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 112, 38
FRAMES, PLAYED_S, GAP_S_MAX, LAST_S = 48, 24.0, 3.0, 4.0
RUN_S = 400.0
SHOOT_AT_STEP = 90
SVG_TERM = "svg-term-cli@2.1.1"
BYTES_MAX = 1 << 20
SUMMARY = IMAGES / "demo.json"
CAPTIONED = (ROOT / "README.md", ROOT / "docs" / "index.md")
CAPTION = re.compile(r"(?<=<!-- made by docs/record.py -->\n).*?(?=\n<!-- until here -->)", re.DOTALL)
PAGE = re.compile(r"dashboard (http://[0-9.]+:[0-9]+)")
STEP = re.compile(r"step (\d+) / \d+")
Event = tuple[float, str]


class Camera(threading.Thread):
    """Opens the page when it is told where, takes the picture when it is told to."""

    def __init__(self, target: Path) -> None:
        super().__init__(daemon=True)
        self.target, self.url = target, ""
        self.opened, self.now = threading.Event(), threading.Event()
        self.trouble = "the demo ended before there was a picture to take"

    def run(self) -> None:
        from playwright.sync_api import Error, sync_playwright

        self.opened.wait(RUN_S)
        self.now.wait(RUN_S)
        if not self.url:
            return
        try:
            with sync_playwright() as driver:
                flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
                chromium = shutil.which("chromium") or shutil.which("chromium-browser")
                browser = driver.chromium.launch(executable_path=chromium, args=flags)
                page = browser.new_page(viewport={"width": 1280, "height": 1190}, color_scheme="light")
                page.goto(self.url)
                page.wait_for_selector("body[data-ready]", timeout=20_000)
                page.screenshot(path=self.target)
                browser.close()
            self.trouble = ""
        except Error as error:
            self.trouble = str(error)


def record(command: list[str], folder: str, camera: Camera) -> list[Event]:
    """Runs `command` in `folder` in a terminal of COLUMNS x ROWS and returns what it printed and when."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.chdir(folder)
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, events, text = time.monotonic(), [], ""
    while time.monotonic() - began < RUN_S:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the child has gone
            break
        if not data:
            break
        events.append((time.monotonic() - began, data.decode(errors="ignore")))
        text = (text + events[-1][1])[-20_000:]
        if not camera.opened.is_set() and (found := PAGE.search(text)):
            camera.url = found[1]
            camera.opened.set()
        if any(int(step) >= SHOOT_AT_STEP for step in STEP.findall(events[-1][1])):
            camera.now.set()
    else:
        os.kill(child, signal.SIGINT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    camera.opened.set()
    camera.now.set()
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with code {code}:\n{text[-2000:]}")
    return events


def frames(events: list[Event]) -> list[Event]:
    """FRAMES events in PLAYED_S, pauses shortened."""
    moments, shown, before = [], 0.0, 0.0
    for at, _ in events:
        shown += min(GAP_S_MAX, at - before)
        before = at
        moments.append(shown)
    gathered: dict[int, str] = {}
    for moment, (_, data) in zip(moments, events, strict=True):
        slot = int(FRAMES * moment / (shown + 1e-9))
        gathered[slot] = gathered.get(slot, "") + data
    played = [(slot * PLAYED_S / FRAMES, data) for slot, data in gathered.items()]
    return [*played, (PLAYED_S + LAST_S, "")]


def write_cast(path: Path, events: list[Event]) -> None:
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "env": {"TERM": "xterm-256color"}}
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", data]) for at, data in events)]
    path.write_text("\n".join(lines) + "\n")


def caption_of(summary: dict[str, Any]) -> str:
    """What the pictures show, in the figures of their run."""
    if summary["tokens_over_bound"] or not all(summary["versions_equal"].values()):
        raise SystemExit(f"expected a run within the bound, with equal weights everywhere, got {summary}")
    whole, sent = summary["full_snapshot_bytes"] / 1e6, summary["delta_bytes"] / 1e6
    first, last = summary["held_out_reward_first"], summary["held_out_reward_last"]
    busy, promised = 100 * summary["utilisation_measured"], 100 * summary["utilisation_predicted"]
    return (
        "*`make demo` on two cores without a GPU, sped up. Below: the dashboard of the same run.\n"
        f"The run took {summary['elapsed_s']:.0f} s: held-out reward {first:.2f} to {last:.2f}, {sent:.1f} MB of deltas "
        f"instead of {whole:.1f} MB of snapshots,\n"
        f"no token older than S trained on, utilisation {busy:.0f} % (predicted {promised:.0f} %). "
        "`make recording` regenerates the images and numbers.*"
    )


def write_captions(summary: dict[str, Any], pages: Iterable[Path] = CAPTIONED) -> None:
    for page in pages:
        text, count = CAPTION.subn(lambda _: caption_of(summary), page.read_text())
        if count != 1:
            raise SystemExit(f"{page}: expected one place for the caption, found {count}")
        page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-cast", type=Path, default=ROOT / "build" / "demo.cast")
    own = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    own.keep_cast.parent.mkdir(parents=True, exist_ok=True)
    camera = Camera(IMAGES / "dashboard.png")
    camera.start()
    command = [sys.executable, "-m", "echo2.cli.main", "demo", "--seed", str(own.seed), "--name", "demo"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        events = record(command, folder, camera)
        camera.join(60)
        summary = json.loads((Path(folder) / "runs" / "demo" / "summary.json").read_text())
    if camera.trouble:
        raise SystemExit(f"dashboard: {camera.trouble}")
    write_cast(own.keep_cast, frames(events))
    picture = IMAGES / "demo.svg"
    npx = ["npx", "--yes", SVG_TERM, "--in", str(own.keep_cast), "--out", str(picture), "--window", "--no-cursor"]
    subprocess.run(npx, check=True, timeout=300, stdin=subprocess.DEVNULL)
    for made in (picture, camera.target):
        size = made.stat().st_size
        print(f"{made.relative_to(ROOT)}: {size / 1e3:.0f} kB")
        if size > BYTES_MAX:
            raise SystemExit(f"{made}: expected at most {BYTES_MAX} bytes, for the README")
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    write_captions(summary)
    print(caption_of(summary))


if __name__ == "__main__":
    main()
