"""`about.json` of a checkpoint: what its makers say about it. It may be missing.

`{"notice": "This model knows a few sentences only.", "example_prompts": ["What are you?"], "longest_passage": 100}`
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_server.errors import ConfigError
from omni_server.types import AboutModel

FILE_NAME = "about.json"

_Line = Annotated[str, Field(min_length=1, max_length=300, pattern=r"\S")]


class _AboutFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    notice: Annotated[str, Field(min_length=1, max_length=600, pattern=r"\S")] | None = None
    example_prompts: Annotated[list[_Line], Field(max_length=8)] = []
    longest_passage: Annotated[int, Field(ge=1)] | None = None


def read_about(model_dir: Path) -> AboutModel | None:
    """None where there is no such file. Raises `ConfigError`, in one line, where it is broken."""
    path = model_dir / FILE_NAME
    try:
        file = _AboutFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place + ': ' if place else ''}{first['msg']}") from error
    return AboutModel(file.notice, tuple(file.example_prompts), file.longest_passage)
