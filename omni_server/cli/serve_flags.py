"""The flags of `omni-server serve`, and the settings that result from them."""

import argparse
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from omni_server.api.config import ApiConfig, CorsRules, TlsFiles
from omni_server.check.placement import Quantization
from omni_server.cli.model_flags import SPEAKING_DEMO, add_model_flags, refuse_two_models
from omni_server.cli.placement_flags import add_placement_flags, add_quantization_flag
from omni_server.command_line import count, options_of, port, positive_count, seconds, seconds_or_zero, size
from omni_server.errors import ConfigError
from omni_server.log_format import LOG_FORMATS, LogFormat
from omni_server.media.limits import MediaLimits

KEY_VARIABLES = ("OMNI_SERVER_API_KEY", "VLLM_API_KEY")
"""Read in this order; the second is vLLM's. An empty variable counts as unset."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOAD_FORMATS = ("auto", "safetensors", "dummy")

_DEFAULTS = ApiConfig()

Limits = Mapping[tuple[str, str, Callable[[str], float]], str]
"""(Flag, field of `ApiConfig` or `MediaLimits`, type of the value) -> what the flag limits."""

_REQUEST_LIMITS: Limits = {
    ("--max-queue", "max_queue", count): (
        "requests and realtime sessions that may run or wait at the same time; more get 503; 0 is no limit"
    ),
    ("--max-concurrency-per-key", "max_concurrency_per_key", count): (
        "requests and realtime sessions of one API key at the same time; more get 429; 0 is no limit"
    ),
    (
        "--max-header-size",
        "max_header_bytes",
        size,
    ): "total size of a request's URL and headers; larger ones get 431",
    ("--max-header-fields", "max_header_fields", positive_count): (
        "number of a request's header fields; more get 431"
    ),
    ("--max-url-size", "max_url_bytes", size): "size of a request's URL; longer ones get 414",
    ("--header-timeout", "header_timeout_s", seconds): (
        "time for a request's headers to arrive; slower ones get 408"
    ),
    ("--max-body-size", "max_body_bytes", size): "size of a request's body; larger ones get 413",
    ("--body-timeout", "body_timeout_s", seconds): "time for a request's body to arrive; slower ones get 408",
    ("--max-total-body-size", "max_total_body_bytes", size): (
        "total size of the request bodies in memory; requests beyond it get 503"
    ),
    ("--max-unsent-size", "max_unsent_bytes", size): (
        "unsent part of one answer; if a client reads too slowly and the part grows larger, the answer ends "
        "with an error"
    ),
    ("--max-total-unsent-size", "max_total_unsent_bytes", size): (
        "unsent parts of all answers together; beyond it, the answer with the largest unsent part ends with "
        "an error"
    ),
    ("--max-audio-ahead", "max_audio_ahead_s", seconds): (
        "audio of a stream that the client has not played yet; the rest waits in the server"
    ),
    ("--send-timeout", "http_send_timeout_s", seconds): (
        "time after which an HTTP client that reads nothing is disconnected"
    ),
}
_MEDIA_LIMITS: Limits = {
    ("--max-media-size", "max_bytes", size): "size of one audio, image or video",
    ("--max-audio-duration", "max_audio_seconds", seconds): (
        "duration of one audio; Qwen2.5-Omni ignores audio beyond 300 s"
    ),
    ("--max-video-duration", "max_video_seconds", seconds): "duration of one video",
    ("--max-image-pixels", "max_image_pixels", positive_count): "width times height of an image",
    ("--max-video-frame-pixels", "max_video_frame_pixels", positive_count): "width times height of a video",
    ("--media-fetch-timeout", "fetch_timeout_s", seconds): "time to fetch one URL, redirects included",
    ("--media-decode-timeout", "media_decode_timeout_s", seconds): "time to decode one audio, image or video",
    ("--max-upload-size", "max_upload_bytes", size): (
        "size of an audio file to transcribe or translate; the default is OpenAI's"
    ),
    ("--max-upload-duration", "max_upload_seconds", seconds): "duration of audio to transcribe or translate",
}
_IMAGE_LIMITS: Limits = {
    ("--max-output-pixels", "max_output_pixels", positive_count): (
        "width times height of an image, beside the limit of the stage; four images, of 3 bytes per pixel, "
        "must fit --max-unsent-size"
    ),
    ("--max-image-steps", "max_image_steps", positive_count): (
        "denoising steps that a request may ask for; more get 400"
    ),
}
_REALTIME_LIMITS: Limits = {
    ("--realtime-max-sessions", "realtime_max_sessions", positive_count): "open sessions; more get 503",
    (
        "--realtime-session-timeout",
        "realtime_session_timeout_s",
        seconds,
    ): "time after which a session is closed",
    ("--realtime-idle-timeout", "realtime_idle_timeout_s", seconds): (
        "time after which a session whose client sends nothing is closed, unless it is being answered"
    ),
}


@dataclass(frozen=True)
class ServeOptions:
    """The parsed and checked command line."""

    model: str | None
    """None serves the demo model."""
    stage_config: str | None
    use_cpu: bool
    quantization: Quantization | None
    served_model_names: tuple[str, ...]
    """Never empty; responses report the first one."""
    revision: str | None
    load_format: str
    request_timeout_s: float | None
    """None uses the stage config's value."""
    log_level: str
    log_format: LogFormat
    api: ApiConfig


