"""Reading a multipart form with one file: bounded, and in memory only."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from omni_server.errors import InvalidRequestError, RequestTooLargeError

_MAX_FIELDS = 100
_MAX_FIELD_BYTES = 64 * 1024
_MAX_OTHER_BYTES = 1024 * 1024
"""Of all that is not the file."""
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})
"""UTF-8 and what clients say of forms that have letters of ASCII only."""


@dataclass(frozen=True)
class Form:
    fields: dict[str, list[str]]
    """All values of each name, in order."""
    file: bytes | None
    """The content of the part called "file", if that has a file name, as a file has."""


async def read_form(request: Request, max_file_bytes: int) -> Form:
    """Raises `InvalidRequestError` for what is no such form, `RequestTooLargeError`, and `ClientDisconnect`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequestError(
            "Unsupported media type: only 'Content-Type: multipart/form-data' is accepted.",
            code="invalid_content_type",
        )
    _check_charset(request)
    stream = _bounded(request, max_file_bytes)
    parser = MultiPartParser(
        request.headers, stream, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    parser.spool_max_size = max_file_bytes + _MAX_OTHER_BYTES  # what callers say is not written to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.message}", code="invalid_form") from None
    try:
        return await _contents(form.multi_items(), max_file_bytes)
    finally:
        await form.close()


def _check_charset(request: Request) -> None:
    """Starlette decodes with whatever codec of Python's the client names: some raise what it does not expect, others
    take a time that grows with the square of the text. RFC 7578 knows no such parameter, and forms are UTF-8."""
    _, parameters = parse_options_header(request.headers["content-type"])
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise InvalidRequestError("The form cannot be read: its charset must be UTF-8.", code="invalid_form")


async def _bounded(request: Request, max_file_bytes: int) -> AsyncGenerator[bytes, None]:
    limit = max_file_bytes + _MAX_OTHER_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(max_file_bytes)
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_large(max_file_bytes)
        yield chunk


async def _contents(items: list[tuple[str, UploadFile | str]], max_file_bytes: int) -> Form:
    fields: dict[str, list[str]] = {}
    file: bytes | None = None
    for name, value in items:
        if isinstance(value, str):
            fields.setdefault(name, []).append(value)
        elif name == "file":
            file = await value.read()
    if file is not None and len(file) > max_file_bytes:
        raise _too_large(max_file_bytes)
    return Form(fields, file)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"Maximum file size exceeded: this server accepts {max_bytes} bytes.", param="file", code="file_too_large"
    )
