"""Why a server could not be reached, in words for the person who asked."""

import os

import aiohttp


def why_unreachable(error: aiohttp.ClientError | TimeoutError) -> str:
    """aiohttp's own messages are for developers: `Cannot connect to host 127.0.0.1:8091 ssl:default [...]`."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"TLS failed: {error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return (
            os.strerror(number) if number is not None and number > 0 else str(error.os_error.strerror or error.os_error)
        )
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers does not speak HTTP"
    return str(error) or type(error).__name__
