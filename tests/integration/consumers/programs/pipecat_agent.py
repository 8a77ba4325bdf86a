"""Pipecat's OpenAI services in pipelines as its users build them. Runs in Pipecat's own environment.

    pipecat_agent.py cascade|tool|realtime|realtime-tool|read|stream SERVICES WAV

SERVICES is a program that makes the services `stt`, `llm` and `tts`, or for the realtime modes only `llm`, or
only `tts` to read or stream; WAV is mono, 16 bit, 16 kHz. Prints what came out of the pipeline as one JSON
object."""

import asyncio
import json
import runpy
import sys
import wave
from collections.abc import Awaitable, Callable
from typing import Any

from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    FunctionCallResultFrame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMRunFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams

TIMEOUT_S = 240
PIECE_S = 0.02


class Heard:
    """What listeners have seen pass, in either direction."""

    def __init__(self) -> None:
        self.text = ""
        self.transcripts: list[str] = []
        self.spoken = ""
        self.samples = 0
        self.sample_rates: set[int] = set()
        self.num_answers = 0
        self.num_utterances = 0
        self.num_interruptions = 0
        self.function_results: list[object] = []
        self.errors: list[str] = []
        self.changed = asyncio.Event()

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_done() and not self.errors:
                self.changed.clear()
                await self.changed.wait()


class Listener(FrameProcessor):
    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self._heard = heard

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case ErrorFrame():
                self._heard.errors.append(frame.error)
            case TranscriptionFrame():
                self._heard.transcripts.append(frame.text)
            case LLMTextFrame():
                self._heard.text += frame.text
            case TTSTextFrame():
                self._heard.spoken += frame.text
            case TTSAudioRawFrame():
                self._heard.samples += len(frame.audio) // 2
                self._heard.sample_rates.add(frame.sample_rate)
            case FunctionCallResultFrame():
                self._heard.function_results.append(frame.result)
            case LLMFullResponseEndFrame():
                self._heard.num_answers += 1
            case TTSStoppedFrame():
                self._heard.num_utterances += 1
            case InterruptionFrame():
                self._heard.num_interruptions += 1
        self._heard.changed.set()
        await self.push_frame(frame, direction)


async def drive(
    processors: list[FrameProcessor], rate: int, steps: Callable[[PipelineTask], Awaitable[None]]
) -> None:
    parameters = PipelineParams(audio_in_sample_rate=rate, audio_out_sample_rate=24_000)
    task = PipelineTask(Pipeline(processors), params=parameters)

    async def run_steps() -> None:
        try:
            await steps(task)
        finally:
            await task.cancel()

    await asyncio.gather(PipelineRunner(handle_sigint=False).run(task), run_steps())


async def speak(task: PipelineTask, pcm: bytes, rate: int) -> None:
    """As a microphone delivers it, but faster."""
    piece = 2 * int(rate * PIECE_S)
    for begin in range(0, len(pcm), piece):
        await task.queue_frame(InputAudioRawFrame(pcm[begin : begin + piece], rate, 1))
        await asyncio.sleep(PIECE_S / 10)


def recording(path: str) -> tuple[bytes, int]:
    with wave.open(path) as file:
        return file.readframes(file.getnframes()), file.getframerate()


async def cascade(services: dict[str, Any], wav: str, heard: Heard) -> None:
    """The three services of a cascade: a recording is written down, the model answers, the answer is read
    aloud."""
    stt, llm, tts = services["stt"], services["llm"], services["tts"]
    pcm, rate = recording(wav)

    async def recognise(task: PipelineTask) -> None:
        await task.queue_frame(VADUserStartedSpeakingFrame())
        await speak(task, pcm, rate)
        await task.queue_frame(VADUserStoppedSpeakingFrame())
        await heard.until(lambda: bool(heard.transcripts))

    await drive([stt, Listener(heard)], rate, recognise)

    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": heard.transcripts[0]},
    ]
    pair = LLMContextAggregatorPair(LLMContext(messages))

    async def answer(task: PipelineTask) -> None:
        await task.queue_frame(LLMRunFrame())
        await heard.until(lambda: heard.num_answers > 0 and heard.num_utterances > 0)

    await drive([pair.user(), llm, Listener(heard), tts, Listener(heard), pair.assistant()], rate, answer)


