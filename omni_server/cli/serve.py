"""`omni-server serve`: model folder, stage config and flags come together, then the server runs."""

import argparse
import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from omni_server.api.access import is_loopback
from omni_server.api.config import ApiConfig
from omni_server.api.listener import check_address
from omni_server.check.default_config import default_stage_config, describe
from omni_server.check.machine import refuse_cuda_build_without_gpu
from omni_server.check.placement import Quantization
from omni_server.cli.access_flags import access_settings, add_access_flags
from omni_server.cli.freed_memory import give_freed_memory_back
from omni_server.cli.limit_flags import add_limit_flags, limit_settings
from omni_server.cli.log_setup import LOG_FORMATS, LogFormat, log_progress, set_up_logging
from omni_server.cli.placement_flags import add_placement_flags, refuse_contradictions
from omni_server.cli.ready_message import ready_message
from omni_server.cli.standard_streams import Printer, lose_what_cannot_be_written
from omni_server.cli.values import port, seconds, seconds_or_zero
from omni_server.config.load import find_stage_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.demos import DEFAULT_DEMO, DEMOS
from omni_server.engine import fork_server
from omni_server.engine.environment import set_engine_environment
from omni_server.engine.progress import LONGEST_SILENCE_S
from omni_server.errors import ConfigError
from omni_server.family import load_family
from omni_server.generation import Generator
from omni_server.model_folder import (
    DEMO_CONFIG,
    EXAMPLE_MODEL,
    has_gpu,
    resolve_model_folder,
)
from omni_server.native_stderr import redirect_native_stderr

logger = logging.getLogger(__name__)

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOAD_FORMATS = ("auto", "safetensors", "dummy")

_DEFAULTS = ApiConfig()


@dataclass(frozen=True)
class ServeOptions:
    """What the command line asked for."""

    model: str
    stage_config: str | None
    use_cpu: bool
    quantization: Quantization | None
    served_model_names: tuple[str, ...]
    """Never empty; the first is what responses report."""
    revision: str | None
    load_format: str
    request_timeout_s: float | None
    """None: what the stage config says."""
    log_level: str
    log_format: LogFormat
    api: ApiConfig


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`; the flags have the names that they have in `vllm serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with an OpenAI-compatible API.",
        epilog="What concerns one stage (devices, memory, lengths, batching, sampling, vLLM's engine arguments) is set "
        "in the stage config; `omni-server config show` prints one. HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"local folder or hub id, such as {EXAMPLE_MODEL} (default: the demo model that comes with the program)",
    )
    model.add_argument("--model", metavar="MODEL", dest="model_flag", help="the same as a flag, as vLLM's images do")
    model.add_argument(
        "--demo", choices=tuple(DEMOS), help=f"which demo model to serve instead of MODEL (default: {DEFAULT_DEMO})"
    )
    add_placement_flags(model)
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="names that requests may use as `model`; responses report the first (default: MODEL, or speaking-demo "
        "for the demo model)",
    )
    model.add_argument("--revision", help="branch, tag or commit of the hub repository (default: its main branch)")
    model.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy: random weights, only config and tokenizer are read (default: %(default)s)",
    )
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host", default=_DEFAULTS.host, help="address to listen on; 0.0.0.0 is all (default: %(default)s)"
    )
    http.add_argument(
        "--port", type=port, default=_DEFAULTS.port, help="0 takes a free one and prints it (default: %(default)s)"
    )
    http.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of host and port")
    http.add_argument(
        "--root-path",
        metavar="PATH",
        default=_DEFAULTS.root_path,
        help="prefix of all paths that a proxy in front adds, as in /omni",
    )
    http.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=seconds,
        help="deadline of a request (default: request_timeout_s of the stage config)",
    )
    http.add_argument(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=seconds_or_zero,
        default=_DEFAULTS.shutdown_timeout_s,
        help="after SIGTERM, running requests get this long to finish (default: %(default)g)",
    )
    http.add_argument(
        "--chat-text-in-content",
        action="store_true",
        help="chat answers by voice have their text in `content` as well, for clients that show nothing else",
    )
    http.add_argument("--disable-fastapi-docs", action="store_true", help="no /docs and /openapi.json")
    add_access_flags(parser)
    add_limit_flags(parser)
    logs = parser.add_argument_group("logs and traces")
    logs.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="json: one object on each line, of the engines too (default: %(default)s)",
    )
    logs.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="of the server (default: %(default)s)")
    logs.add_argument(
        "--uvicorn-log-level",
        choices=(*LOG_LEVELS, "trace"),
        default=_DEFAULTS.log_level,
        help="of the HTTP server (default: %(default)s)",
    )
    logs.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line per request")
    logs.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces to this collector, over HTTP, as in http://localhost:4318/v1/traces; needs the "
        "extra otel (default: no traces)",
    )
    parser.set_defaults(run=lambda options: serve(_options(parser, options)))


def serve(options: ServeOptions) -> int:
    """Run until stopped. 0 after a clean shutdown; raises `ConfigError` before anything is served."""
    lose_what_cannot_be_written()
    set_up_logging(options.log_level, options.log_format)
    if options.api.uds is None and not options.api.api_keys and not is_loopback(options.api.host):
        logger.warning("no --api-key is set: everybody who reaches %s can use this server", options.api.host)
    check_address(options.api)  # before what takes seconds
    out = Printer()
    on_progress = log_progress if options.log_format == "json" else _progress_printer(out)
    config = _stage_config(options, on_progress)
    model_dir = resolve_model_folder(
        options.model,
        revision=options.revision,
        needs_weights=options.load_format != "dummy",
        on_progress=on_progress,
    )
    return _run(options, model_dir, config, on_progress, out)


