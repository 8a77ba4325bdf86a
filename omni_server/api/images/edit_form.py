"""The form of `/v1/images/edits`."""

from typing import Any

from omni_server.api.forms import Form, FormLimits, form_field, last_values
from omni_server.api.image_options import MAX_PROMPT_CHARACTERS
from omni_server.api.images.schemas import ImageEditForm
from omni_server.api.validation import missing_parameter, validate
from omni_server.errors import InvalidRequestError

MAX_IMAGE_BYTES = 50_000_000
"""Of a file; OpenAI's limit."""
MAX_INPUT_IMAGES = 16
"""OpenAI's limit."""
_IMAGE_FIELDS = ("image", "image[]")
_REFUSED_FILES = ("mask", "markup")
_MAX_BYTES_PER_CHARACTER = 4

EDIT_FORM_LIMITS = FormLimits(
    MAX_IMAGE_BYTES,
    max_files=MAX_INPUT_IMAGES + len(_REFUSED_FILES),
    max_field_bytes=MAX_PROMPT_CHARACTERS * _MAX_BYTES_PER_CHARACTER,
    file_param="image",
)


def parse_edit_form(form: Form, max_images: int) -> tuple[ImageEditForm, list[bytes]]:
    """Returns the checked fields and the files of the images, at most `max_images`. Files that are to be
    refused are among the extra fields. Raises `InvalidRequestError`."""
    refused = {name: form.files[name] for name in _REFUSED_FILES if name in form.files}
    fields = validate(ImageEditForm, last_values(form) | refused)
    if any(any(form.fields.get(name, ())) for name in _IMAGE_FIELDS):
        raise InvalidRequestError(
            "Invalid type for 'image': expected a file, but got a string instead.",
            param="image",
            code="invalid_type",
        )
    files = [file for name in _IMAGE_FIELDS for file in form.files.get(name, [])]
    if not files:
        raise missing_parameter("image")
    if len(files) > max_images:
        raise InvalidRequestError(
            f"Invalid 'image': too many files. Expected {max_images} at most, but got {len(files)}.",
            param="image",
            code="array_above_max_length",
        )
    return fields, files


def edit_form_body() -> dict[str, Any]:
    """`openapi_extra` of a route that reads the form."""
    schema = ImageEditForm.model_json_schema()
    del schema["$defs"]  # of `lora`, which is text in a form
    schema["properties"] = {name: form_field(field) for name, field in schema["properties"].items()}
    schema["properties"]["lora"] = {
        "type": "string",
        "description": "Extension: an adapter of the model by its name, or JSON, as in a generation.",
    }
    schema["properties"]["image"] = {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "minItems": 1,
        "maxItems": MAX_INPUT_IMAGES,
    }
    schema["required"] = [*schema["required"], "image"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
