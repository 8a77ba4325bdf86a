"""The flags of `omni-server serve`, and the settings that result from them."""

import argparse
import ast
import inspect
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from omni_server.api.config import ApiConfig, CorsRules, TlsFiles
from omni_server.check.stage_flags import NO_STAGE_FLAGS, StageFlags
from omni_server.cli.command_line import (
    count,
    options_of,
    port,
    positive_count,
    seconds,
    seconds_or_zero,
    size,
)
from omni_server.cli.model_flags import (
    SPEAKING_DEMO,
    add_model_flags,
    add_stage_flags,
    refuse_two_models,
    stage_flags,
)
from omni_server.errors import ConfigError
from omni_server.media.limits import MediaLimits
from omni_server.platform.log_format import LOG_FORMATS, LogFormat

KEY_VARIABLES = ("OMNI_SERVER_API_KEY", "VLLM_API_KEY")
"""Read in this order; the second is vLLM's. An empty variable counts as unset."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOAD_FORMATS = ("auto", "safetensors", "dummy")

_DEFAULTS = ApiConfig()
_NO_TLS = TlsFiles(certfile="")

_UNITS: Mapping[str, tuple[str, Callable[[str], float], str]] = {
    "_bytes": ("_size", size, "SIZE"),
    "_seconds": ("_duration", seconds, "SECONDS"),
    "_s": ("", seconds, "SECONDS"),
}
"""By the end of a field's name: the end of its flag's name, and the type and name of its value."""
_OTHER_NAMES = {
    "access_log": "disable_uvicorn_access_log",
    "docs": "disable_fastapi_docs",
    "fetch_timeout_s": "media_fetch_timeout",
    "http_send_timeout_s": "send_timeout",
    "log_level": "uvicorn_log_level",
    "max_bytes": "max_media_size",
    "public_voice_lists": "public_voice_list",
    "served_model_names": "served_model_name",
    "tls": "ssl_certfile",
    **{name: f"ssl_{name}" for name in vars(_NO_TLS)},
}
"""Flags that are not named after their field."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The parsed and checked command line."""

    model: str | None = None
    """None serves the demo model."""
    speech_model: str | None = None
    """Reads the answers of `model` aloud."""
    stage_config: str | None = None
    use_cpu: bool = False
    stage_flags: StageFlags = NO_STAGE_FLAGS
    served_model_names: tuple[str, ...] = (SPEAKING_DEMO,)
    """Names that requests may use as `model`; responses report the first."""
    revision: str | None = None
    load_format: str = "auto"
    """dummy: random weights; only config and tokenizer are read."""
    request_timeout_s: float | None = None
    """Deadline of a request."""
    log_level: str = "info"
    """Of the server."""
    log_format: LogFormat = "text"
    """json: one JSON object per line, also for the engines."""
    api: ApiConfig


