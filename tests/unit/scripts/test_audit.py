"""scripts/audit, with a program in the place of pip-audit that answers as told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[3] / "scripts" / "audit"
FINE = {"name": "yarl", "version": "1.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
VULNERABLE = {
    "name": "pillow",
    "version": "9.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["9.1", "10"], "aliases": [], "description": ""}],
}


def audited(tmp_path: Path, *answers: dict[str, Any], fails_with: str = "") -> tuple[int, str]:
    """Exit code and output."""
    said = f"sys.exit({fails_with!r})" if fails_with else f"print({json.dumps({'dependencies': answers})!r})"
    asked = tmp_path / "asked.txt"
    (tmp_path / "pip_audit.py").write_text(
        "import sys\n"
        "given = open(sys.argv[sys.argv.index('--requirement') + 1]).read()\n"
        f"open({str(asked)!r}, 'w').write(given)\n{said}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, AUDIT], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.stderr == ""
    return finished.returncode, finished.stdout


def test_packages_without_a_known_vulnerability_are_fine(tmp_path: Path) -> None:
    code, output = audited(tmp_path, FINE)
    assert (code, output.splitlines()[-1]) == (0, "none of them has a known vulnerability")


def test_a_vulnerability_is_told_with_what_mends_it(tmp_path: Path) -> None:
    code, output = audited(tmp_path, FINE, VULNERABLE, UNKNOWN)
    assert code == 1
    assert "pillow 9.0: PYSEC-1, mended in 9.1, 10" in output


@pytest.mark.parametrize(
    ("answers", "fails_with"), [((FINE, UNKNOWN), ""), ((), "ConnectionError: no such host")]
)
def test_what_could_not_be_asked_is_not_taken_for_fine(
    tmp_path: Path, answers: tuple[dict[str, Any], ...], fails_with: str
) -> None:
    code, output = audited(tmp_path, *answers, fails_with=fails_with)
    assert code == 3
    assert output.splitlines()[-1].startswith("NOT AUDITED: ")


def test_what_users_get_is_asked_for_in_the_installed_versions(tmp_path: Path) -> None:
    audited(tmp_path, FINE)
    pinned = dict(line.split("==") for line in (tmp_path / "asked.txt").read_text().splitlines())
    assert {"fastapi", "starlette", "pillow", "torch", "websockets"} <= pinned.keys()
    assert "omni-server" not in pinned
    assert "pytest" not in pinned
    assert not [version for version in pinned.values() if "+" in version]
