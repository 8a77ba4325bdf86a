"""`omni-server serve`: prepares the model folder and the stage config, then runs the server."""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omni_server.audio.formats import AUDIO_FORMATS
from omni_server.cli.process import (
    Printer,
    drop_unwritable_output,
    progress_printer,
    raise_descriptor_limit,
    return_freed_memory,
)
from omni_server.cli.serve_flags import ServeOptions, add_serve_flags, serve_options
from omni_server.config.stage_config import StageConfig
from omni_server.engine import fork_server
from omni_server.engine.environment import set_engine_environment
from omni_server.family import load_family
from omni_server.platform.log_format import set_up_logging
from omni_server.platform.native_stderr import redirect_native_stderr
from omni_server.types import ModelInfo
from omni_server.version import VERSION

if TYPE_CHECKING:  # imported when the engines start
    from omni_server.generation import Generator
    from omni_server.omni import AsyncOmni

logger = logging.getLogger(__name__)

_SAVE_AUDIO = (
    "import base64, json, sys; a = json.load(sys.stdin)['choices'][0]['message']['audio']; "
    "open('answer.wav', 'wb').write(base64.b64decode(a['data'])); print('answer.wav:', a['transcript'])"
)
_SAVE_IMAGE = (
    "import base64, json, sys; data = json.load(sys.stdin)['data'][0]['b64_json']; "
    "open('image.png', 'wb').write(base64.b64decode(data)); print('image.png')"
)
_PRINT_TEXT = "import json, sys; print(json.load(sys.stdin)['choices'][0]['message']['content'])"


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a model over HTTP, with an OpenAI-compatible API."
    parser.epilog = (
        "Everything else that concerns a stage (devices, memory, lengths, batching, sampling, vLLM's engine "
        "arguments) is set in the stage config; `omni-server config show` prints one. HF_HOME, HF_TOKEN and "
        "HF_HUB_OFFLINE are honoured."
    )
    add_serve_flags(parser)
    parser.set_defaults(run=lambda options: serve(serve_options(parser, options)))


def serve(options: ServeOptions) -> int:
    """Runs until stopped. Returns 0 after a clean shutdown; raises `ConfigError` before serving."""
    drop_unwritable_output()
    set_up_logging(options.log_level, options.log_format)
    raise_descriptor_limit()
    out = Printer()
    on_progress: Callable[[str], None] = (
        partial(logger.info, "%s") if options.log_format == "json" else progress_printer(out)
    )
    on_progress(f"omni-server {VERSION} starts with {options.model or 'the demo model'}")
    # Imports that take seconds come after the first line.
    from omni_server.api.access import ApiKeys, is_loopback
    from omni_server.api.listener import check_address
    from omni_server.cli.pipeline import prepare

    if options.api.uds is None and not options.api.api_keys and not is_loopback(options.api.host):
        logger.warning("no --api-key is set: everybody who reaches %s can use this server", options.api.host)
    # Before the steps that take seconds.
    check_address(options.api)
    ApiKeys(options.api.api_keys)
    if options.api.tls is not None:
        options.api.tls.context()
    model_dir, config = prepare(options, on_progress)
    return _run(options, model_dir, config, on_progress, out)


def _run(
    options: ServeOptions,
    model_dir: Path,
    config: StageConfig,
    on_progress: Callable[[str], None],
    out: Printer,
) -> int:
    _load_vllm(config, on_progress)
    # Engines are forked from an earlier copy of this process; they make these calls themselves.
    redirect_native_stderr()
    return_freed_memory()
    from omni_server.api.server import run_server
    from omni_server.cli.pipeline import running

    pipeline = contextlib.AsyncExitStack()
    started: list[AsyncOmni] = []

    async def start() -> "AsyncOmni":
        omni = await pipeline.enter_async_context(running(options, model_dir, config, on_progress))
        started.append(omni)
        return omni

    async def stop(_: "Generator") -> None:
        await pipeline.aclose()

    def on_ready(address: str) -> None:
        # Requests leave little garbage, and each collection stops all streams. With Python's threshold of 700,
        # collections took a fifth of the time in which a burst of requests starts (benchmarks/history.md).
        gc.set_threshold(50_000)
        out(ready_message(address, started[0].model_info))
        if options.api.api_keys:
            out("This server needs a key: add -H 'Authorization: Bearer YOUR_KEY' to the command.\n")

    return asyncio.run(run_server(start, stop, options.api, on_ready))


