"""Settings of the HTTP server, fixed at start."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from omni_server.media.limits import MediaLimits


@dataclass(frozen=True)
class CorsRules:
    """Which web sites may use the API from a browser; names and meanings are those of `vllm serve`."""

    allowed_origins: tuple[str, ...] = ()
    """As in `https://chat.example`; `*` is every site. Empty switches CORS off."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True)
class TlsFiles:
    """HTTPS: paths, as uvicorn's arguments of the same names."""

    certfile: str
    """Certificate chain, PEM."""
    keyfile: str | None = None
    """Private key, PEM; None: it is in `certfile`."""
    ca_certs: str | None = None
    """Certificates of the authorities whose clients are accepted, PEM."""
    cert_reqs: ssl.VerifyMode = ssl.CERT_NONE
    """Whether clients must show a certificate."""
    ciphers: str = "TLSv1"
    """OpenSSL's cipher list, for TLS up to 1.2. uvicorn's default; the name stands for a family of ciphers,
    not for the protocol's version."""


@dataclass(frozen=True)
class ApiConfig:
    host: str = "127.0.0.1"
    port: int = 8091
    """0 takes a free port; `run_server` reports which."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of `host` and `port`."""

    root_path: str = ""
    """Prefix of all paths that a proxy in front adds, and may or may not remove again; as in `/omni`."""
    tls: TlsFiles | None = None
    """None serves plain HTTP."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """One of them is needed for everything that `omni_server.api.access` does not list as open; without any
    the server is open to everybody who reaches it."""
    metrics_need_key: bool = False
    """Also `/metrics` and `/load`."""
    public_voice_lists: bool = True
    """`GET /v1/audio/voices` and `/v1/audio/models` need no key: Open WebUI asks without one."""
    cors: CorsRules = field(default_factory=CorsRules)

    max_queue: int = 1024
    """Requests and WebSocket sessions under `/v1/` at a time; more are answered with 503. 0 is no limit."""
    max_concurrency_per_key: int = 0
    """Of these, the most that one API key may have; more are answered with 429. 0 is no limit."""
    max_header_bytes: int = 64 * 1024
    """Of all header fields of a request, and the trailers of its body; larger ones are answered with 431."""
    max_header_fields: int = 100
    """More header fields, trailers included, are answered with 431."""
    max_url_bytes: int = 16 * 1024
    """Longer URLs are answered with 414."""
    header_timeout_s: float = 30.0
    """Time for a request's headers to arrive, from their first byte on; slower ones are answered with 408."""
    max_body_bytes: int = 128 * 1024 * 1024
    """Larger request bodies are answered with 413."""
    body_timeout_s: float = 60.0
    """Time for the whole body of a request to arrive; a slower upload is answered with 408."""
    max_total_body_bytes: int = 1024**3
    """Of the bodies of all requests that have not begun to be answered, as far as they have arrived; what is
    beyond is answered with 503. Parsed and decoded they take several times as much memory."""
    max_unsent_bytes: int = 64 * 1024 * 1024
    """Of one answer that has been made and not been sent yet: eleven minutes of audio. Where a client falls
    further behind, it gets an error and its answer is dropped."""
    max_total_unsent_bytes: int = 1024**3
    """The same of all answers together; the one with the most is dropped."""
    http_send_timeout_s: float = 30.0
    """An HTTP client that takes nothing it is sent for this time is cut off."""
    allowed_local_media_path: Path | None = None
    """Folder below which `file:` URLs in requests may name files; None allows no `file:` URL."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that http(s) URLs in requests may name, each with or without a port; see
    `omni_server.media.source.MediaSource`."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    media_threads: int = 2
    """Media items that are decoded at the same time."""
    media_decode_timeout_s: float = 60.0
    """Time for one media item; a request whose item takes longer fails with 400."""
    media_queue_timeout_s: float = 30.0
    """Time that a media item waits for one of the `media_threads`; then its request fails with 503."""

    chat_text_in_content: bool = False
    """Answers by voice have their text in `content`, too, for clients that show nothing else."""
    max_upload_bytes: int = 25_000_000
    """Larger audio files are refused with 413 by the transcription routes; OpenAI's limit."""
    max_upload_seconds: float = 1800.0
    """Longest audio that is transcribed. It is decoded as a whole and at its own rate: half an hour
    at 48 kHz takes 350 MB, which is the maximum: audio of a higher rate must be shorter in
    proportion. Of all that is being transcribed at the same time four times as much is kept, and
    more waits for `media_queue_timeout_s`."""

    sse_keep_alive_s: float = 15.0
    """A comment is sent to a streaming client after this silence."""
    audio_history_ttl_s: int = 3600
    """How long an answer by voice can be referred to by its `audio.id` in later requests."""
    audio_history_entries: int = 4096
    """How many such answers are remembered; the oldest is forgotten first."""

    realtime_max_sessions: int = 256
    """Connections to `/v1/realtime`; one more is refused with 503."""
    realtime_session_timeout_s: float = 3600.0
    """A realtime session is closed after this time; clients connect anew."""
    realtime_idle_timeout_s: float = 900.0
    """A realtime session whose client has sent nothing for this time is closed, unless it
    is being answered."""
    realtime_send_timeout_s: float = 30.0
    """A realtime client that takes nothing it is sent for this time is cut off."""

    shutdown_timeout_s: float = 25.0
    """After SIGTERM, running requests get this long to finish."""
    http_keep_alive_s: int = 75
    """Idle connections are kept this long: longer than the 60 s of common load balancers, so that it is the
    balancer who closes and never finds a connection closed under it."""
    log_level: str = "info"
    """Of uvicorn."""
    access_log: bool = True
    """One line for each HTTP request when it ends."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector that takes OpenTelemetry's traces over HTTP; None traces nothing."""
    docs: bool = True
    """Serve `/docs` and `/openapi.json`."""
