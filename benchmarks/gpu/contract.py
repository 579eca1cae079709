"""The engine contract on vLLM, where vLLM is installed: its tests, counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.setup import Row, Setup

ROOT = Path(__file__).parents[2]
TESTS = ("tests/contract/test_engine.py", "tests/contract/test_vllm_map.py", "tests/contract/test_vllm_adapter.py")


def run(setup: Setup) -> list[Row]:
    report = setup.folder / "contract.xml"
    command = [sys.executable, "-m", "pytest", "-m", "vllm", "-W", "default", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={report}", *TESTS], cwd=ROOT, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    ran = sum(case.find("skipped") is None for case in cases)
    return [
        Row("vLLM: tests of the engine contract that ran", ran, "tests", 1, "higher"),
        Row("vLLM: of them failed", failed, "tests", 0),
    ]