def add_serve_flags(parser: argparse.ArgumentParser, defaults: ApiConfig = _DEFAULTS) -> None:
    """Add all flags; most names are those of `vllm serve`. A flag stored under the name of a field of
    `ApiConfig` or `MediaLimits` sets that field and uses its default."""
    parser.set_defaults(**vars(defaults.media_limits) | vars(defaults))
    _add_model_flags(parser.add_argument_group("model"))
    _add_http_flags(parser.add_argument_group("HTTP"))
    access = (
        "Without an API key, everybody who can reach the server can use it. With one, every request except "
        "those for probes, /metrics and the web page needs the header 'Authorization: Bearer KEY'."
    )
    _add_access_flags(parser.add_argument_group("access", access))
    _add_tls_flags(parser.add_argument_group("TLS"))
    units = "SIZE is a number of bytes, or a number with a suffix, such as 512K, 64M, 1G."
    _add_limits(parser.add_argument_group("limits", units), _REQUEST_LIMITS)
    media = parser.add_argument_group("media in requests")
    media.add_argument(
        "--allowed-media-domains",
        metavar="HOST[:PORT]",
        nargs="+",
        help="hosts whose http(s) URLs requests may name for audio, images and videos; without a port, the "
        "scheme's default port only (default: none, only data: URLs)",
    )
    media.add_argument(
        "--allowed-local-media-path",
        metavar="FOLDER",
        type=Path,
        help="folder of this machine whose files requests may use with file: URLs (default: no file: URLs)",
    )
    _add_limits(media, _MEDIA_LIMITS)
    _add_limits(parser.add_argument_group("generated images"), _IMAGE_LIMITS)
    _add_limits(parser.add_argument_group("sessions of /v1/realtime"), _REALTIME_LIMITS)
    _add_log_flags(parser.add_argument_group("logs and traces"))


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
        served_model_names=tuple(options.served_model_name or (options.model or SPEAKING_DEMO,)),
        log_level=options.server_log_level,
        api=_api_config(options),
    )


def _add_model_flags(group: "argparse._ArgumentGroup") -> None:
    add_model_flags(group)
    group.add_argument(
        "--model", metavar="MODEL", dest="model_flag", help="MODEL as a flag, as vLLM's images pass it"
    )
    add_placement_flags(group)
    add_quantization_flag(group)
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="names that requests may use as `model`; responses report the first (default: MODEL, or "
        f"{SPEAKING_DEMO} for the demo model)",
    )
    group.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy: random weights; only config and tokenizer are read (default: %(default)s)",
    )


def _add_http_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--host", help="address to listen on; 0.0.0.0 is all (default: %(default)s)")
    group.add_argument(
        "--port",
        type=port,
        help="port to listen on; 0 takes a free one and prints it (default: %(default)s)",
    )
    group.add_argument("--uds", metavar="PATH", help="Unix socket to listen on, instead of host and port")
    group.add_argument(
        "--root-path",
        metavar="PATH",
        help="prefix that a proxy in front adds to all paths, as in /omni",
    )
    group.add_argument(
        "--request-timeout",
        dest="request_timeout_s",
        metavar="SECONDS",
        type=seconds,
        help="deadline of a request (default: request_timeout_s of the stage config)",
    )
    group.add_argument(
        "--shutdown-timeout",
        dest="shutdown_timeout_s",
        metavar="SECONDS",
        type=seconds_or_zero,
        help="time for running requests to finish after SIGTERM (default: %(default)g)",
    )
    group.add_argument(
        "--chat-text-in-content",
        action="store_true",
        help="also put the text of spoken chat answers into `content`, for clients that show only that field",
    )
    group.add_argument(
        "--disable-fastapi-docs",
        dest="docs",
        action="store_false",
        help="do not serve /docs and /openapi.json",
    )


