"""`omni-server bench`: from the command line to the results."""

import argparse
import asyncio
import json
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import numpy as np

from omni_server.bench.adapters import ADAPTERS, Question, images
from omni_server.bench.exchange import Client, PreparedRequest
from omni_server.bench.image_exchange import ImageClient
from omni_server.bench.load import Progress, Send, closed_loop, open_loop, poisson_arrivals_s
from omni_server.bench.plot import plot, require_matplotlib
from omni_server.bench.results import Host, Level, LoadKind, Run, Server, level_label, load_run
from omni_server.bench.table import comparison, summary, table
from omni_server.bench.workload import WORKLOADS, Workload, make_turn
from omni_server.client.discover import discover
from omni_server.client.stream import open_session

_KEEP_ALIVE_S = 2.0
"""Shorter than the keep-alive of servers (uvicorn: 5 s), so that no request uses a connection being
closed."""
_INTERRUPTED = 130


def run_command(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Returns the exit code. `args`: from `omni_server.bench.arguments.check`; `command`: the words as typed.
    Prints results to stdout and progress to stderr. Raises `ConfigError` for invalid settings before any
    load."""
    earlier = load_run(args.compare) if args.compare is not None else None
    if args.plot is not None:
        require_matplotlib()
    run = asyncio.run(_measure(args, command))
    sys.stdout.write(table(run) + "\n")
    if earlier is not None:
        sys.stdout.write("\n" + comparison(run, earlier) + "\n")
    if args.json is not None:
        args.json.write_text(run.model_dump_json(indent=1) + "\n")
    if args.plot is not None and run.levels:
        plot(run, dict(args.targets), args.plot)
    if any(level.interrupted for level in run.levels):
        return _INTERRUPTED
    return 1 if any(level.failures for level in run.levels) else 0


_WORKLOAD_FIELDS = (
    "modalities",
    "prompt_tokens",
    "audio_seconds",
    "text_tokens",
    "codec_tokens",
    "samples_per_codec_token",
    "size",
    "steps",
    "partial_images",
)


def chosen_workload(args: argparse.Namespace) -> Workload:
    """Returns the named workload with the command line's changes."""
    changes = {
        name: value for name, value in vars(args).items() if name in _WORKLOAD_FIELDS and value is not None
    }
    if args.modalities == "text":
        changes["codec_tokens"] = 0
    return WORKLOADS[args.workload].model_copy(update=changes)


def shown_command(command: Sequence[str]) -> str:
    """Returns the command, quoted for a shell, without the key and the script's folder."""
    words = [Path(command[0]).name, *command[1:]]
    for position, word in enumerate(words):
        if word == "--api-key":
            words[position + 1] = "..."
        elif word.startswith("--api-key="):
            words[position] = "--api-key=..."
    return shlex.join(words)


async def _measure(args: argparse.Namespace, command: Sequence[str]) -> Run:
    host = Host.this_machine()
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    workload = chosen_workload(args)
    seed = args.seed if args.seed is not None else secrets.randbelow(2**31)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    async with open_session(args.api_key, connector) as session:
        served = await discover(session, base_url, args.model, args.voice)
        question = Question(served.model, workload, args.temperature, served.voice, args.speech_stage)
        client: Client | ImageClient
        if workload.makes_images:
            client = ImageClient(session, f"{base_url}/v1/images/generations", workload, args.timeout)
        else:
            url = f"{base_url}/v1/chat/completions"
            client = Client(session, url, workload, args.sample_tolerance, args.timeout)
        version = f"{args.server} {served.version or ''}".rstrip()
        _say(f"{workload.name} against {served.model} at {base_url} ({version}), seed {seed}")
        levels = await _run_levels(args, question, seed, client.send)
    return Run(
        date=date,
        command=shown_command(command),
        host=host,
        server=Server(adapter=args.server, base_url=base_url, model=served.model, version=served.version),
        workload=workload,
        temperature=args.temperature,
        seed=seed,
        levels=levels,
    )


async def _run_levels(args: argparse.Namespace, question: Question, seed: int, send: Send) -> list[Level]:
    """Runs all levels. After Ctrl-C, returns those that had begun, the last one with the answers so far.

    The process ignores any further Ctrl-C, which would lose the results. The same `seed` gives the same
    requests and arrival times; prompts of different levels differ.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        # SIGINT is blocked meanwhile: asyncio restores Python's own handler, which would end the run.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _say("interrupted")
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    adapter = images if question.workload.makes_images else ADAPTERS[args.server]
    levels: list[Level] = []
    kind: LoadKind = "closed" if args.concurrency is not None else "open"
    for number, load in enumerate(args.concurrency or args.request_rate):
        label = level_label(kind, load)
        count = load * args.requests_per_client if kind == "closed" else args.num_requests
        prepared = []  # all before the first one is sent
        for index in range(args.warmup + count):
            turn = make_turn(question.workload, np.random.default_rng([seed, number, index]))
            prepared.append(PreparedRequest(index, json.dumps(adapter(question, turn)).encode()))
        warmup, measured = prepared[: args.warmup], prepared[args.warmup :]
        if warmup:
            clients = load if kind == "closed" else 1
            warm = await closed_loop(warmup, clients, send, Progress(planned=len(warmup)), stop)
            for reason in sorted(set(warm.failures)):
                _say(f"{label}: a request before the measurement failed: {reason}")
        if stop.is_set():
            levels.append(Level.of(kind, load, [], client_cpu_s=0.0, peak_in_flight=0, interrupted=True))
            break
        _say(f"{label}: {count} requests{_estimate(kind, load, count, levels)}")
        progress = Progress(planned=count)
        async with progress.shown(label, sys.stderr):
            if kind == "closed":
                level = await closed_loop(measured, load, send, progress, stop)
            else:
                arrivals_s = poisson_arrivals_s(load, count, np.random.default_rng([seed, number]))
                level = await open_loop(measured, load, arrivals_s, send, progress, stop)
        levels.append(level)
        if stop.is_set():
            break
        _say(summary(level))
    loop.remove_signal_handler(signal.SIGINT)
    return levels


def _estimate(kind: LoadKind, load: float, count: int, levels: Sequence[Level]) -> str:
    """Returns how long the level will take, if known."""
    if kind == "open":
        return f", about {count / load:.0f} s"
    if not levels or not levels[-1].requests_per_s:
        return ""
    return f", about {count / levels[-1].requests_per_s:.0f} s at the rate of {levels[-1].label}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