def add_serve_flags(parser: argparse.ArgumentParser, defaults: ApiConfig = _DEFAULTS) -> None:
    """Add all flags; most names are those of `vllm serve`. The name, type, default and help of a flag that
    sets a field of `ServeOptions`, `ApiConfig` or one of its parts are the field's."""
    for part in (ServeOptions(api=defaults), _NO_TLS, defaults.cors, defaults.media_limits, defaults):
        parser.set_defaults(**vars(part))
    parser.set_defaults(certfile=None)  # an empty name does not mean plain HTTP
    group = parser.add_argument_group("model")
    add_model_flags(group)
    group.add_argument(
        "--model", metavar="MODEL", dest="model_flag", help="MODEL as a flag, as vLLM's images pass it"
    )
    add_stage_flags(group)
    _add(
        group,
        "served_model_names",
        metavar="NAME",
        nargs="+",
        default=(),
        unset=f"MODEL, or {SPEAKING_DEMO} for the demo model",
    )
    _add(group, "load_format", choices=LOAD_FORMATS)

    group = parser.add_argument_group("HTTP")
    _add(group, "host")
    _add(group, "port", type=port)
    _add(group, "uds", "root_path", metavar="PATH")
    _add(group, "request_timeout_s", unset="request_timeout_s of the stage config")
    _add(group, "shutdown_timeout_s", type=seconds_or_zero)
    _add(group, "chat_text_in_content", "docs")

    group = parser.add_argument_group(
        "access",
        "Without an API key, everybody who can reach the server can use it. With one, every request except "
        "those for probes, /metrics and the web page needs the header 'Authorization: Bearer KEY'.",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        nargs="+",
        action="extend",
        help="API keys that clients may use; other users of the machine can see them in the process list "
        f"(default: the environment variable {' or '.join(KEY_VARIABLES)})",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file with one key per line; # begins a comment"
    )
    _add(group, "metrics_need_key")
    _add(group, "public_voice_lists", action=argparse.BooleanOptionalAction, unset="yes")
    _add(group, "allowed_origins", metavar="ORIGIN", nargs="+", unset="only the server's own page")
    _add(group, "allowed_methods", metavar="METHOD", nargs="+")
    _add(group, "allowed_headers", metavar="NAME", nargs="+")
    _add(group, "allow_credentials")

    group = parser.add_argument_group("TLS")
    _add(group, "certfile", "ca_certs", metavar="FILE")
    _add(group, "keyfile", metavar="FILE", unset="in --ssl-certfile")
    _add(group, "cert_reqs", type=int, choices=[0, 1, 2])
    _add(group, "ciphers", metavar="LIST")

    group = parser.add_argument_group(
        "limits", "SIZE is a number of bytes, or a number with a suffix, such as 512K, 64M, 1G."
    )
    _add(group, "max_queue", "max_concurrency_per_key", type=count, metavar="N")
    _add(group, "max_header_bytes", "max_header_fields", "max_url_bytes", "header_timeout_s")
    _add(group, "max_body_bytes", "body_timeout_s", "max_total_body_bytes")
    _add(group, "max_unsent_bytes", "max_total_unsent_bytes")
    _add(group, "max_speech_characters")
    _add(group, "voices_folder", metavar="FOLDER", type=Path, unset="in memory")
    _add(group, "max_audio_ahead_s", unset="no limit")
    _add(group, "http_send_timeout_s")

    group = parser.add_argument_group("media in requests")
    _add(group, "allowed_media_domains", metavar="HOST[:PORT]", nargs="+", unset="only data: URLs")
    _add(group, "allowed_local_media_path", metavar="FOLDER", type=Path, unset="no file: URLs")
    _add(group, "max_bytes", "max_audio_seconds", "max_video_seconds", "max_image_pixels")
    _add(group, "max_video_frame_pixels", "fetch_timeout_s", "media_decode_timeout_s")
    _add(group, "max_upload_bytes", "max_upload_seconds")

    _add(parser.add_argument_group("generated images"), "max_output_pixels", "max_image_steps")

    group = parser.add_argument_group("sessions of /v1/realtime")
    _add(group, "realtime_max_sessions", "realtime_session_timeout_s", "realtime_idle_timeout_s")

    group = parser.add_argument_group("logs and traces")
    _add(group, "log_format", choices=LOG_FORMATS)
    group.add_argument(
        "--log-level",
        dest="server_log_level",
        choices=LOG_LEVELS,
        default="info",
        help="log level of the server (default: %(default)s)",
    )
    _add(group, "log_level", choices=(*LOG_LEVELS, "trace"))
    _add(group, "access_log")
    _add(group, "otlp_traces_endpoint", metavar="URL", unset="no traces")


def serve_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> ServeOptions:
    """Exits with code 2, or raises `ConfigError`, if flags contradict each other."""
    if options.model is not None and options.model_flag is not None:
        parser.error("MODEL is given twice: as an argument and with --model")
    if options.model is None:
        options.model = options.model_flag
    refuse_two_models(parser, options)
    return options_of(
        ServeOptions,
        options,
        served_model_names=tuple(options.served_model_names or (options.model or SPEAKING_DEMO,)),
        stage_flags=stage_flags(options),
        log_level=options.server_log_level,
        api=_api_config(options),
    )


def flag_of(field: str) -> str:
    """The flag that sets a field of `ApiConfig`, or of one of its parts."""
    name = _OTHER_NAMES.get(field, field)
    for ending, (flag_ending, _, _) in _UNITS.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + flag_ending
            break
    return f"--{name.replace('_', '-')}"


