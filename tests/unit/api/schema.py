"""Validation of raw response bodies against the schema of OpenAI's chat completions."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "openai_chat_schema.json").read_text())


def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": _SCHEMA["$defs"]})


def check_completion(body: Any) -> None:
    _validator("ChatCompletion").validate(body)


def check_chunk(body: Any) -> None:
    _validator("ChatCompletionChunk").validate(body)


def check_error(body: Any) -> None:
    _validator("ErrorEnvelope").validate(body)


def check_model(body: Any) -> None:
    _validator("Model").validate(body)
