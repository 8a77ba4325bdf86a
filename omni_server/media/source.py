"""Reads media from base64, `data:` URLs, and the http(s) and `file:` URLs that the operator allows."""

import asyncio
import binascii
import os
import stat
import string
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.media.fetch import HttpFetcher, invalid_url
from omni_server.media.limits import MediaLimits

_ASCII_WHITESPACE = dict.fromkeys(map(ord, string.whitespace))


class MediaSource:
    """Reads the bytes that a request's URLs refer to.

    `allowed_domains` are host names or IP addresses, each with or without a port, as in `media.example:8080`.
    A URL's host must equal one of them (subdomains are not included). An entry without a port allows the
    default port of the URL's scheme only. An empty list allows `data:` URLs only.

    A host name alone does not allow private, loopback, link-local and other non-public addresses: to read
    `http://files.intranet/` from 10.0.0.5, allow `files.intranet` and `10.0.0.5`; for `localhost`, allow
    `127.0.0.1` as well. Raises `ConfigError` for an entry with more than a host and a port.

    `local_folder` allows `file:` URLs of files below it; None allows none.
    """

    def __init__(
        self, allowed_domains: Sequence[str], limits: MediaLimits, local_folder: Path | None = None
    ) -> None:
        self._limits = limits
        self._local = None if local_folder is None else _LocalFiles(local_folder, limits)
        self._fetcher = HttpFetcher(allowed_domains, limits)

    async def read(self, url: str) -> bytes:
        """Returns the bytes behind `url`.

        Raises `InvalidRequestError` without `param`; its code is `media_not_allowed` (scheme, host or
        address), `media_fetch_failed`, `media_too_large`, `invalid_url` or `invalid_base64`.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._read_data_url, url)
        if scheme in ("http", "https"):
            return await self._fetcher.fetch(url)
        if scheme == "file" and self._local is not None:
            return await asyncio.to_thread(self._local.read, url)
        raise InvalidRequestError(
            "Media URLs must be data: URLs, or http(s) URLs of a host among the server's --allowed-media-domains.",
            code="media_not_allowed",
        )

    def _read_data_url(self, url: str) -> bytes:
        """RFC 2397: `data:[<media type>][;base64],<data>`. Ignores the media type."""
        header, comma, payload = url.partition(",")
        if not comma:
            raise InvalidRequestError("The data: URL has no comma before its data.", code="invalid_url")
        is_base64 = header[len("data:") :].split(";")[-1].strip().lower() == "base64"
        # Percent-encoded base64 has at most four characters per byte: a bound before any copy.
        self._limits.check_size(-(-len(payload) // 4))
        if is_base64:
            text = unquote_to_bytes(payload).decode("latin-1") if "%" in payload else payload
            data = decode_base64(text)
        else:
            data = unquote_to_bytes(payload)
            if not data:
                raise InvalidRequestError("The data: URL holds no data.", code="invalid_url")
        self._limits.check_size(len(data))
        return data


def decode_base64(text: str) -> bytes:
    """Decodes standard base64 (RFC 4648 section 4) with padding. Ignores ASCII whitespace and nothing else.

    Raises `InvalidRequestError` with code `invalid_base64`, also for empty data.
    """
    has_whitespace = any(character in text for character in string.whitespace)
    compact = text.translate(_ASCII_WHITESPACE) if has_whitespace else text  # megabytes are not copied
    try:
        # Python's strict mode accepts any amount of padding after a whole group.
        if len(compact) % 4 or compact.endswith("==="):
            raise ValueError("padding")
        data = binascii.a2b_base64(compact, strict_mode=True)
    except ValueError as error:  # binascii.Error, or characters outside ASCII
        raise InvalidRequestError("Invalid base64.", code="invalid_base64") from error
    if not data:
        raise InvalidRequestError("Empty base64 data.", code="invalid_base64")
    return data


class _LocalFiles:
    """Reads files that `file:` URLs name, at or below `folder` with symbolic links resolved. Raises
    `ConfigError` if it is not a folder."""

    def __init__(self, folder: Path, limits: MediaLimits) -> None:
        try:
            self._folder = folder.resolve(strict=True)
        except OSError as error:
            raise ConfigError(f"the folder of local media {folder}: {error.strerror or error}") from None
        if not self._folder.is_dir():
            raise ConfigError(f"the folder of local media {folder} is not a folder")
        self._limits = limits

    def read(self, url: str) -> bytes:
        """Returns the file's bytes. Raises `InvalidRequestError`: `media_not_allowed`, also for missing
        files, so that clients learn nothing about other files; `media_too_large` or `invalid_url`."""
        path = _path_of(url)
        try:
            # O_PATH does not open the file: neither a pipe nor a device notices. The checks and the read use
            # what was found here: swapping a link in between gains nothing.
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise _not_allowed() from None
        try:
            place = Path(f"/proc/self/fd/{found}")
            if not stat.S_ISREG(os.fstat(found).st_mode) or not place.readlink().is_relative_to(self._folder):
                raise _not_allowed()
            try:
                file = place.open("rb")
            except OSError:
                raise _not_allowed() from None
            with file:
                data = file.read(self._limits.max_bytes + 1)
        finally:
            os.close(found)
        self._limits.check_size(len(data))
        return data


def _path_of(url: str) -> str:
    """RFC 8089: `file:///path`, `file://localhost/path` or `file:/path`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise invalid_url("is not a valid URL") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise invalid_url("is not a valid file: URL")
    return path


def _not_allowed() -> InvalidRequestError:
    return InvalidRequestError(
        "The media URL's file is not allowed by this server.", code="media_not_allowed"
    )
