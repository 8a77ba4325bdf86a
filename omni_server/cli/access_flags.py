"""Flags of `omni-server serve` that say who may use the server: keys, browsers' web sites, TLS."""

import argparse
import os
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from omni_server.api.access import read_key_file
from omni_server.api.config import ApiConfig, CorsRules, TlsFiles
from omni_server.cli.values import words
from omni_server.errors import ConfigError

KEY_VARIABLES = ("OMNI_SERVER_API_KEY", "VLLM_API_KEY")
"""Read in this order, the second for those who come from vLLM; an empty one counts as unset."""

_DEFAULTS = ApiConfig()


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    access = parser.add_argument_group(
        "access",
        "Without a key everybody who reaches the server can use it. With one, everything but the probes, /metrics and "
        "the web page needs it, as 'Authorization: Bearer KEY'.",
    )
    access.add_argument(
        "--api-key",
        metavar="KEY",
        nargs="+",
        action="extend",
        help="keys that clients may use; others on the machine can see them among the processes "
        f"(default: the environment variable {' or '.join(KEY_VARIABLES)})",
    )
    access.add_argument("--api-key-file", metavar="FILE", help="file with one key on each line; # begins a comment")
    access.add_argument("--metrics-need-key", action="store_true", help="/metrics and /load need a key as well")
    access.add_argument(
        "--public-voice-list",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.public_voice_lists,
        help="GET /v1/audio/voices and /v1/audio/models need no key, as Open WebUI asks for them without "
        "(default: they need none)",
    )
    access.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        nargs="+",
        default=[],
        help="web sites whose pages may use the API from a browser, as in https://chat.example; * is every site "
        "(default: none but the server's own page)",
    )
    access.add_argument("--allowed-methods", metavar="METHOD", nargs="+", default=["*"], help="of these sites")
    access.add_argument("--allowed-headers", metavar="NAME", nargs="+", default=["*"], help="of these sites")
    access.add_argument("--allow-credentials", action="store_true", help="these sites may send cookies")
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--ssl-certfile", metavar="FILE", help="certificate chain, PEM; serves HTTPS instead of HTTP")
    tls.add_argument("--ssl-keyfile", metavar="FILE", help="its private key, PEM (default: in --ssl-certfile)")
    tls.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of client certificates, PEM")
    tls.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[0, 1, 2],
        default=0,
        help="client certificates: 0 not asked for, 1 checked if sent, 2 required (default: 0)",
    )
    tls.add_argument("--ssl-ciphers", metavar="LIST", help="OpenSSL cipher list for TLS 1.2 (default: uvicorn's)")


def access_settings(config: ApiConfig, options: argparse.Namespace) -> ApiConfig:
    """`config` with what the flags say. Raises `ConfigError`."""
    return replace(
        config,
        api_keys=_keys(options, os.environ),
        metrics_need_key=options.metrics_need_key,
        public_voice_lists=options.public_voice_list,
        cors=CorsRules(
            allowed_origins=tuple(
                origin.rstrip("/") for origin in _words("--allowed-origins", options.allowed_origins)
            ),
            allowed_methods=_words("--allowed-methods", options.allowed_methods),
            allowed_headers=_words("--allowed-headers", options.allowed_headers),
            allow_credentials=options.allow_credentials,
        ),
        tls=_tls(options),
    )


def _keys(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the flags together; the environment counts only where no flag gives one."""
    keys: tuple[str, ...] = tuple(options.api_key or ())
    if options.api_key_file is not None:
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
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: the authorities that clients' certificates are of")
    tls = TlsFiles(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        ca_certs=options.ssl_ca_certs,
        cert_reqs=ssl.VerifyMode(options.ssl_cert_reqs),
    )
    return tls if options.ssl_ciphers is None else replace(tls, ciphers=options.ssl_ciphers)


def _words(flag: str, texts: list[str]) -> tuple[str, ...]:
    try:
        return words(texts)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag}: {error}") from None
