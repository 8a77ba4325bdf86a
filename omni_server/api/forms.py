"""Multipart forms: reads them within bounds, in memory only, validates them and describes them in OpenAPI."""

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser

from omni_server.api.validation import Model, missing_parameter, validate
from omni_server.errors import InvalidRequestError, RequestTooLargeError

MAX_FIELDS = 100
"""Maximum number of non-file fields."""
_MAX_OTHER_BYTES = 1024 * 1024
"""For everything but the files."""
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})
"""UTF-8 and the names that clients give ASCII-only forms."""

_BOOLEAN_PATTERN = (
    "^([Tt]([Rr][Uu][Ee])?|[Ff]([Aa][Ll][Ss][Ee])?|[Yy]([Ee][Ss])?|[Nn][Oo]?|[Oo]([Nn]|[Ff][Ff])|[01])$"
)
"""Pydantic's booleans: true, t, yes, y, on and 1, or false, f, no, n, off and 0, in any case."""
_SCHEMAS: dict[str, dict[str, str]] = {
    "boolean": {"type": "string", "pattern": _BOOLEAN_PATTERN},
    "null": {"const": ""},
}
"""Of types that are strings in a form."""


@dataclass(frozen=True)
class FormLimits:
    max_file_bytes: int
    max_files: int = 1
    max_field_bytes: int = 64 * 1024
    file_param: str = "file"
    """The field of the files, which errors about the size of the form name."""

    @property
    def max_bytes(self) -> int:
        """Of the whole form."""
        return self.max_files * self.max_file_bytes + _MAX_OTHER_BYTES


@dataclass(frozen=True)
class Form:
    fields: dict[str, list[str]]
    """All values of each name, in order."""
    files: dict[str, list[bytes]]
    """The contents of the parts that have a file name, in order, by the name of the field."""


async def read_form(request: Request, limits: FormLimits) -> Form:
    """Raises `InvalidRequestError` for an invalid form, `RequestTooLargeError`, or `ClientDisconnect`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequestError(
            "Unsupported media type: only 'Content-Type: multipart/form-data' is accepted.",
            code="invalid_content_type",
        )
    _check_charset(request)
    parser = MultiPartParser(
        request.headers,
        _bounded(request, limits),
        max_files=limits.max_files,
        max_fields=MAX_FIELDS,
        max_part_size=limits.max_field_bytes,
    )
    parser.spool_max_size = limits.max_bytes  # users' media are never written to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"The form cannot be read: {error.message}", code="invalid_form") from None
    try:
        fields: dict[str, list[str]] = {}
        files: dict[str, list[bytes]] = {}
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields.setdefault(name, []).append(value)
            elif value.size is not None and value.size > limits.max_file_bytes:
                raise _too_large(limits)
            else:
                files.setdefault(name, []).append(await value.read())
        return Form(fields, files)
    finally:
        await form.close()


def _check_charset(request: Request) -> None:
    """Accepts only UTF-8 and names for ASCII. Starlette decodes with any Python codec that the client
    names: some raise unexpected errors, others take quadratic time. RFC 7578 has no such parameter, and
    forms are UTF-8."""
    _, parameters = parse_options_header(request.headers["content-type"])
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise InvalidRequestError("The form cannot be read: its charset must be UTF-8.", code="invalid_form")


async def _bounded(request: Request, limits: FormLimits) -> AsyncGenerator[bytes, None]:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.max_bytes:
        raise _too_large(limits)
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limits.max_bytes:
            raise _too_large(limits)
        yield chunk


def _too_large(limits: FormLimits) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"Maximum file size exceeded: this server accepts {limits.max_file_bytes} bytes.",
        param=limits.file_param,
        code="file_too_large",
    )


def parse_form(
    form: Form, schema: type[Model], file_param: str, lists: Collection[str] = ()
) -> tuple[Model, list[bytes]]:
    """Returns the fields as a `schema`, and the files named `file_param`, at least one; files of other names
    are fields. Names of files and `lists` may end in `[]`. Of other fields, the last value counts. Empty
    optional fields count as absent. Raises `InvalidRequestError`."""
    body: dict[str, object] = {}
    has_text = False
    for name, values in form.fields.items():
        base, field = name.removesuffix("[]"), schema.model_fields.get(name)
        if base == file_param:
            has_text |= any(values)
        elif base in lists:
            body[base] = [value for value in values if value]
        elif values[-1] or (field is not None and field.is_required()):
            body[name] = values[-1]
    files: list[bytes] = []
    for name, contents in form.files.items():
        if name.removesuffix("[]") == file_param:
            files += contents
        else:
            body[name] = contents
    fields = validate(schema, body)
    if has_text:
        raise InvalidRequestError(
            f"Invalid type for '{file_param}': expected a file, but got a string instead.",
            param=file_param,
            code="invalid_type",
        )
    if not files:
        raise missing_parameter(file_param)
    return fields, files


def form_body(
    schema: type[BaseModel], described: Mapping[str, object], file_param: str, lists: Collection[str] = ()
) -> dict[str, Any]:
    """`openapi_extra` of a route that reads the form. `described` holds the JSON schemas of the files and of
    fields that a form has in another way than JSON."""
    form = schema.model_json_schema()
    form.pop("$defs", None)
    fields = {
        f"{name}[]" if name in lists else name: _form_field(field)
        for name, field in form["properties"].items()
    }
    form["properties"] = {**fields, **described}
    form["required"] = [*form["required"], file_param]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def _form_field(field: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a form's optional field that is `field` in JSON. Replaces booleans, and null: unset
    form fields are empty or absent."""
    described = {key: value for key, value in field.items() if key != "default"}
    if "anyOf" in field:
        described["anyOf"] = [_SCHEMAS.get(branch.get("type"), branch) for branch in field["anyOf"]]
    return described
