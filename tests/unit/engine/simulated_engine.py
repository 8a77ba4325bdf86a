"""An engine handle over an engine that is not there: what it builds, and what becomes of it."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_handle import EngineHandle
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.start_progress import StartProgress

CLEARED = ["killed", "frontend closed", "leftovers removed", "blocks ended", "closed"]


class Handle(EngineHandle):
    async def check_health(self) -> None:
        return

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(name, world.build)
        self._world = world

    def end_blocks(self) -> int:
        self._world.events.append("blocks ended")
        return super().end_blocks()


class World:
    """What the handle of a stage builds, and what becomes of it; notes what is asked of it."""

    def __init__(self, name: str = "talker") -> None:
        self.events: list[str] = []
        self.handle = Handle(self, name)
        self.handle.attach(self.built())
        self.build_errors: list[Exception] = []
        self.may_build = asyncio.Event()
        self.may_build.set()
        self.do_end = True
        self.end_s = 0.0

    def built(self) -> BuiltEngine:
        client = SimpleNamespace(
            errored=False,
            output_handler=None,
            output_processor=SimpleNamespace(),
            model_config=SimpleNamespace(max_model_len=64),
        )
        return BuiltEngine(cast(AsyncLLM, client), cast(EngineProcesses, Processes(self)))

    def die(self) -> None:
        cast(Any, self.handle.engine).errored = True

    async def build(self, progress: StartProgress) -> BuiltEngine:
        self.events.append("build")
        try:
            await self.may_build.wait()
        except asyncio.CancelledError:
            self.events.append("given up")
            raise
        if self.build_errors:
            raise self.build_errors.pop(0)
        self.events.append("built")
        return self.built()


class Processes:
    """Stands for `EngineProcesses`."""

    core_pid = 4711
    has_ended = False

    def __init__(self, world: World) -> None:
        self._world = world

    def why_ended(self) -> str:
        return "its engine process was killed (SIGKILL)"

    def kill(self) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would stand still"
        self._world.events.append("killed")

    def terminate(self) -> None:
        self._world.events.append("asked to end")

    def wait(self, timeout_s: float) -> bool:
        time.sleep(self._world.end_s)
        return self._world.do_end

    def close(self) -> None:
        self._world.events.append("closed")

    def remove_leftovers(self) -> None:
        self._world.events.append("leftovers removed")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def needs(world: World) -> None:
    async with world.handle.life.needed():
        await asyncio.Event().wait()
