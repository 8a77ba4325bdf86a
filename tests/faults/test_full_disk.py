"""A start that finds no room; `test_shutdown` has what a server can do without."""

import os
import subprocess
import sys
from pathlib import Path

from tests.faults.full_disk import with_full_disks
from tests.integration.server_process import ROOT


def test_start_without_room_for_temporary_files_ends_with_an_error_that_names_the_folders(
    checkpoint: Path,
) -> None:
    """Python would take /tmp, /var/tmp, /usr/tmp or the current folder in place of one that is full."""
    folders = [Path(folder).resolve() for folder in ("/tmp", "/var/tmp", "/usr/tmp", ROOT)]
    elsewhere = ("TORCHINDUCTOR_CACHE_DIR", "TEMP", "TMP")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    command = [sys.executable, "-m", "omni_server.cli.entry", "serve", str(checkpoint), "--port", "0"]
    command += ["--stage-config", "qwen2_5_omni.demo-cpu"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"TMPDIR": "/tmp"} | with_full_disks(*folders),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    *_, last = ended.stderr.splitlines()
    assert last.startswith("omni-server: error: no folder for temporary files can be written")
    assert "'/tmp'" in last
    assert "set TMPDIR to a folder that can be written" in last
    assert "Traceback" not in ended.stderr