def _add(
    group: "argparse._ArgumentGroup",
    *names: str,
    unset: str = "",
    **options: Any,  # noqa: ANN401 - argparse's
) -> None:
    """Adds flags for fields. `unset` says what happens without the flag if the field is empty then."""
    for name in names:
        default, inferred = options.get("default", group.get_default(name)), {}
        unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), None)
        if unit is not None:
            inferred = {"type": unit[1], "metavar": unit[2]}
        elif isinstance(default, bool):
            inferred = {"action": "store_false" if default else "store_true"}
        elif isinstance(default, int) and "type" not in options:
            inferred = {"type": positive_count, "metavar": "N"}
        arguments: dict[str, Any] = inferred | options
        text = _documentation()[name]
        if arguments.get("action") == "store_false":
            text = f"do not {text}"
        shown = _shown(default, arguments.get("type")) or unset
        group.add_argument(
            flag_of(name), dest=name, help=f"{text} (default: {shown})" if shown else text, **arguments
        )


@cache
def _documentation() -> Mapping[str, str]:
    """The docstrings of the fields, as a flag's help begins: in lower case, without a period at the end."""
    texts: dict[str, str] = {}
    for owner in (ServeOptions, TlsFiles, CorsRules, MediaLimits, ApiConfig):
        (declaration,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(declaration, ast.ClassDef)
        for pair in pairwise(declaration.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    words = " ".join(text.split()).removesuffix(".")
                    texts[name] = words if words[1].isupper() else words[0].lower() + words[1:]
    return texts


def _shown(default: object, kind: object) -> str:
    """A default as users would write it; empty if there is none, or the flag has no value or several."""
    match default:
        case None | bool() | tuple():
            return ""
        case int() if kind is size:
            units = ((30, "G"), (20, "M"), (10, "K"), (0, ""))
            shift, unit = next((shift, unit) for shift, unit in units if default % (1 << shift) == 0)
            return f"{default >> shift}{unit}"
        case int() | float():
            return f"{default:.12g}"
        case _:
            return str(default)


def _api_config(options: argparse.Namespace) -> ApiConfig:
    """Raises `ConfigError`."""
    lists = {
        field: _words(field, vars(options)[field])
        for field in ("allowed_origins", "allowed_methods", "allowed_headers")
    }
    lists["allowed_origins"] = tuple(origin.rstrip("/") for origin in lists["allowed_origins"])
    config = options_of(
        ApiConfig,
        options,
        root_path=_root_path(options.root_path),
        api_keys=_keys(options, os.environ),
        cors=options_of(CorsRules, options, **lists),
        tls=_tls(options),
        allowed_media_domains=tuple(options.allowed_media_domains),
        media_limits=options_of(MediaLimits, options),
    )
    if config.max_concurrency_per_key and not config.api_keys:
        raise ConfigError(
            "--max-concurrency-per-key needs --api-key: without keys, callers cannot be told apart"
        )
    if config.max_total_body_bytes < config.max_body_bytes:
        raise ConfigError(
            "--max-total-body-size is less than --max-body-size: the largest body would never be taken"
        )
    return config


def _root_path(text: str) -> str:
    """Strips the trailing slash, because the paths that follow begin with one."""
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise ConfigError(f"--root-path {text!r} must begin with a slash")
    return path


def _keys(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of all flags; the environment's key only if no flag gives one."""
    keys: tuple[str, ...] = tuple(options.api_key or ())
    if options.api_key_file is not None:
        from omni_server.api.access import read_key_file  # FastAPI, which takes half a second

        keys += read_key_file(Path(options.api_key_file))
    if keys:
        return keys
    return next(((value,) for name in KEY_VARIABLES if (value := environment.get(name))), ())


def _tls(options: argparse.Namespace) -> TlsFiles | None:
    certfile: str | None = options.certfile
    files = options_of(
        TlsFiles, options, certfile=certfile or "", cert_reqs=ssl.VerifyMode(options.cert_reqs)
    )
    if certfile is None:
        if files != _NO_TLS:
            raise ConfigError("TLS needs --ssl-certfile")
        return None
    if files.cert_reqs and files.ca_certs is None:
        raise ConfigError(
            "--ssl-cert-reqs needs --ssl-ca-certs: the authorities that sign clients' certificates"
        )
    return files


def _words(field: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Values of a `nargs="+"` flag; vLLM's users pass one JSON list."""
    if len(texts) == 1 and texts[0].startswith("["):
        try:
            return TypeAdapter(tuple[str, ...]).validate_json(texts[0])
        except ValidationError:
            raise ConfigError(f"{flag_of(field)}: '{texts[0]}' is not a JSON list of strings") from None
    return tuple(texts)
