"""Settings of the HTTP server, fixed at start."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from omni_server.errors import ConfigError
from omni_server.media.limits import MediaLimits


@dataclass(frozen=True)
class CorsRules:
    """Web sites that may use the API from a browser; same names and meanings as in `vllm serve`."""

    allowed_origins: tuple[str, ...] = ()
    """E.g. `https://chat.example`, or `*` for every site. Empty disables CORS."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True)
class TlsFiles:
    """HTTPS settings, as uvicorn's options of the same names."""

    certfile: str
    """Certificate chain, PEM."""
    keyfile: str | None = None
    """Private key, PEM; None if `certfile` has it."""
    ca_certs: str | None = None
    """CA certificates for verifying client certificates, PEM."""
    cert_reqs: ssl.VerifyMode = ssl.CERT_NONE
    """Whether clients need a certificate."""
    ciphers: str = "TLSv1"
    """OpenSSL's cipher list, for TLS up to 1.2. uvicorn's default; the name denotes a family of ciphers,
    not a protocol version."""

    def context(self) -> ssl.SSLContext:
        """Reads the files. Raises `ConfigError` that names the one that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        what = "TLS certificate or key"
        files = " and ".join(filter(None, (self.certfile, self.keyfile)))
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password="")  # or OpenSSL would ask for one
            context.verify_mode = self.cert_reqs
            if self.ca_certs is not None:
                what, files = "TLS authorities", self.ca_certs
                context.load_verify_locations(self.ca_certs)
            what, files = "TLS ciphers", self.ciphers
            context.set_ciphers(self.ciphers)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"cannot use the {what} {files}: {error.strerror or error}") from None
        return context


@dataclass(frozen=True)
class ApiConfig:
    host: str = "127.0.0.1"
    port: int = 8091
    """0 picks a free port, which `run_server` reports."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of `host` and `port`."""

    root_path: str = ""
    """Path prefix that a reverse proxy adds, whether or not it strips it again, such as `/omni`."""
    tls: TlsFiles | None = None
    """None for plain HTTP."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Every route that `omni_server.api.access` does not list as open requires one of these keys. If empty,
    the server is open to all clients."""
    metrics_need_key: bool = False
    """For `/metrics` and `/load`."""
    public_voice_lists: bool = True
    """`GET /v1/audio/voices` and `/v1/audio/models` need no key: Open WebUI sends none."""
    cors: CorsRules = field(default_factory=CorsRules)

    max_queue: int = 1024
    """Concurrent requests and WebSocket sessions under `/v1/`; any more get 503. 0 means no limit."""
    max_concurrency_per_key: int = 0
    """Limit on the same for one API key; any more get 429. 0 means no limit."""
    max_header_bytes: int = 64 * 1024
    """Total size of a request's URL and header fields, and of its trailers; larger ones get 431."""
    max_header_fields: int = 100
    """More header fields get 431."""
    max_url_bytes: int = 16 * 1024
    """Longer URLs get 414."""
    header_timeout_s: float = 30.0
    """Time for a request's headers to arrive after their first byte; slower ones get 408."""
    max_body_bytes: int = 128 * 1024 * 1024
    """Larger request bodies get 413."""
    body_timeout_s: float = 60.0
    """Time for the whole body of a request to arrive; a slower upload gets 408."""
    max_total_body_bytes: int = 1024**3
    """Bytes received so far of the bodies of all requests without a response yet; requests beyond that
    get 503. Parsed and decoded, bodies take several times as much memory."""
    max_unsent_bytes: int = 64 * 1024 * 1024
    """Generated but unsent data of one answer: eleven minutes of audio. If a client falls further behind,
    its answer is dropped and it gets an error."""
    max_total_unsent_bytes: int = 1024**3
    """The same for all answers together; the largest is dropped."""
    max_audio_ahead_s: float | None = None
    """Streamed audio is sent at most so far ahead of its playback; None sends it at once."""
    http_send_timeout_s: float = 30.0
    """A client that reads nothing for this time is disconnected, unless it comes over `uds`."""
    allowed_local_media_path: Path | None = None
    """Folder that `file:` URLs in requests may access; None disallows `file:` URLs."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts allowed in http(s) URLs of requests, each with or without a port; see
    `omni_server.media.source.MediaSource`."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    media_processes: int = 4
    """Media items decoded at the same time, each in a process."""
    media_decode_timeout_s: float = 60.0
    """Time to decode one media item; if it takes longer, its request gets 400."""
    media_queue_timeout_s: float = 30.0
    """Longest wait of a media item for one of the `media_processes`; then its request gets 503."""

    chat_text_in_content: bool = False
    """Spoken answers also have their text in `content`, for clients that show nothing else."""
    max_upload_bytes: int = 25_000_000
    """The transcription routes refuse larger audio files with 413; OpenAI's limit."""
    max_upload_seconds: float = 1800.0
    """Longest audio to transcribe. It is decoded as a whole and at its own rate: half an hour at
    48 kHz takes 350 MB, which is the maximum, so audio at a higher rate must be proportionally
    shorter."""

    max_output_pixels: int = 2048 * 2048
    """Width x height of a generated image, beside the limit of its stage. `max_unsent_bytes` must have room
    for four, which is a stream with its previews."""
    max_image_steps: int = 200
    """Denoising steps that a request for an image may ask for."""

    sse_keep_alive_s: float = 15.0
    """Idle streams send a keep-alive comment at this interval."""
    audio_history_ttl_s: int = 3600
    """How long later requests can refer to a spoken answer by its `audio.id`."""
    audio_history_entries: int = 4096
    """How many such answers are kept; the oldest is evicted first."""

    realtime_max_sessions: int = 256
    """Connections to `/v1/realtime`; any more get 503."""
    realtime_session_timeout_s: float = 3600.0
    """A realtime session is closed after this time; clients reconnect."""
    realtime_idle_timeout_s: float = 900.0
    """A realtime session is closed if its client sends nothing for this time and no answer
    is running."""
    realtime_send_timeout_s: float = 30.0
    """A realtime client that reads nothing for this time is disconnected."""

    shutdown_timeout_s: float = 25.0
    """After SIGTERM, running requests get this long to finish."""
    http_keep_alive_s: int = 75
    """How long idle connections are kept. Longer than the 60 s of common load balancers, so that the balancer
    closes them and never sends on a closed connection."""
    log_level: str = "info"
    """uvicorn's."""
    access_log: bool = True
    """Logs one line per HTTP request when it ends."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector that accepts OTLP traces over HTTP; None disables tracing."""
    docs: bool = True
    """Serve `/docs` and `/openapi.json`."""
