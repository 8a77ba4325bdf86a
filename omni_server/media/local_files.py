"""`file:` URLs of one folder that the operator allowed."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from omni_server.errors import ConfigError, InvalidRequestError


class LocalFiles:
    """Reads files at or below `folder`, wherever symbolic links lead. Raises `ConfigError` if it is no folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        try:
            self._folder = folder.resolve(strict=True)
        except OSError as error:
            raise ConfigError(f"the folder of local media {folder}: {error.strerror or error}") from None
        if not self._folder.is_dir():
            raise ConfigError(f"the folder of local media {folder} is no folder")
        self._max_bytes = max_bytes

    def read(self, url: str) -> bytes:
        """The bytes of the file. Raises `InvalidRequestError`: `media_not_allowed`, also for what does not exist,
        so that a client learns nothing of other files; `media_too_large` or `invalid_url`."""
        path = _path_of(url)
        try:
            # Only the place: neither a pipe nor a device notices. What was found is what is checked and then read: a
            # link that is exchanged in between gains nothing.
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
                data = file.read(self._max_bytes + 1)
        finally:
            os.close(found)
        if len(data) > self._max_bytes:
            raise InvalidRequestError(
                f"The media item is larger than the {self._max_bytes} bytes allowed.", code="media_too_large"
            )
        return data


def _path_of(url: str) -> str:
    """RFC 8089: `file:///path`, `file://localhost/path` or `file:/path`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequestError("The media URL is not a valid URL.", code="invalid_url") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise InvalidRequestError("The media URL is not a valid file: URL.", code="invalid_url")
    return path


def _not_allowed() -> InvalidRequestError:
    return InvalidRequestError("The media URL's file is not allowed by this server.", code="media_not_allowed")
