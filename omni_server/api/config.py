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
    """Web sites whose pages may use the API from a browser, such as https://chat.example; * allows all
    sites."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that these sites may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that these sites may send."""
    allow_credentials: bool = False
    """Let these sites send cookies."""


@dataclass(frozen=True)
class TlsFiles:
    """HTTPS settings, as uvicorn's options of the same names."""

    certfile: str
    """Certificate chain, PEM; serves HTTPS instead of HTTP."""
    keyfile: str | None = None
    """Private key of the certificate, PEM."""
    ca_certs: str | None = None
    """Certificate authorities for client certificates, PEM."""
    cert_reqs: ssl.VerifyMode = ssl.CERT_NONE
    """Client certificates: 0 not requested, 1 verified if sent, 2 required."""
    ciphers: str = "TLSv1"
    """Cipher list of OpenSSL for TLS up to 1.2. The default is uvicorn's, a family of ciphers and not a
    version of TLS."""

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
    """Address to listen on; 0.0.0.0 is all."""
    port: int = 8091
    """Port to listen on; 0 takes a free one and prints it."""
    uds: str | None = None
    """A Unix socket to listen on, instead of host and port."""

    root_path: str = ""
    """Prefix that a proxy in front adds to all paths, whether or not it strips it again, as in /omni."""
    tls: TlsFiles | None = None
    """None for plain HTTP."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Every route that `omni_server.api.access` does not list as open requires one of these keys. If empty,
    the server is open to all clients."""
    metrics_need_key: bool = False
    """Require a key for /metrics and /load, too."""
    public_voice_lists: bool = True
    """Serve GET /v1/audio/voices and /v1/audio/models without a key, because Open WebUI sends none."""
    cors: CorsRules = field(default_factory=CorsRules)

    max_queue: int = 1024
    """Requests and realtime sessions that may run or wait at the same time; more get 503; 0 is no
    limit."""
    max_concurrency_per_key: int = 0
    """Requests and realtime sessions of one API key at the same time; more get 429; 0 is no limit."""
    max_header_bytes: int = 64 * 1024
    """Total size of a request's URL and headers, and of its trailers; larger ones get 431."""
    max_header_fields: int = 100
    """Number of a request's header fields; more get 431."""
    max_url_bytes: int = 16 * 1024
    """Size of a request's URL; longer ones get 414."""
    header_timeout_s: float = 30.0
    """Time for a request's headers to arrive after their first byte; slower ones get 408."""
    max_body_bytes: int = 128 * 1024 * 1024
    """Size of a request's body; larger ones get 413."""
    body_timeout_s: float = 60.0
    """Time for a request's body to arrive; slower ones get 408. Also for the next piece of a text that is
    spoken while it is written."""
    max_total_body_bytes: int = 1024**3
    """Total size of the bodies of all requests without a response yet, as far as received; requests
    beyond it get 503. Parsed and decoded, bodies take several times as much memory."""
    max_unsent_bytes: int = 64 * 1024 * 1024
    """Unsent part of one answer; if a client reads too slowly and the part grows larger, the answer ends
    with an error. 64M are eleven minutes of audio."""
    max_total_unsent_bytes: int = 1024**3
    """Unsent parts of all answers together; beyond it, the answer with the largest unsent part ends with
    an error."""
    max_audio_ahead_s: float | None = None
    """Audio of a stream that the client has not played yet; the rest waits in the server."""
    http_send_timeout_s: float = 30.0
    """Time after which an HTTP client that reads nothing is disconnected, unless it comes over a Unix
    socket."""
    allowed_local_media_path: Path | None = None
    """Folder of this machine whose files requests may use with file: URLs."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts whose http(s) URLs requests may name for audio, images and videos; without a port, the
    scheme's default port only."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    media_processes: int = 4
    """Media items decoded at the same time, each in a process."""
    media_decode_timeout_s: float = 60.0
    """Time to decode one audio, image or video; a request that takes longer gets 400."""
    media_queue_timeout_s: float = 30.0
    """Longest wait of a media item for one of the `media_processes`; then its request gets 503."""

    chat_text_in_content: bool = False
    """Also put the text of spoken chat answers into `content`, for clients that show only that field."""
    max_speech_characters: int = 4096
    """Length of a text to read aloud; longer ones get 400. The default is OpenAI's."""
    voices_folder: Path | None = None
    """Folder where the voices are kept that callers send to /v1/audio/voices; without it, in memory until the
    server ends."""
    max_upload_bytes: int = 25_000_000
    """Size of an audio file to transcribe or translate; larger ones get 413. The default is OpenAI's."""
    max_upload_seconds: float = 1800.0
    """Duration of audio to transcribe or translate. It is decoded as a whole and at its own rate: half an
    hour at 48 kHz takes 350 MB, which is the maximum, so audio at a higher rate must be proportionally
    shorter."""

    max_output_pixels: int = 2048 * 2048
    """Width times height of an image, beside the limit of the stage; four images, of 3 bytes per pixel,
    must fit --max-unsent-size."""
    max_image_steps: int = 200
    """Denoising steps that a request may ask for; more get 400."""

    sse_keep_alive_s: float = 15.0
    """Idle streams send a keep-alive comment at this interval."""
    answer_store_ttl_s: int = 3600
    """How long later requests can refer to a spoken answer by its `audio.id`, to a stored response and to the
    items of a response."""
    answer_store_entries: int = 4096
    answer_store_bytes: int = 64 * 1024 * 1024
    """How much is kept of all callers together; the oldest is evicted first."""

    realtime_max_sessions: int = 256
    """Open sessions; more get 503."""
    realtime_session_timeout_s: float = 3600.0
    """Time after which a session is closed; clients reconnect."""
    realtime_idle_timeout_s: float = 900.0
    """Time after which a session whose client sends nothing is closed, unless it is being answered."""
    realtime_send_timeout_s: float = 30.0
    """A realtime client that reads nothing for this time is disconnected."""

    shutdown_timeout_s: float = 25.0
    """Time for running requests to finish after SIGTERM."""
    http_keep_alive_s: int = 75
    """How long idle connections are kept. Longer than the 60 s of common load balancers, so that the balancer
    closes them and never sends on a closed connection."""
    log_level: str = "info"
    """Log level of uvicorn, the HTTP server."""
    access_log: bool = True
    """Log a line per request."""
    otlp_traces_endpoint: str | None = None
    """Collector for OpenTelemetry traces, over HTTP, such as http://localhost:4318/v1/traces; needs the
    extra otel."""
    docs: bool = True
    """Serve /docs and /openapi.json."""
