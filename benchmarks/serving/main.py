"""From the command line to the results."""

import argparse
import asyncio
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.serving.client import Served, discover, open_session
from benchmarks.serving.exchange import Client, PreparedRequest
from benchmarks.serving.load import Progress, closed_loop, open_loop, poisson_arrivals_s
from benchmarks.serving.requests import ADAPTERS, Adapter, image_generation, text_to_speech
from benchmarks.serving.results import Host, Level, LoadKind, Run, Server, level_label
from benchmarks.serving.table import table
from benchmarks.serving.workload import WORKLOADS, Workload, make_turn, with_drawn_length


def run_command(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Returns the exit code. `args`: from `benchmarks.serving.arguments.parse`; `command`: the words as
    typed. Prints results to stdout and progress to stderr. Raises `ConfigError` for invalid settings before
    any load."""
    run = asyncio.run(_measure(args, command))
    sys.stdout.write(table(run) + "\n")
    if args.json is not None:
        args.json.write_text(run.model_dump_json(indent=1) + "\n")
    if any(level.interrupted for level in run.levels):
        return 130
    return 1 if any(level.failures for level in run.levels) else 0


def chosen_workload(args: argparse.Namespace) -> Workload:
    """Returns the named workload with the command line's changes."""
    changes = {
        name: value
        for name, value in vars(args).items()
        if name in Workload.model_fields and value is not None
    }
    if "codec_tokens" in changes:
        changes["min_codec_tokens"] = None
    return WORKLOADS[args.workload].model_copy(update=changes)


async def _measure(args: argparse.Namespace, command: Sequence[str]) -> Run:
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    workload = chosen_workload(args)
    seed = args.seed if args.seed is not None else secrets.randbelow(10**9)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    path = "chat/completions"
    if workload.makes_images:
        path = "images/generations"
    elif workload.reads_aloud:
        path = "audio/speech"
    async with open_session(os.environ.get("OMNI_SERVER_API_KEY")) as session:
        served = await discover(session, base_url, args.model)
        server = Server(adapter=args.server, base_url=base_url, model=served.model, version=served.version)
        client = Client(session, f"{base_url}/v1/{path}", args.sample_tolerance, args.timeout)
        version = f"{args.server} {served.version or ''}".rstrip()
        _say(f"{workload.name} against {served.model} at {base_url} ({version}), seed {seed}")
        levels = await _run_levels(args, client, workload, served, seed)
    return Run(
        date=date,
        command=shlex.join([Path(command[0]).name, *command[1:]]),
        host=Host.this_machine(),
        server=server,
        workload=workload,
        seed=seed,
        levels=levels,
    )


async def _run_levels(
    args: argparse.Namespace, client: Client, workload: Workload, served: Served, seed: int
) -> list[Level]:
    """Runs all levels. After Ctrl-C, which cancels this task, returns those that had begun, the last one with
    the answers so far.

    The same `seed` gives the same requests and arrival times; prompts of different levels differ.
    """
    adapter: Adapter = ADAPTERS[args.server]
    if workload.makes_images:
        adapter = image_generation
    elif workload.reads_aloud:
        adapter = text_to_speech
    levels: list[Level] = []
    kind: LoadKind = "closed" if args.concurrency is not None else "open"
    for number, load in enumerate(args.concurrency or args.request_rate):
        label = level_label(kind, load)
        count = load * args.requests_per_client if kind == "closed" else args.num_requests
        prepared = []  # all before the first one is sent
        for index in range(args.warmup + count):
            rng = np.random.default_rng([seed, number, index])
            asked = with_drawn_length(workload, rng)
            body = adapter(served, asked, make_turn(asked, rng))
            prepared.append(PreparedRequest(index, json.dumps(body).encode(), asked))
        warmup, measured = prepared[: args.warmup], prepared[args.warmup :]
        warm, progress = Progress(args.warmup), Progress(count)
        try:
            await closed_loop(warmup, load if kind == "closed" else 1, client.send, warm)
            for reason in sorted({row.failure for row in warm.rows if row.failure is not None}):
                _say(f"{label}: a request before the measurement failed: {reason}")
            _say(f"{label}: {count} requests")
            arrivals_s = poisson_arrivals_s(load, count, np.random.default_rng([seed, number]))
            progress = Progress(count)  # begins now
            if kind == "closed":
                await closed_loop(measured, load, client.send, progress)
            else:
                await open_loop(measured, arrivals_s, client.send, progress)
        except asyncio.CancelledError:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would lose the results
            _say("interrupted")
            return [*levels, progress.level(kind, load, interrupted=True)]
        levels.append(progress.level(kind, load))
        _say(f"{label}: {levels[-1].requests_per_s:.3g} requests/s, {len(levels[-1].failures)} failed")
    return levels


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
