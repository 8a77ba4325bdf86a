"""What all parts of a stage config have in common."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A mapping of the file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