def _add_access_flags(group: "argparse._ArgumentGroup") -> None:
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
    group.add_argument(
        "--metrics-need-key", action="store_true", help="require a key for /metrics and /load, too"
    )
    group.add_argument(
        "--public-voice-list",
        dest="public_voice_lists",
        action=argparse.BooleanOptionalAction,
        help="serve GET /v1/audio/voices and /v1/audio/models without a key, because Open WebUI sends none "
        "(default: yes)",
    )
    group.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        nargs="+",
        default=[],
        help="web sites whose pages may use the API from a browser, such as https://chat.example; * allows "
        "all sites (default: only the server's own page)",
    )
    group.add_argument(
        "--allowed-methods",
        metavar="METHOD",
        nargs="+",
        default=["*"],
        help="HTTP methods that these sites may use",
    )
    group.add_argument(
        "--allowed-headers",
        metavar="NAME",
        nargs="+",
        default=["*"],
        help="headers that these sites may send",
    )
    group.add_argument("--allow-credentials", action="store_true", help="let these sites send cookies")


def _add_tls_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="certificate chain, PEM; serves HTTPS instead of HTTP"
    )
    group.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="private key of the certificate, PEM (default: in --ssl-certfile)",
    )
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="certificate authorities for client certificates, PEM"
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[0, 1, 2],
        default=0,
        help="client certificates: 0 not requested, 1 verified if sent, 2 required (default: 0)",
    )
    group.add_argument(
        "--ssl-ciphers", metavar="LIST", help="OpenSSL cipher list for TLS 1.2 (default: uvicorn's)"
    )


def _add_limits(group: "argparse._ArgumentGroup", limits: Limits) -> None:
    for (flag, field, kind), text in limits.items():
        default = group.get_default(field)
        if default is None:
            shown = "no limit"
        else:
            shown = _shown_size(default) if kind is size else f"{default:.12g}"
        group.add_argument(
            flag,
            dest=field,
            metavar="SIZE" if kind is size else "SECONDS" if kind is seconds else "N",
            type=kind,
            help=f"{text} (default: {shown})",
        )


def _shown_size(num_bytes: int) -> str:
    """Formats a size as flags do, such as 64K."""
    units = ((30, "G"), (20, "M"), (10, "K"), (0, ""))
    shift, unit = next((shift, unit) for shift, unit in units if num_bytes % (1 << shift) == 0)
    return f"{num_bytes >> shift}{unit}"


def _add_log_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="json: one JSON object per line, also for the engines (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        dest="server_log_level",
        choices=LOG_LEVELS,
        default="info",
        help="log level of the server (default: %(default)s)",
    )
    group.add_argument(
        "--uvicorn-log-level",
        dest="log_level",
        choices=(*LOG_LEVELS, "trace"),
        help="log level of uvicorn, the HTTP server (default: %(default)s)",
    )
    group.add_argument(
        "--disable-uvicorn-access-log",
        dest="access_log",
        action="store_false",
        help="do not log a line per request",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="collector for OpenTelemetry traces, over HTTP, such as http://localhost:4318/v1/traces; "
        "needs the extra otel (default: no traces)",
    )


def _api_config(options: argparse.Namespace) -> ApiConfig:
    """Raises `ConfigError`."""
    config = options_of(
        ApiConfig,
        options,
        root_path=_root_path(options.root_path),
        api_keys=_keys(options, os.environ),
        cors=CorsRules(
            allowed_origins=tuple(
                origin.rstrip("/") for origin in _words("--allowed-origins", options.allowed_origins)
            ),
            allowed_methods=_words("--allowed-methods", options.allowed_methods),
            allowed_headers=_words("--allowed-headers", options.allowed_headers),
            allow_credentials=options.allow_credentials,
        ),
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
    if options.ssl_certfile is None:
        if options.ssl_keyfile or options.ssl_ca_certs or options.ssl_cert_reqs or options.ssl_ciphers:
            raise ConfigError("TLS needs --ssl-certfile")
        return None
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        raise ConfigError(
            "--ssl-cert-reqs needs --ssl-ca-certs: the authorities that sign clients' certificates"
        )
    tls = TlsFiles(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        ca_certs=options.ssl_ca_certs,
        cert_reqs=ssl.VerifyMode(options.ssl_cert_reqs),
    )
    return tls if options.ssl_ciphers is None else replace(tls, ciphers=options.ssl_ciphers)


def _words(flag: str, texts: list[str]) -> tuple[str, ...]:
    """Values of a `nargs="+"` flag; vLLM's users pass one JSON list."""
    if len(texts) == 1 and texts[0].startswith("["):
        try:
            return TypeAdapter(tuple[str, ...]).validate_json(texts[0])
        except ValidationError:
            raise ConfigError(f"{flag}: '{texts[0]}' is not a JSON list of strings") from None
    return tuple(texts)
