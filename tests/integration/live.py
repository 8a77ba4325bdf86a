"""A running pipeline for tests: its own event loop in a thread, so that tests may share it across loops."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from omni_server.config.load import load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.errors import StageDeadError
from omni_server.metrics.stage_metrics import QueueLevel
from omni_server.offline import OmniOutput, collect
from omni_server.omni import AsyncOmni
from omni_server.types import (
    AudioDelta,
    ChatMessage,
    OmniEvent,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
)

T = TypeVar("T")

START_TIMEOUT_S = 900.0
RELEASE_TIMEOUT_S = 10.0
RESTART_TIMEOUT_S = 120.0
DEMO_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen2_5_omni.demo-cpu.yaml"

GREEDY_TALKER = SamplingConfig(temperature=0.0, repetition_penalty=1.05, max_tokens=60)


def demo_config(**changes: Any) -> StageConfig:
    """The shipped demo config, changed: `stages={"talker": {...}}`, `queue={...}`, `chunks={...}`."""
    return changed_config(load_stage_config(DEMO_CONFIG), **changes)


def changed_config(config: StageConfig, **changes: Any) -> StageConfig:
    raw = config.model_dump(by_alias=True)
    for name, fields in changes.pop("stages", {}).items():
        engine_args = raw["stages"][name]["engine_args"] | fields.get("engine_args", {})
        raw["stages"][name] |= {**fields, "engine_args": engine_args}
    for edge in raw["edges"]:
        if edge["chunks"] is None:
            edge["queue"].update(changes.get("queue", {}))
        else:
            edge["chunks"].update(changes.get("chunks", {}))
    changes.pop("queue", None)
    changes.pop("chunks", None)
    return StageConfig.model_validate(raw | changes)


class LiveOmni:
    """`AsyncOmni` in a background thread."""

    def __init__(self, model_dir: Path, config: StageConfig, *, load_format: str = "auto") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.config = config
        try:
            self.omni = self.run(AsyncOmni.start(model_dir, config, load_format=load_format), START_TIMEOUT_S)
        except BaseException:
            self._stop_loop()
            raise

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def answer(self, request: OmniRequest) -> OmniOutput:
        return self.run(collect(self.omni, request))

    def answers(self, requests: Sequence[OmniRequest]) -> list[OmniOutput]:
        """All at once; results in the order of `requests`."""

        async def together() -> list[OmniOutput]:
            return await asyncio.gather(*(collect(self.omni, request) for request in requests))

        return self.run(together())

    def answers_at_once(
        self, requests: Sequence[OmniRequest], stages: Sequence[str] = ("thinker", "talker")
    ) -> list[OmniOutput]:
        """Each of the `stages` stands still until it has all requests."""

        async def answers() -> list[OmniOutput]:
            async with AsyncExitStack() as stack:
                for number, stage in reversed(list(enumerate(stages))):
                    until = dict.fromkeys(stages[:number], 0) | {stage: len(requests)}
                    await stack.enter_async_context(self.stopped(stage, until))
                collecting = asyncio.gather(*(collect(self.omni, request) for request in requests))
            return await collecting

        return self.run(answers())

    def events(self, request: OmniRequest) -> list[OmniEvent]:
        async def all_events() -> list[OmniEvent]:
            return [event async for event in self.omni.events(request)]

        return self.run(all_events())

    def events_with_a_pause(self, request: OmniRequest, num_tokens: int) -> list[OmniEvent]:
        """Stops the thinker after `num_tokens`, until half a second after that and the first audio."""
        thinker = self.omni.engine_pids()["thinker"]
        events: list[OmniEvent] = []

        async def all_events() -> None:
            stream = self.omni.events(request)
            while sum(len(event.token_ids) for event in events if isinstance(event, TextDelta)) < num_tokens:
                events.append(await anext(stream))
            os.kill(thinker, signal.SIGSTOP)
            while not any(isinstance(event, AudioDelta) for event in events):
                events.append(await anext(stream))
            await asyncio.sleep(0.5)
            os.kill(thinker, signal.SIGCONT)
            events.extend([event async for event in stream])

        try:
            self.run(all_events())
        finally:
            os.kill(thinker, signal.SIGCONT)
        return events

    @asynccontextmanager
    async def stopped(self, stage: str, until: Mapping[str, int]) -> AsyncIterator[None]:
        """From the block on, the stage stands still until the stages have this many requests."""
        pid = self.omni.engine_pids()[stage]
        wanted = {f'omni_active_requests{{stage="{name}"}} {number}.0' for name, number in until.items()}
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                while not wanted <= set(self.omni.metrics_text().decode().splitlines()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill_while_speaking(self, stage: str, request: OmniRequest) -> None:
        """Kills the stage in the middle of the answer to `request`, and waits until it has started again."""
        pids = self.omni.engine_pids()

        async def speak_and_kill() -> None:
            is_killed = False
            async for event in self.omni.events(request):
                if isinstance(event, AudioDelta) and not is_killed:
                    os.kill(pids[stage], signal.SIGKILL)
                    is_killed = True

        with pytest.raises(StageDeadError, match=stage):
            self.run(speak_and_kill())
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while self.omni.stage_down() is not None or stage not in self.omni.engine_pids():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        now = self.omni.engine_pids()
        assert {name for name in pids if now[name] != pids[name]} == {stage}

    def held_rows(self) -> int:
        """What is not released within `RELEASE_TIMEOUT_S`: a worker hears of a request's end with the step
        after it, and this question may be taken before that step."""
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while (
            held := sum(self.run(self.omni.worker_count("num_row_requests")).values())
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return held

    def num_resumed(self) -> dict[str, int]:
        return self.run(self.omni.worker_count("num_resumed"))

    def num_steady_steps(self) -> dict[str, int]:
        return self.run(self.omni.worker_count("num_steady_steps"))

    def runner_generations(self) -> dict[str, int]:
        return self.run(self.omni.worker_count("runner_generation"))

    def row_slots(self) -> QueueLevel:
        (slots,) = self.omni.row_slots().values()
        return slots

    def close(self) -> None:
        self.run(self.omni.stop())
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_numbers = iter(range(1_000_000))


def spoken(
    messages: tuple[ChatMessage, ...],
    voice: str = "Chelsie",
    *,
    thinker: SamplingConfig | None = None,
    talker: SamplingConfig | None = None,
    noise_seed: int = 7,
    deadline_s: float | None = None,
) -> OmniRequest:
    """A request that is answered by voice, greedy in both stages unless told otherwise."""
    return OmniRequest(
        f"test-{next(_numbers)}",
        messages,
        SpeechOutput(voice, noise_seed),
        {
            "thinker": thinker or SamplingConfig(temperature=0.0, max_tokens=40),
            "talker": talker or GREEDY_TALKER,
        },
        deadline_s=deadline_s,
    )


def written(messages: tuple[ChatMessage, ...], *, thinker: SamplingConfig | None = None) -> OmniRequest:
    """A request that is answered in text only."""
    sampling = {"thinker": thinker or SamplingConfig(temperature=0.0, max_tokens=40)}
    return OmniRequest(f"test-{next(_numbers)}", messages, None, sampling)


def queue_files(pid: int | None = None) -> set[Path]:
    """Shared-memory queues that the process (this one) has created."""
    return set(Path("/dev/shm").glob(f"omni-server-{os.getpid() if pid is None else pid}-*"))
