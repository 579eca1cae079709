"""`make audit`: known vulnerabilities of what is installed here, by pip-audit; says plainly what could not be looked up.

Exit code 1 for a known vulnerability, or where pip-audit fails by itself; 0 otherwise. The advisory service is on the
Internet: where it cannot be reached, or knows none of the packages (a mirror in between), that is said and nothing fails.
"""

import json
import subprocess
import sys
from typing import Any

UNREACHABLE = ("ConnectionError", "Max retries", "NameResolution", "timed out", "ServiceError", "Forbidden")
COMMAND = ["-m", "pip_audit", "--progress-spinner", "off", "--skip-editable", "--local", "--format", "json"]


def verdict(report: str, errors: str) -> tuple[str, int]:
    """What to say of pip-audit's JSON report and its standard error, and the exit code."""
    if not report.strip():
        if any(word in errors for word in UNREACHABLE):
            return "dependency audit: skipped, the advisory service cannot be reached", 0
        return f"dependency audit: pip-audit failed:\n{errors[-2000:]}", 1
    found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    looked_up = [one for one in found if "vulns" in one]
    bad = [one for one in looked_up if one["vulns"]]
    lines = [
        f"{one['name']} {one['version']}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or 'no version yet'}"
        for one in bad
        for vuln in one["vulns"]
    ]
    missing = len(found) - len(looked_up)
    if not looked_up:
        lines.append(f"dependency audit: skipped, the advisory service knows none of {missing} packages")
    else:
        known = f"{len(looked_up)} packages looked up, {len(bad)} with known vulnerabilities"
        lines.append(f"dependency audit: {known}; {missing} could not be looked up")
    return "\n".join(lines), int(bool(bad))


def main() -> int:
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, check=False)
    said, code = verdict(done.stdout, done.stderr)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
