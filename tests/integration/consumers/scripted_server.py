"""The real API in a process of its own with a scripted model, which calls each function that it is offered
once, one per answer.

    python -m tests.integration.consumers.scripted_server PORT

The demo model has random weights: it never calls a function of its own accord.
"""

import asyncio
import json
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
    called = {call.name for message in request.messages for call in message.tool_calls}
    for tool in request.tools.tools if request.tools is not None else ():
        if tool.name not in called:
            fields = json.loads(tool.parameters).get("properties", {})
            arguments = json.dumps(dict.fromkeys(fields, "Oslo"))
            pieces = [ToolCallDelta(0, f"call_{len(called)}", tool.name, arguments[:9])]
            pieces.append(ToolCallDelta(0, None, None, arguments[9:]))
            return [TextDelta("", (1,)), *pieces, finished("tool_calls")]
    if request.structured_output is not None:
        return [TextDelta('{"city": ', (1,)), TextDelta('"Oslo"}', (2,)), finished()]
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
