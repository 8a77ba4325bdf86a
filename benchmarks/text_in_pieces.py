"""Measure `/v1/audio/speech/stream` of a running server: sessions that begin together and send a word at a
time, with the texts and lengths of `scripts/bench_serving --workload tts`. Run it with `python -m`."""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from benchmarks.serving.exchange import AudioArrival, Playback, play
from benchmarks.serving.workload import WORKLOADS, make_turn, with_drawn_length


@dataclass
class Session:
    first_audio_s: float
    """From sending the piece that completes the first word."""
    word_s: list[float]
    """Of each word, from sending what completes the word behind it, whose token ends the word's piece of the
    alignment, to its `alignment` message."""
    playback: Playback


async def speak(http: aiohttp.ClientSession, url: str, interval_s: float, index: int, seed: int) -> Session:
    rng = np.random.default_rng([seed, index])
    workload = with_drawn_length(WORKLOADS["tts"], rng)
    words = make_turn(workload, rng).text.split()
    length = {"min_tokens": workload.codec_tokens, "max_tokens": workload.codec_tokens, "ignore_eos": True}
    async with http.ws_connect(f"{url}/v1/audio/speech/stream") as socket:
        await socket.send_json(
            {"type": "session.config", "alignment": True, "stage_sampling": {"talker": length}}
        )
        sent: list[float] = []
        answer = asyncio.create_task(_listen(socket))
        for number, word in enumerate(words):
            await socket.send_json({"type": "input.text", "text": f"{' ' if number else ''}{word}"})
            sent.append(time.perf_counter())
            await asyncio.sleep(interval_s)
        await socket.send_json({"type": "input.done"})
        sent.append(time.perf_counter())
        arrivals, aligned = await answer
    return Session(
        arrivals[0].time_s - sent[1],
        # Speech of a fixed length may end before the last words were given to the model.
        [seen - completed for completed, seen in zip([*sent[2:], sent[-1]], aligned, strict=False)],
        play(arrivals),
    )


async def _listen(socket: aiohttp.ClientWebSocketResponse) -> tuple[list[AudioArrival], list[float]]:
    """Returns the audio, and when each word's alignment came."""
    arrivals: list[AudioArrival] = []
    aligned: list[float] = []
    async for message in socket:
        now = time.perf_counter()
        if message.type is aiohttp.WSMsgType.BINARY:
            arrivals.append(AudioArrival(now, len(message.data) // 2))
            continue
        event = json.loads(message.data)
        if event["type"] == "alignment":
            aligned += [now] * len(event["words"])
        elif event["type"] == "error":
            raise SystemExit(f"the server answered: {event}")
        elif event["type"] == "session.done":
            return arrivals, aligned
    raise SystemExit("the connection ended before the speech")


async def measure(args: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await speak(http, args.base_url, args.interval, 0, args.seed + 1)  # a warm-up
        for number in args.sessions:
            spoken = await asyncio.gather(
                *(speak(http, args.base_url, args.interval, index, args.seed) for index in range(number))
            )
            underrun_s = [session.playback.underrun_s for session in spoken]
            print(
                f"{number} sessions, a word each {args.interval:g} s: first audio "
                f"{_spread([session.first_audio_s for session in spoken])}; words "
                f"{_spread([word for session in spoken for word in session.word_s])}; "
                f"{underrun_s.count(0)} play on, longest underrun {max(underrun_s):.3f} s",
                flush=True,
            )


def _spread(values: Sequence[float]) -> str:
    p50, p95 = np.percentile(values, (50, 95))
    return f"p50 {p50:.3f} s, p95 {p95:.3f} s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8091")
    parser.add_argument("--sessions", metavar="N,...", default="1,16,64")
    parser.add_argument("--interval", metavar="S", type=float, default=0.05, help="between words")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.sessions = [int(number) for number in options.sessions.split(",")]
    asyncio.run(measure(options))