def _run(
    options: ServeOptions, model_dir: Path, config: StageConfig, on_progress: Callable[[str], None], out: Printer
) -> int:
    _load_vllm(config, on_progress)
    # Of this process only: engines, which have been left a copy of it, see to their own.
    redirect_native_stderr()
    give_freed_memory_back()
    from omni_server.api.server import run_server
    from omni_server.check.damage import explained, refuse_damaged_files
    from omni_server.omni import AsyncOmni

    started: list[AsyncOmni] = []

    async def start() -> AsyncOmni:
        refuse_damaged_files(model_dir, config, load_format=options.load_format)
        try:
            omni = await AsyncOmni.start(
                model_dir,
                config,
                served_model_names=options.served_model_names,
                load_format=options.load_format,
                on_progress=on_progress,
            )
        except ConfigError as error:
            raise await asyncio.to_thread(
                explained, error, model_dir, config, load_format=options.load_format
            ) from error
        started.append(omni)
        return omni

    async def stop(_: Generator) -> None:
        for omni in started:
            await omni.stop()

    def on_ready(address: str) -> None:
        _freeze_heap()
        out(ready_message(address, started[0].model_info))
        if options.api.api_keys:
            out("This server needs a key: add -H 'Authorization: Bearer YOUR_KEY' to the command.\n")

    return asyncio.run(run_server(start, stop, options.api, on_ready))


def _load_vllm(config: StageConfig, on_progress: Callable[[str], None]) -> None:
    """Import it, and leave a copy of this process for the engines to be forked from."""
    set_engine_environment(config)
    family = load_family(config.model_family)
    with _announced("importing PyTorch and vLLM", on_progress):
        fork_server.import_engine_modules(family)
    fork_server.fork_from_here(family)


@contextlib.contextmanager
def _announced(what: str, on_progress: Callable[[str], None]) -> Iterator[None]:
    """Says `what` is going on, again and again while the block lasts."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(LONGEST_SILENCE_S):
            on_progress(what)

    on_progress(what)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # the process is to have one thread afterwards


def _stage_config(options: ServeOptions, on_progress: Callable[[str], None]) -> StageConfig:
    config = (
        _chosen_config(options, on_progress) if options.stage_config is None else _named_config(options, on_progress)
    )
    if config.platform == "cpu":
        refuse_cuda_build_without_gpu()
    if options.request_timeout_s is not None:
        config = config.model_copy(update={"request_timeout_s": options.request_timeout_s})
    return config


def _chosen_config(options: ServeOptions, on_progress: Callable[[str], None]) -> StageConfig:
    """Before the weights of a model on the hub are downloaded: its small files tell whether it can run."""
    folder = resolve_model_folder(
        options.model, revision=options.revision, needs_weights=False, on_progress=on_progress
    )
    config = default_stage_config(folder, options.model, use_cpu=options.use_cpu, quantization=options.quantization)
    on_progress(f"stage config made for this machine, {describe(config)}")
    return config


def _named_config(options: ServeOptions, on_progress: Callable[[str], None]) -> StageConfig:
    assert options.stage_config is not None
    refuse_contradictions(options.stage_config, options.quantization)
    path = find_stage_config(options.stage_config)
    on_progress(f"stage config {path}")
    config = load_stage_config(path)
    if config.platform == "cuda" and options.use_cpu:
        raise ConfigError(f"{path}: platform is cuda, which --cpu contradicts")
    if config.platform == "cuda" and not has_gpu():
        raise ConfigError(
            f"{path}: platform is cuda, but torch finds no NVIDIA GPU here; choose a config with platform cpu, "
            f"such as {DEMO_CONFIG}"
        )
    return config


def _options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> ServeOptions:
    if options.model is not None and options.model_flag is not None:
        parser.error("MODEL is given twice: as an argument and with --model")
    model = options.model if options.model is not None else options.model_flag
    if model == "":
        parser.error("MODEL is empty")
    if model is not None and options.demo is not None:
        parser.error("MODEL and --demo contradict each other: give one of them")
    if model is None and options.revision is not None:
        parser.error("--revision needs a MODEL")
    demo = DEMOS[options.demo or DEFAULT_DEMO]
    return ServeOptions(
        model=model or str(demo.path()),
        stage_config=options.stage_config,
        use_cpu=options.cpu,
        quantization=options.quantization,
        served_model_names=tuple(options.served_model_name or (model or demo.served_name,)),
        revision=options.revision,
        load_format=options.load_format,
        request_timeout_s=options.request_timeout,
        log_level=options.log_level,
        log_format=options.log_format,
        api=replace(
            limit_settings(access_settings(_DEFAULTS, options), options),
            host=options.host,
            port=options.port,
            uds=options.uds,
            chat_text_in_content=options.chat_text_in_content,
            root_path=_root_path(options.root_path),
            shutdown_timeout_s=options.shutdown_timeout,
            log_level=options.uvicorn_log_level,
            access_log=not options.disable_uvicorn_access_log,
            otlp_traces_endpoint=options.otlp_traces_endpoint,
            docs=not options.disable_fastapi_docs,
        ),
    )


def _freeze_heap() -> None:
    """What the start has made, torch and vLLM above all, lives as long as the process: the garbage collector need not
    look at it again, which halts every stream for a third of a second."""
    gc.collect()
    gc.freeze()


def _root_path(text: str) -> str:
    """Without the slash at the end, which would double the one that follows."""
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise ConfigError(f"--root-path {text!r} must begin with a slash")
    return path


def _progress_printer(out: Callable[[str], None]) -> Callable[[str], None]:
    begin = time.monotonic()

    def print_progress(message: str) -> None:
        out(f"[{time.monotonic() - begin:6.1f} s] {message}")

    return print_progress
