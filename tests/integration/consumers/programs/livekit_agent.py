"""LiveKit Agents' OpenAI plugin, called as its agent session calls it. Runs in LiveKit's own environment.

    livekit_agent.py cascade|tool|realtime|realtime-tool|read|stream SERVICES WAV

SERVICES is a program that makes the services `stt`, `llm` and `tts`, or for the realtime modes only `llm`, or
only `tts` to read, or `tts_service` to stream; WAV is mono, 16 bit, 16 kHz. Prints what came out as one JSON
object."""

import asyncio
import json
import runpy
import sys
import wave
from typing import Any

from livekit import rtc
from livekit.agents import APIConnectOptions, llm, stt, utils

TIMEOUT_S = 240
RATE = 24_000  # of realtime sessions


def recording(path: str) -> rtc.AudioFrame:
    with wave.open(path) as file:
        pcm = file.readframes(file.getnframes())
        return rtc.AudioFrame(pcm, file.getframerate(), 1, len(pcm) // 2)


@llm.function_tool
async def weather(place: str) -> str:
    """The weather somewhere.

    Args:
        place: A town.
    """
    return f"sunny in {place}"


async def cascade(services: dict[str, Any], wav: str) -> dict[str, object]:
    """Speech to text, the model's answer, the answer read aloud."""
    async with services["stt"] as recogniser:
        # Its own 5 s are short for a demo server on a busy machine.
        event = await recogniser.recognize(recording(wav), conn_options=APIConnectOptions(timeout=60.0))
    transcript = event.alternatives[0].text

    answerer = services["llm"]
    chat = llm.ChatContext.empty()
    chat.add_message(role="system", content="Answer briefly.")
    chat.add_message(role="user", content=transcript)
    text, usage = "", None
    async with answerer.chat(chat_ctx=chat) as chunks:
        async for chunk in chunks:
            text += (chunk.delta.content or "") if chunk.delta else ""
            usage = chunk.usage or usage
    await answerer.aclose()

    return await read(services, wav, text) | {
        "transcript": transcript,
        "final": event.type == stt.SpeechEventType.FINAL_TRANSCRIPT,
        "text": text,
        "completion_tokens": usage.completion_tokens if usage else None,
    }


async def read(services: dict[str, Any], wav: str, text: str = "Good morning!") -> dict[str, object]:
    """A text is read aloud."""
    samples, rates = 0, set()
    async with services["tts"] as reader, reader.synthesize(text) as pieces:
        async for piece in pieces:
            samples += piece.frame.samples_per_channel
            rates.add(piece.frame.sample_rate)
    return {"samples": samples, "sample_rates": sorted(rates)}


async def stream(services: dict[str, Any], wav: str) -> dict[str, object]:
    """A text is spoken while it is written."""
    samples = 0
    async with services["tts_service"] as reader, reader.stream() as speech:
        speech.push_text("Good ")
        speech.push_text("morning")
        early = await anext(speech)  # before the text ends
        speech.push_text("!")
        speech.end_input()
        async for piece in speech:
            samples += piece.frame.samples_per_channel
    return {"samples": samples + early.frame.samples_per_channel, "sample_rates": [early.frame.sample_rate]}


async def tool(services: dict[str, Any], wav: str) -> dict[str, object]:
    """The model calls a function of the agent, and answers with what it returned."""
    answerer = services["llm"]
    chat = llm.ChatContext.empty()
    chat.add_message(role="user", content="How is the weather in Oslo?")
    first = await answerer.chat(chat_ctx=chat, tools=[weather]).collect()
    calls = first.tool_calls
    for call in calls:
        chat.items.append(llm.FunctionCall(call_id=call.call_id, name=call.name, arguments=call.arguments))
        output = await weather(**json.loads(call.arguments))
        chat.items.append(
            llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=output, is_error=False)
        )
    second = await answerer.chat(chat_ctx=chat, tools=[weather]).collect()
    await answerer.aclose()
    return {"calls": [[call.name, call.arguments] for call in calls], "text": second.text}


async def realtime(services: dict[str, Any], wav: str) -> dict[str, object]:
    """A text and then a spoken turn in one session; the server finds the end of the turn."""
    realtime_model = services["llm"]
    session = realtime_model.session()
    errors: list[str] = []
    speech: list[str] = []
    generations: asyncio.Queue[llm.GenerationCreatedEvent] = asyncio.Queue()
    session.on("error", lambda event: errors.append(repr(event.error)))
    session.on("input_speech_started", lambda event: speech.append("started"))
    session.on("input_speech_stopped", lambda event: speech.append("stopped"))
    session.on("generation_created", generations.put_nowait)

    async def hear(generation: llm.GenerationCreatedEvent) -> dict[str, object]:
        samples, text = 0, ""

        async def count(frames: "utils.aio.Chan[rtc.AudioFrame]") -> None:
            nonlocal samples
            async for frame in frames:
                samples += frame.samples_per_channel

        async for message in generation.message_stream:
            listening = asyncio.create_task(count(message.audio_stream))
            async for piece in message.text_stream:
                text += piece
            await listening
        return {"samples": samples, "text": text}

    await session.update_instructions("Be brief.")
    chat = llm.ChatContext.empty()
    chat.add_message(role="user", content="Hello!")
    await session.update_chat_ctx(chat)
    asked = await hear(await session.generate_reply())
    while not generations.empty():
        generations.get_nowait()

    resampler = rtc.AudioResampler(16_000, RATE)
    frame = recording(wav)
    pcm = b"".join(bytes(piece.data) for piece in [*resampler.push(frame), *resampler.flush()]) + bytes(
        4 * RATE
    )
    piece = RATE // 50
    for begin in range(0, len(pcm) - 2 * piece, 2 * piece):
        session.push_audio(rtc.AudioFrame(pcm[begin : begin + 2 * piece], RATE, 1, piece))
        await asyncio.sleep(0.002)
    spoken = await hear(await generations.get())
    await session.aclose()
    await realtime_model.aclose()
    return {"asked": asked, "spoken": spoken, "speech": speech, "errors": errors}


async def realtime_tool(services: dict[str, Any], wav: str) -> dict[str, object]:
    """As `tool`, in a realtime session; the answer is spoken."""
    session = services["llm"].session()
    errors: list[str] = []
    session.on("error", lambda event: errors.append(repr(event.error)))
    await session.update_tools([weather])
    chat = llm.ChatContext.empty()
    chat.add_message(role="user", content="How is the weather in Oslo?")
    await session.update_chat_ctx(chat)

    first = await session.generate_reply()
    calls = [call async for call in first.function_stream]
    chat = session.chat_ctx.copy()
    for call in calls:
        output = await weather(**json.loads(call.arguments))
        chat.items.append(
            llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output=output, is_error=False)
        )
    await session.update_chat_ctx(chat)
    second = await session.generate_reply()
    text = ""
    async for message in second.message_stream:
        async for piece in message.text_stream:
            text += piece
    await session.aclose()
    await services["llm"].aclose()
    return {"calls": [[call.name, call.arguments] for call in calls], "text": text, "errors": errors}


async def main() -> None:
    mode, program, wav = sys.argv[1:]
    modes = {
        "cascade": cascade,
        "tool": tool,
        "realtime": realtime,
        "realtime-tool": realtime_tool,
        "read": read,
        "stream": stream,
    }
    async with asyncio.timeout(TIMEOUT_S), utils.http_context.open():
        report = await modes[mode](runpy.run_path(program), wav)
    sys.stdout.write(json.dumps(report))


asyncio.run(main())
