"""`--log-format`, in a process of its own: logging is set up once for all."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def stderr_of(log_format: str, code: str) -> str:
    lines = "import logging; from omni_server.platform.log_format import set_up_logging; "
    lines += f"set_up_logging('info', {log_format!r}); {code}"
    result = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout == ""
    return result.stderr


def test_vllm_and_what_runs_in_its_processes_log_json_too() -> None:
    loggers = ["vllm.engine", "stages.runtime"]
    code = f"import vllm.logger; [logging.getLogger(name).info('from there') for name in {loggers}]"
    lines = stderr_of("json", code).splitlines()
    assert [json.loads(line)["logger"] for line in lines if "from there" in line] == loggers
