"""The real API in a process of its own with a scripted model, which calls the first function that it is
offered.

    python -m tests.integration.consumers.scripted_server PORT

The demo model has random weights: it never calls a function of its own accord.
"""

import asyncio
import sys

import numpy as np

from omni_server.api.config import ApiConfig
from omni_server.api.server import run_server
from omni_server.generation import Deliver
from omni_server.types import AudioDelta, OmniRequest, TextDelta, ToolCallDelta
from tests.unit.api.fake_generator import FakeGeneration, FakeGenerator, ScriptEntry, finished

ANSWER = "It is sunny in Oslo."


class CallingGenerator(FakeGenerator):
    async def submit(self, request: OmniRequest, deliver: Deliver) -> FakeGeneration:
        self.script = _script(request)
        return await super().submit(request, deliver)


def _script(request: OmniRequest) -> list[ScriptEntry]:
    if request.tools and request.messages[-1].role != "tool":
        call = [ToolCallDelta(0, "call_1", "weather", '{"place":'), ToolCallDelta(0, None, None, ' "Oslo"}')]
        return [TextDelta("", (1,)), *call, finished("tool_calls")]
    script: list[ScriptEntry] = [TextDelta(ANSWER, (1,))]
    if request.speech is not None:
        tone = np.sin(np.arange(4800, dtype=np.float32) / 20) * np.float32(0.3)
        script += [AudioDelta(position * 4800, tone) for position in range(5)]
    return [*script, finished(codec_tokens=5 if request.speech else 0)]


async def main() -> None:
    async def start() -> CallingGenerator:
        return CallingGenerator()

    async def stop(generator: CallingGenerator) -> None:
        pass

    await run_server(start, stop, ApiConfig(port=int(sys.argv[1])), lambda address: None)


if __name__ == "__main__":
    asyncio.run(main())
