"""A start that does not succeed leaves no engine and no queue behind."""

import asyncio
import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from omni_server.engine import cancellation
from omni_server.errors import ConfigError
from omni_server.generation import Deliver, Generation
from omni_server.omni import AsyncOmni
from omni_server.types import ChatMessage, OmniRequest, TextPart
from tests.integration.live import LiveOmni, demo_config, queue_files, written

DEADLINE_S = 120.0


async def wait_until_there_are_only(before: set[BaseProcess]) -> None:
    """Or fewer: some may be those of an earlier start. A constructor that is still at work in its thread may
    start one, which is ended at once."""
    async with asyncio.timeout(DEADLINE_S):
        while (  # noqa: ASYNC110 - threads and processes are looked at
            any(thread.name == cancellation.THREAD_NAME for thread in threading.enumerate())
            or not set(multiprocessing.active_children()) <= before
        ):
            await asyncio.sleep(0.02)


async def test_engines_that_are_not_ready_in_time_are_ended(checkpoint: Path) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    with pytest.raises(ConfigError, match=r"not ready after 0\.1 s"):
        await AsyncOmni.start(checkpoint, demo_config(start_timeout_s=0.1))
    await wait_until_there_are_only(children)
    assert queue_files() == files


async def test_a_start_that_is_cancelled_ends_its_engines(checkpoint: Path) -> None:
    """What SIGTERM does while the server loads."""
    files, children = queue_files(), set(multiprocessing.active_children())
    starting = asyncio.create_task(AsyncOmni.start(checkpoint, demo_config()))
    async with asyncio.timeout(DEADLINE_S):
        while set(multiprocessing.active_children()) <= children:  # noqa: ASYNC110 - until there is an engine's process
            await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await wait_until_there_are_only(children)
    assert queue_files() == files


async def test_an_engine_that_cannot_start_is_named_with_its_reason(checkpoint: Path) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    config = demo_config(stages={"talker": {"engine_args": {"block_size": 7}}})
    with pytest.raises(ConfigError, match="stage 'talker' did not start"):
        await AsyncOmni.start(checkpoint, config)
    await wait_until_there_are_only(children)
    assert queue_files() == files


async def test_a_start_that_fails_leaves_another_pipeline_of_the_process_alone(
    checkpoint: Path, whole: LiveOmni
) -> None:
    engines = whole.omni.engine_pids()
    with pytest.raises(ConfigError, match=r"not ready after 0\.5 s"):
        await AsyncOmni.start(checkpoint, demo_config(start_timeout_s=0.5))
    assert whole.omni.engine_pids() == engines
    assert {child.pid for child in multiprocessing.active_children()} >= set(engines.values())
    assert whole.answer(written((ChatMessage("user", (TextPart("Hello"),)),))).text


async def test_a_plan_with_windows_that_code2wav_cannot_hold_is_refused_before_anything_starts(
    checkpoint: Path,
) -> None:
    files, children = queue_files(), set(multiprocessing.active_children())
    config = demo_config(stages={"code2wav": {"max_model_len": 24, "max_num_batched_tokens": 240}})
    with pytest.raises(ConfigError, match="max_model_len of code2wav is 24"):
        await AsyncOmni.start(checkpoint, config)
    await wait_until_there_are_only(children)
    assert queue_files() == files


async def test_a_queue_that_shared_memory_has_no_room_for_is_refused_before_anything_starts(
    checkpoint: Path,
) -> None:
    config = demo_config(queue={"capacity": 4096}, stages={"thinker": {"max_num_batched_tokens": 1_000_000}})
    files, children = queue_files(), set(multiprocessing.active_children())
    with pytest.raises(ConfigError, match=r"needs \d+ MiB in /dev/shm .*--shm-size"):
        await AsyncOmni.start(checkpoint, config)
    assert set(multiprocessing.active_children()) <= children
    assert queue_files() == files


async def test_an_engine_that_dies_in_the_first_request_ends_the_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody supervises it yet."""
    files = queue_files()
    submit = AsyncOmni.submit

    async def kill_and_submit(
        omni: AsyncOmni, request: OmniRequest, deliver: Deliver, pinned_engine: None
    ) -> Generation:
        os.kill(omni.engine_pids()["talker"], signal.SIGKILL)
        return await submit(omni, request, deliver, pinned_engine)

    monkeypatch.setattr(AsyncOmni, "submit", kill_and_submit)
    expected = r"stage 'talker' has died: its engine process was killed \(SIGKILL\)"
    with pytest.raises(ConfigError, match=expected):
        await asyncio.wait_for(AsyncOmni.start(checkpoint, demo_config()), DEADLINE_S)
    assert queue_files() == files
