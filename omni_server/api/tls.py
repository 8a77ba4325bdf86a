"""HTTPS by uvicorn: the files that it needs."""

import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class TlsFiles:
    """Paths; uvicorn's arguments of the same names."""

    certfile: str
    """Certificate chain, PEM."""
    keyfile: str | None = None
    """Private key, PEM; None: it is in `certfile`."""
    ca_certs: str | None = None
    """Certificates of the authorities whose clients are accepted, PEM."""
    cert_reqs: ssl.VerifyMode = ssl.CERT_NONE
    """Whether clients must show a certificate."""
    ciphers: str = "TLSv1"
    """OpenSSL's cipher list, for TLS up to 1.2. uvicorn's default; the name stands for a family of ciphers, not for
    the protocol's version."""