def _load_vllm(config: StageConfig, on_progress: Callable[[str], None]) -> None:
    """Imports vLLM and forks a copy of this process, the parent of engines."""
    set_engine_environment(config)
    family = load_family(config.model_family)
    on_progress("importing PyTorch and vLLM")
    fork_server.import_engine_modules(family)
    fork_server.fork_from_here(family)


def ready_message(address: str, model: ModelInfo) -> str:
    """`address` is the server's URL, or `unix:` and a socket's path."""
    lines = [
        "",
        "Ready.",
        f"  URL      {address if _socket_path(address) else f'{address}/v1'}",
        f"  Model    {', '.join((model.name, *model.aliases))}",
    ]
    if _socket_path(address) is None:
        lines.insert(3, f"  Page     {address}/")
    if model.image_sizes:
        lines.append(f"  Sizes    {', '.join(map(str, model.image_sizes))}")
    elif model.clones_voices:
        lines.append("  Voices   those of recordings that are sent to /v1/audio/voices")
    elif model.voices:
        lines.append(f"  Voices   {', '.join(_marked_default(model))}")
        lines.append(f"  Formats  {', '.join(AUDIO_FORMATS)}")
    else:
        lines.append("  Voices   none: this deployment answers in text only")
    if model.about is not None and model.about.notice is not None:
        lines.append(f"  Note     {model.about.notice}")
    lines += ["", "Try it:", "", curl_example(address, model), ""]
    return "\n".join(lines)


def curl_example(address: str, model: ModelInfo) -> str:
    """A shell command that asks the server one question and writes answer.wav if it speaks, or that writes
    image.png."""
    path = _socket_path(address)
    reach = f"--unix-socket {shlex.quote(path)} http://localhost" if path else address
    if model.image_features.needs_input_image:
        return (
            f"curl -sS {reach}/v1/images/edits -F model={shlex.quote(model.name)} \\\n"
            "  -F image=@photo.jpg -F prompt='Make it night' \\\n"
            f'  | python3 -c "{_SAVE_IMAGE}"'
        )
    body: dict[str, object] = {"model": model.name}
    if model.clones_voices:
        body |= {"input": "Hello, who are you?", "voice": "me", "response_format": "wav"}
        upload = (
            f"curl -sS {reach}/v1/audio/voices -F name=me -F consent='my own voice' -F audio_sample=@me.wav"
        )
        return f"{upload}\n{_posting(reach, 'audio/speech', body, '-o answer.wav')}"
    if model.voices and model.text_stage is None:
        body |= {"input": "Hello, who are you?", "voice": model.default_voice, "response_format": "wav"}
        return _posting(reach, "audio/speech", body, "-o answer.wav")
    if model.voices:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": model.default_voice, "format": "wav"}}
    if model.image_sizes:
        endpoint, program = "images/generations", _SAVE_IMAGE
        body["prompt"] = "A lighthouse at dusk"
    else:
        endpoint, program = "chat/completions", _SAVE_AUDIO if model.voices else _PRINT_TEXT
        body["messages"] = [{"role": "user", "content": "Hello, who are you?"}]
    return _posting(reach, endpoint, body, f'| python3 -c "{program}"')


def _posting(reach: str, endpoint: str, body: dict[str, object], output: str) -> str:
    return (
        f"curl -sS {reach}/v1/{endpoint} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))} \\\n  {output}"
    )


def _socket_path(address: str) -> str | None:
    """The path of a Unix socket, or None if `address` is a URL."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def _marked_default(model: ModelInfo) -> list[str]:
    return [f"{voice} (default)" if voice == model.default_voice else voice for voice in model.voices]
