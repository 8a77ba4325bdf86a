"""Files of the engines' processes: their folder for sockets and temporary files, what is left of it when the
server is killed, and vLLM's cache folder where it cannot be written."""

import asyncio
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.engine.launcher import start_engines
from omni_server.engine.process_files import (
    PREFIX,
    TempFolder,
    check_cache_folder,
    check_descriptors,
    sweep_dead_folders,
)
from omni_server.errors import ConfigError

ROOT = Path(__file__).parents[3]
VARIABLES = ("TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR")


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of this test; not `tmp_path`, which is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)


def test_only_its_user_may_enter_it_and_it_is_removed_with_all_that_is_in_it(parent: Path) -> None:
    folder = TempFolder()
    assert folder.path.parent == parent
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "socket").touch()
    folder.remove()
    assert not list(parent.iterdir())
    folder.remove()


def test_engines_put_their_files_there_and_compiled_code_where_the_next_start_finds_it(parent: Path) -> None:
    folder = TempFolder()
    variables = folder.variables()
    assert variables["TMPDIR"] == variables["VLLM_RPC_BASE_PATH"] == str(folder.path)
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == parent
    assert not os.environ.keys() & set(VARIABLES)
    assert tempfile.gettempdir() == str(parent), "this process goes on as before"
    folder.remove()


def test_what_the_operator_has_set_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"/of/the/operator/{name}")
    folder = TempFolder()
    assert folder.variables() == {"TMPDIR": str(folder.path)}
    folder.remove()


def test_folder_of_a_killed_server_is_swept_with_what_its_engines_shared(parent: Path) -> None:
    program = (
        "import time\n"
        "from omni_server.engine.process_files import TempFolder\n"
        "print(TempFolder().path, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    name = f"vllm_dist_{uuid.uuid4().hex}"
    shared, of_another = (
        Path(f"/dev/shm/{name}-tp:0-[0-1]-cpushm_0"),
        Path(f"/dev/shm/{name[:-1]}x-tp:0-cpushm_0"),
    )
    assert owner.stdout is not None
    try:
        path = Path(owner.stdout.readline().strip())
        (path / name).touch()
        shared.touch()
        of_another.touch()
        assert sweep_dead_folders() == []
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert path.exists(), "nobody could remove it"
        assert sweep_dead_folders() == [path]
        assert not path.exists()
        assert not shared.exists()
        assert of_another.exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        shared.unlink(missing_ok=True)
        of_another.unlink(missing_ok=True)


def test_a_link_of_that_name_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (parent / f"{PREFIX}link").symlink_to(tmp_path)
    assert sweep_dead_folders() == []
    assert (tmp_path / "kept").exists()


def test_a_folder_that_a_sweep_has_taken_meanwhile_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server's, which came between the folder and its lock."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def made_and_swept(**arguments: str) -> str:
        made.append(make(**arguments))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_swept)
    folder = TempFolder()
    assert [str(folder.path)] == made[1:]
    folder.remove()


def test_an_engine_without_file_descriptors_is_refused_and_takes_none() -> None:
    """libzmq would end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_descriptors()
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    tenth_free = [number for number in range(soft) if number not in taken][9]
    resource.setrlimit(resource.RLIMIT_NOFILE, (tenth_free + 1, hard))
    try:
        with pytest.raises(ConfigError, match=r"fewer than 64 .* \(Too many open files\): raise the limit"):
            check_descriptors()
        assert {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} == taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_path_that_is_too_long_for_sockets_is_refused(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = parent / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long for sockets"):
        TempFolder()
    assert not list(deep.iterdir())


# -- vLLM's cache folder

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


def test_a_folder_that_can_be_written_is_made_and_left_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_other_errors_of_vllm_stay_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    check_cache_folder(Path("/proc/sys/nothing"), compiles=False)
    log_as_vllm(ValueError("something else"))
    log_as_vllm(OSError("no process can be started"), "Error in inspecting model architecture")
    assert warnings(caplog)[1:] == [NOT_SAVED, "Error in inspecting model architecture"]


def test_a_folder_that_compiled_code_needs_is_an_error(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
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
