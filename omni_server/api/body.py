"""Reading a JSON body: bounded, strict, and never longer on the event loop than a small body takes."""

import asyncio

from fastapi import Request
from pydantic_core import from_json

from omni_server.api.json_size import MAX_JSON_MARKS, has_too_many_values
from omni_server.errors import InvalidRequestError, RequestTooLargeError

_PARSE_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed in well under a millisecond; a thread would cost more."""


async def read_json(request: Request, max_bytes: int) -> object:
    """The body, parsed.

    Raises `InvalidRequestError` for anything that is not JSON by RFC 8259 (NaN and lone surrogates are not, and
    nesting is limited to 200 levels), `RequestTooLargeError`, also for too many values, and `ClientDisconnect` if the
    client leaves.
    """
    _check_content_type(request)
    data = await _read(request, max_bytes)
    return _parse(data) if len(data) <= _PARSE_INLINE_BYTES else await asyncio.to_thread(_parse, data)


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json:
        raise InvalidRequestError(
            "Unsupported media type: only 'Content-Type: application/json' is accepted.", code="invalid_content_type"
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The request body is larger than the {max_bytes} bytes that this server accepts.")


def _parse(data: bytes) -> object:
    if has_too_many_values(data):
        raise RequestTooLargeError(
            f"The request body has more values than this server reads: more than {MAX_JSON_MARKS} commas and brackets.",
            code="too_many_values",
        )
    try:
        parsed: object = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    return parsed
