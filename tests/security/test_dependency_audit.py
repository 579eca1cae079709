from __future__ import annotations

import json

from tests.security.dependency_audit import verdict


def report(*dependencies: dict[str, object]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


SOUND = {"name": "grpcio", "version": "1.85.1", "vulns": []}
BAD = {"name": "zlibish", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"], "aliases": []}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def test_a_known_vulnerability_fails_and_is_named_with_its_mend() -> None:
    said, code = verdict(report(SOUND, BAD, UNKNOWN), "")
    assert code == 1 and "zlibish 1.0: CVE-1, mended in 1.1" in said and "1 could not be looked up" in said


def test_what_could_not_be_looked_up_is_no_pass() -> None:
    assert verdict(report(SOUND, UNKNOWN), "") == (
        "dependency audit: 1 packages looked up, 0 with known vulnerabilities; 1 could not be looked up", 0,
    )  # fmt: skip
    said, code = verdict(report(UNKNOWN), "")
    assert code == 0 and "skipped, the advisory service knows none of 1 packages" in said


def test_an_unreachable_service_is_told_and_any_other_failure_fails() -> None:
    assert verdict("", "requests.exceptions.ConnectionError: Max retries exceeded") == (
        "dependency audit: skipped, the advisory service cannot be reached", 0,
    )  # fmt: skip
    assert verdict("", "TypeError: pip-audit broke")[1] == 1
