"""A start that does not succeed leaves no engine and no queue behind."""

import asyncio
import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from omni_server.errors import ConfigError
from omni_server.omni import AsyncOmni
from tests.integration.live import demo_config, queue_files

RELEASE_TIMEOUT_S = 10.0


def running_beside(children: set[BaseProcess]) -> set[BaseProcess]:
    """Other processes that have not ended in time. By what the system says of them: where several threads ask for the
    end of one process at once, multiprocessing may not know of it yet."""
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while (left := {c for c in set(multiprocessing.active_children()) - children if is_running(c.pid)}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return left


def is_running(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_engines_that_are_not_ready_in_time_are_ended(checkpoint: Path) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    with pytest.raises(ConfigError, match=r"not ready after 1\.5 s"):
        await AsyncOmni.start(checkpoint, demo_config(start_timeout_s=1.5))
    assert not running_beside(children)
    assert queue_files() == files


async def test_a_start_that_is_cancelled_ends_its_engines(checkpoint: Path) -> None:
    """What SIGTERM does while the server loads."""
    files, children = queue_files(), set(multiprocessing.active_children())
    starting = asyncio.create_task(AsyncOmni.start(checkpoint, demo_config()))
    await asyncio.sleep(4)  # long enough for the engines' processes to exist, too short for them to be ready
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not running_beside(children)
    assert queue_files() == files


async def test_an_engine_that_cannot_start_is_named_with_its_reason(checkpoint: Path) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    config = demo_config(stages={"talker": {"engine_args": {"block_size": 7}}})
    with pytest.raises(ConfigError, match="stage 'talker' did not start"):
        await AsyncOmni.start(checkpoint, config)
    assert not running_beside(children)
    assert queue_files() == files


async def test_a_plan_with_windows_that_code2wav_cannot_hold_is_refused_before_anything_starts(
    checkpoint: Path,
) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    config = demo_config(stages={"code2wav": {"max_model_len": 24, "max_num_batched_tokens": 240}})
    with pytest.raises(ConfigError, match="code2wav's max_model_len is 24"):
        await AsyncOmni.start(checkpoint, config)
    assert set(multiprocessing.active_children()) == children
    assert queue_files() == files


async def test_a_queue_that_shared_memory_has_no_room_for_is_refused_before_anything_starts(checkpoint: Path) -> None:
    config = demo_config(queue={"capacity": 4096}, stages={"thinker": {"max_num_batched_tokens": 1_000_000}})
    files, children = queue_files(), set(multiprocessing.active_children())
    with pytest.raises(ConfigError, match=r"needs \d+ MiB in /dev/shm .*--shm-size"):
        await AsyncOmni.start(checkpoint, config)
    assert set(multiprocessing.active_children()) == children
    assert queue_files() == files
