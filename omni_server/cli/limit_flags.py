"""Flags of `omni-server serve` that bound what one request, one caller or all together may take."""

import argparse
from dataclasses import replace
from pathlib import Path

from omni_server.api.config import ApiConfig
from omni_server.cli.values import count, positive_count, seconds, size
from omni_server.errors import ConfigError

_DEFAULTS = ApiConfig()
_MEDIA = _DEFAULTS.media_limits


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue",
        metavar="N",
        type=count,
        default=_DEFAULTS.max_queue,
        help="requests and realtime sessions that run or wait; more get 503. 0 is no limit (default: %(default)s)",
    )
    limits.add_argument(
        "--max-concurrency-per-key",
        metavar="N",
        type=count,
        default=_DEFAULTS.max_concurrency_per_key,
        help="of these, the most of one API key; more get 429. 0 is no limit (default: %(default)s)",
    )
    limits.add_argument(
        "--max-header-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_header_bytes,
        help="all headers of a request together; larger ones get 431 (default: 64K)",
    )
    limits.add_argument(
        "--max-header-fields",
        metavar="N",
        type=positive_count,
        default=_DEFAULTS.max_header_fields,
        help="headers of a request; more get 431 (default: %(default)s)",
    )
    limits.add_argument(
        "--max-url-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_url_bytes,
        help="URL of a request; longer ones get 414 (default: 16K)",
    )
    limits.add_argument(
        "--header-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.header_timeout_s,
        help="time for a request's headers to arrive; slower ones get 408 (default: %(default)g)",
    )
    limits.add_argument(
        "--max-body-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_body_bytes,
        help="largest request body, in bytes or as in 64M; larger ones get 413 (default: 128M)",
    )
    limits.add_argument(
        "--body-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.body_timeout_s,
        help="time for a request's body to arrive; slower ones get 408 (default: %(default)g)",
    )
    limits.add_argument(
        "--max-total-body-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_total_body_bytes,
        help="of all request bodies that are held at a time; what is beyond gets 503 (default: 1G)",
    )
    limits.add_argument(
        "--max-unsent-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_unsent_bytes,
        help="of an answer that its client has not taken yet; slower clients are told and cut off (default: 64M)",
    )
    limits.add_argument(
        "--max-total-unsent-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_total_unsent_bytes,
        help="of all such answers; what is beyond is the end of the one with the most (default: 1G)",
    )
    limits.add_argument(
        "--send-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.http_send_timeout_s,
        help="an HTTP client that takes nothing it is sent for this time is cut off (default: %(default)g)",
    )
    media = parser.add_argument_group("media in requests")
    media.add_argument(
        "--allowed-media-domains",
        metavar="HOST[:PORT]",
        nargs="+",
        default=[],
        help="hosts that http(s) URLs of audio, images and videos may name; without a port, only the scheme's default "
        "port (default: none, only data URLs)",
    )
    media.add_argument(
        "--allowed-local-media-path",
        metavar="FOLDER",
        help="folder on this machine below which file: URLs may name files (default: no file: URLs)",
    )
    media.add_argument(
        "--max-media-size",
        metavar="SIZE",
        type=size,
        default=_MEDIA.max_bytes,
        help="largest audio, image or video, in bytes or as in 64M (default: 64M)",
    )
    media.add_argument(
        "--max-audio-duration",
        metavar="SECONDS",
        type=seconds,
        default=_MEDIA.max_audio_seconds,
        help="longest audio; Qwen2.5-Omni does not hear what is beyond 300 (default: %(default)g)",
    )
    media.add_argument(
        "--max-video-duration",
        metavar="SECONDS",
        type=seconds,
        default=_MEDIA.max_video_seconds,
        help="longest video (default: %(default)g)",
    )
    media.add_argument(
        "--max-image-pixels",
        metavar="N",
        type=positive_count,
        default=_MEDIA.max_image_pixels,
        help="width times height of a picture (default: %(default)s)",
    )
    media.add_argument(
        "--max-video-frame-pixels",
        metavar="N",
        type=positive_count,
        default=_MEDIA.max_video_frame_pixels,
        help="width times height of a video (default: %(default)s)",
    )
    media.add_argument(
        "--media-fetch-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_MEDIA.fetch_timeout_s,
        help="time to fetch one URL, redirects included (default: %(default)g)",
    )
    media.add_argument(
        "--media-decode-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.media_decode_timeout_s,
        help="time to decode one item (default: %(default)g)",
    )
    media.add_argument(
        "--max-upload-size",
        metavar="SIZE",
        type=size,
        default=_DEFAULTS.max_upload_bytes,
        help="largest sound file for transcriptions and translations (default: %(default)s bytes, as OpenAI's)",
    )
    media.add_argument(
        "--max-upload-duration",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.max_upload_seconds,
        help="longest sound for transcriptions and translations (default: %(default)g)",
    )
    realtime = parser.add_argument_group("sessions of /v1/realtime")
    realtime.add_argument(
        "--realtime-max-sessions",
        metavar="N",
        type=positive_count,
        default=_DEFAULTS.realtime_max_sessions,
        help="sessions at a time; one more gets 503 (default: %(default)s)",
    )
    realtime.add_argument(
        "--realtime-session-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.realtime_session_timeout_s,
        help="after this time a session is closed (default: %(default)g)",
    )
    realtime.add_argument(
        "--realtime-idle-timeout",
        metavar="SECONDS",
        type=seconds,
        default=_DEFAULTS.realtime_idle_timeout_s,
        help="as is one whose client has sent nothing for this time (default: %(default)g)",
    )


def limit_settings(config: ApiConfig, options: argparse.Namespace) -> ApiConfig:
    """`config` with what the flags say. Raises `ConfigError`."""
    if options.max_concurrency_per_key and not config.api_keys:
        raise ConfigError("--max-concurrency-per-key needs --api-key: without keys, callers cannot be told apart")
    if options.max_total_body_size < options.max_body_size:
        raise ConfigError("--max-total-body-size is less than --max-body-size: the largest body would never be taken")
    folder = options.allowed_local_media_path
    return replace(
        config,
        max_queue=options.max_queue,
        max_concurrency_per_key=options.max_concurrency_per_key,
        max_header_bytes=options.max_header_size,
        max_header_fields=options.max_header_fields,
        max_url_bytes=options.max_url_size,
        header_timeout_s=options.header_timeout,
        max_body_bytes=options.max_body_size,
        body_timeout_s=options.body_timeout,
        max_total_body_bytes=options.max_total_body_size,
        max_unsent_bytes=options.max_unsent_size,
        max_total_unsent_bytes=options.max_total_unsent_size,
        http_send_timeout_s=options.send_timeout,
        allowed_media_domains=tuple(options.allowed_media_domains),
        allowed_local_media_path=None if folder is None else Path(folder),
        media_limits=replace(
            config.media_limits,
            max_bytes=options.max_media_size,
            max_audio_seconds=options.max_audio_duration,
            max_video_seconds=options.max_video_duration,
            max_image_pixels=options.max_image_pixels,
            max_video_frame_pixels=options.max_video_frame_pixels,
            fetch_timeout_s=options.media_fetch_timeout,
        ),
        media_decode_timeout_s=options.media_decode_timeout,
        max_upload_bytes=options.max_upload_size,
        max_upload_seconds=options.max_upload_duration,
        realtime_max_sessions=options.realtime_max_sessions,
        realtime_session_timeout_s=options.realtime_session_timeout,
        realtime_idle_timeout_s=options.realtime_idle_timeout,
    )