async def tool(services: dict[str, Any], wav: str, heard: Heard) -> None:
    """The model calls a function of the agent, and answers with what it returned. For either kind of
    service."""

    async def look_up(parameters: FunctionCallParams) -> None:
        await parameters.result_callback({"weather": f"sunny in {parameters.arguments['place']}"})

    llm = services["llm"]
    llm.register_function("weather", look_up)
    weather = FunctionSchema("weather", "The weather somewhere.", {"place": {"type": "string"}}, ["place"])
    context = LLMContext([{"role": "user", "content": "How is the weather in Oslo?"}], ToolsSchema([weather]))
    pair = LLMContextAggregatorPair(context)

    async def ask(task: PipelineTask) -> None:
        await task.queue_frame(LLMRunFrame())
        await heard.until(lambda: bool(heard.function_results and heard.text) and heard.num_answers >= 2)

    await drive([pair.user(), llm, Listener(heard), pair.assistant()], 16_000, ask)


async def realtime(services: dict[str, Any], wav: str, heard: Heard) -> None:
    """A text and then a spoken turn in one session; the server finds the end of the turn."""
    llm = services["llm"]
    pair = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": "Say hello!"}]))
    pcm, rate = recording(wav)

    async def talk(task: PipelineTask) -> None:
        await task.queue_frame(LLMRunFrame())
        await heard.until(lambda: heard.num_answers >= 1)
        await speak(task, pcm + bytes(2 * rate), rate)
        await heard.until(lambda: heard.num_answers >= 2)

    await drive([pair.user(), llm, Listener(heard), pair.assistant()], rate, talk)


async def read(services: dict[str, Any], wav: str, heard: Heard) -> None:
    """A text is read aloud."""

    async def speak_up(task: PipelineTask) -> None:
        await task.queue_frame(TTSSpeakFrame("Good morning!"))
        await heard.until(lambda: heard.num_utterances > 0)

    await drive([services["tts"], Listener(heard)], 24_000, speak_up)


async def stream(services: dict[str, Any], wav: str, heard: Heard) -> None:
    """Two answers are spoken while they are written; the user interrupts the first one."""

    async def write(task: PipelineTask) -> None:
        await task.queue_frames([LLMFullResponseStartFrame(), LLMTextFrame("Never "), LLMTextFrame("mind")])
        await heard.until(lambda: heard.samples > 0)
        await task.queue_frame(InterruptionFrame())
        await heard.until(lambda: heard.num_interruptions > 0)
        before, heard.num_utterances = heard.samples, 0
        await task.queue_frames([LLMFullResponseStartFrame(), LLMTextFrame("Good "), LLMTextFrame("morning")])
        await heard.until(lambda: heard.samples > before)  # before the text ends
        await task.queue_frames([LLMTextFrame("!"), LLMFullResponseEndFrame()])
        await heard.until(lambda: heard.num_utterances > 0)
        heard.samples -= before

    await drive([services["tts"], Listener(heard)], 24_000, write)


MODES = {
    "cascade": cascade,
    "tool": tool,
    "realtime": realtime,
    "realtime-tool": tool,
    "read": read,
    "stream": stream,
}


async def main() -> None:
    mode, program, wav = sys.argv[1:]
    services = runpy.run_path(program)
    heard = Heard()
    try:
        await MODES[mode](services, wav, heard)
    except TimeoutError:
        heard.errors.append("timed out")
    report = {name: value for name, value in vars(heard).items() if name != "changed"}
    report["sample_rates"] = sorted(heard.sample_rates)
    sys.stdout.write(json.dumps(report))


asyncio.run(main())
