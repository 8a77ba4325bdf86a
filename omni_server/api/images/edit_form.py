"""The form of `/v1/images/edits`."""

from typing import Any

from omni_server.api.forms import Form, FormLimits, form_field, last_values
from omni_server.api.images.parse import MASK_HINT
from omni_server.api.images.schemas import MAX_PROMPT_CHARACTERS, ImageEditForm
from omni_server.api.validation import missing_parameter, unsupported, validate
from omni_server.errors import InvalidRequestError

MAX_IMAGE_BYTES = 50_000_000
"""Of a file; OpenAI's limit."""
MAX_INPUT_IMAGES = 16
"""OpenAI's limit."""
_OTHER_FILES = 2
"""`mask` and `markup`, to be refused by name."""
_MAX_BYTES_PER_CHARACTER = 4

EDIT_FORM_LIMITS = FormLimits(
    MAX_IMAGE_BYTES,
    max_files=MAX_INPUT_IMAGES + _OTHER_FILES,
    max_field_bytes=MAX_PROMPT_CHARACTERS * _MAX_BYTES_PER_CHARACTER,
    file_param="image",
)


def parse_edit_form(form: Form) -> tuple[ImageEditForm, list[bytes]]:
    """Returns the checked fields and the files of the images. Raises `InvalidRequestError`."""
    fields = validate(ImageEditForm, last_values(form))
    if "mask" in form.files:
        raise unsupported(MASK_HINT, "mask")
    if "markup" in form.files:
        raise unsupported("'markup' is not supported with this value by this server.", "markup")
    files = [file for name in ("image", "image[]") for file in form.files.get(name, [])]
    if not files and ("image" in form.fields or "image[]" in form.fields):
        raise InvalidRequestError(
            "Invalid type for 'image': expected a file, but got a string instead.",
            param="image",
            code="invalid_type",
        )
    if not files:
        raise missing_parameter("image")
    if len(files) > MAX_INPUT_IMAGES:
        raise InvalidRequestError(
            f"Invalid 'image': at most {MAX_INPUT_IMAGES} images are allowed.",
            param="image",
            code="array_above_max_length",
        )
    return fields, files


def edit_form_body() -> dict[str, Any]:
    """`openapi_extra` of a route that reads the form."""
    schema = ImageEditForm.model_json_schema()
    schema["properties"] = {name: form_field(field) for name, field in schema["properties"].items()}
    schema["properties"]["image"] = {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "minItems": 1,
        "maxItems": MAX_INPUT_IMAGES,
    }
    schema["required"] = [*schema["required"], "image"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
