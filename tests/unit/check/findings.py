"""What `omni-server check` has found, as tests read it."""

from collections.abc import Callable
from typing import Any

GB = 10**9
H100 = 80 * 2**30
CPU = ["--stage-config", "qwen2_5_omni.demo-cpu"]
Check = Callable[..., tuple[int, dict[str, Any]]]


def errors(report: dict[str, Any]) -> list[str]:
    return [
        f"{item['area']}: {item['message']}" for item in report["findings"] if item["severity"] == "error"
    ]


def the_error(found: tuple[int, dict[str, Any]]) -> str:
    code, report = found
    assert code == 2
    assert not report["fits"]
    (error,) = errors(report)
    return error
