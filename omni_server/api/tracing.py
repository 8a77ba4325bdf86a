"""Optional tracing: without `--otlp-traces-endpoint` this server does not import OpenTelemetry
(vLLM does)."""

from typing import TYPE_CHECKING

from yarl import URL

from omni_server.errors import ConfigError

if TYPE_CHECKING:
    from omni_server.api.otel import OtelTracer


def open_tracer(endpoint: str | None) -> "OtelTracer | None":
    """Returns a tracer that sends spans to `endpoint` by OTLP over HTTP; None without one.

    Raises `ConfigError` for an invalid URL or if OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    url = _traces_url(endpoint)
    try:
        from omni_server.api.otel import OtelTracer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, of which {error.name} is missing: "
            "pip install 'omni-server[otel]'"
        ) from None
    return OtelTracer(url)


def _traces_url(endpoint: str) -> str:
    """Adds OTLP's path for traces if the URL has none."""
    try:
        url = URL(endpoint)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not an http(s) URL, as in "
            "http://localhost:4318/v1/traces"
        )
    return str(url.with_path("/v1/traces", keep_query=True) if url.path in ("", "/") else url)
