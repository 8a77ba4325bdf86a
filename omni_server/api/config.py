"""Settings of the HTTP server, fixed at start."""

from dataclasses import dataclass, field

from omni_server.media.limits import MediaLimits


@dataclass(frozen=True)
class ApiConfig:
    host: str = "127.0.0.1"
    port: int = 8091
    """0 takes a free port; `run_server` tells which."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of `host` and `port`."""

    max_body_bytes: int = 128 * 1024 * 1024
    """Larger request bodies are answered with 413."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that http(s) URLs in requests may name; see `omni_server.media.source.MediaSource`."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    media_threads: int = 2
    """Media items that are decoded at the same time."""
    media_decode_timeout_s: float = 60.0
    """Time for one media item; a request whose item takes longer fails with 400."""
    media_queue_timeout_s: float = 30.0
    """Time that a media item waits for one of the `media_threads`; then its request fails with 503."""

    max_upload_bytes: int = 25_000_000
    """Larger sound files are refused with 413 by the transcription routes; OpenAI's limit."""
    max_upload_seconds: float = 1800.0
    """Longest sound that is transcribed. It is decoded as a whole: half an hour at 48 kHz takes 350 MB."""

    sse_keep_alive_s: float = 15.0
    """A comment is sent to a streaming client after this silence."""
    audio_history_ttl_s: int = 3600
    """How long an answer by voice can be referred to by its `audio.id` in later requests."""
    audio_history_entries: int = 4096
    """How many such answers are remembered; the oldest is forgotten first."""

    shutdown_timeout_s: float = 25.0
    """After SIGTERM, running requests get this long to finish."""
    http_keep_alive_s: int = 75
    """Idle connections are kept this long: longer than the 60 s of common load balancers, so that it is the
    balancer who closes and never finds a connection closed under it."""
    log_level: str = "info"
    access_log: bool = True
    docs: bool = True
    """Serve `/docs`, `/redoc` and `/openapi.json`."""
