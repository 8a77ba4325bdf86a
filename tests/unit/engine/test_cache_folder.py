"""vLLM's cache folder where it cannot be written: one warning, and none of vLLM's tracebacks."""

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.engine.cache_folder import check_cache_folder
from omni_server.engine.launcher import start_engines
from omni_server.errors import ConfigError

WRITER = "vllm.model_executor.models.registry"


@pytest.fixture(autouse=True)
def filters() -> Iterator[None]:
    """Those of vLLM's loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in (WRITER, "vllm.model_executor.model_loader.weight_utils")]
    before = [list(logger.filters) for logger in loggers]
    yield
    for logger, its_filters in zip(loggers, before, strict=True):
        logger.filters[:] = its_filters


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


NOT_SAVED = "Error saving model info cache."


def log_as_vllm(error: Exception, message: str = NOT_SAVED) -> None:
    try:
        raise error
    except type(error):
        logging.getLogger(WRITER).error(message, exc_info=True)


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_cache_folder(tmp_path / "cache" / "vllm", compiles=False)
    assert not list((tmp_path / "cache" / "vllm").iterdir())
    assert not warnings(caplog)


def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by writing: an empty file can still be made."""

    def write(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    check_cache_folder(tmp_path, compiles=False)
    log_as_vllm(OSError("the same of a file"))
    (line,) = warnings(caplog)
    assert line.startswith(f"vLLM's cache {tmp_path} cannot be written (No space left on device)")
    assert "VLLM_CACHE_ROOT" in line
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_cache_folder(Path("/proc/sys/nothing"), compiles=False)
    log_as_vllm(OSError("the same of a file"))
    assert len(warnings(caplog)) == 1


def test_other_errors_of_vllm_stay_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    check_cache_folder(Path("/proc/sys/nothing"), compiles=False)
    log_as_vllm(ValueError("something else"))
    log_as_vllm(OSError("no process can be started"), "Error in inspecting model architecture")
    assert warnings(caplog)[1:] == [NOT_SAVED, "Error in inspecting model architecture"]


def test_vllm_is_heard_where_its_folder_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_cache_folder(tmp_path, compiles=False)
    log_as_vllm(OSError("a weight file"))
    assert warnings(caplog) == [NOT_SAVED]


def test_a_folder_that_compiled_code_needs_is_an_error(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    check_cache_folder(tmp_path, compiles=True)
    with pytest.raises(ConfigError, match=r"/proc/sys/nothing cannot be written .* set VLLM_CACHE_ROOT"):
        check_cache_folder(Path("/proc/sys/nothing"), compiles=True)
    assert not warnings(caplog)


def test_code_that_was_compiled_before_may_be_in_a_folder_that_cannot_be_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(file: int, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "torch_compile_cache").mkdir()
    monkeypatch.setattr(os, "write", write)
    check_cache_folder(tmp_path, compiles=True)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("config", "compiles"), [("qwen2_5_omni", True), ("qwen2_5_omni.demo-cpu", False)])
def test_stages_are_compiled_but_for_those_that_are_told_not_to(
    config: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start ends before an engine is made, or goes on to where there is no such model."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/proc/sys/nothing")
    stages = load_stage_config(find_shipped_config(config))
    missing, nobody = Path("/proc/sys/no-model"), cast(Any, None)
    with pytest.raises(ConfigError if compiles else AttributeError):
        asyncio.run(start_engines(missing, stages, nobody, nobody, load_format="auto", on_progress=print))
