"""Schemas of a function's arguments, which are a JSON object whatever else the schema says."""

import json
from collections.abc import Mapping

from omni_server.errors import InvalidRequestError

_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}
_COMBINED = ("anyOf", "oneOf", "allOf")


def schema_of_object(name: str, parameters: Mapping[str, object] | None, param: str) -> Mapping[str, object]:
    """The parameters of the function `name` with `"type": "object"` where it was left out.

    Without parameters the function takes none; an empty schema means any object. xgrammar takes other keywords before
    `type`, so the type is put into their branches too. Raises `InvalidRequestError` for a schema that allows anything
    but objects.
    """
    if parameters is None:
        return _NO_PARAMETERS
    return _Root(parameters, name, param).typed(parameters)


class _Root:
    """One function's schema as a whole."""

    def __init__(self, schema: Mapping[str, object], name: str, param: str) -> None:
        self._schema = schema
        self._name = name
        self._param = param

    def typed(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        if schema.get("type", "object") != "object":
            raise self._refused(f"got 'type: {_shown(schema['type'])}'")
        enum = schema.get("enum", [])
        values = [*(enum if isinstance(enum, list) else [enum]), schema.get("const", {})]
        if not all(isinstance(value, dict) for value in values):
            raise self._refused("but 'enum' or 'const' holds other values")
        if "$ref" in schema and not self._is_plain_object(schema["$ref"]):
            raise self._refused(f"but '$ref: {_shown(schema['$ref'])}' does not lead to one")
        typed: dict[str, object] = {**schema, "type": "object"}
        for key in _COMBINED:
            branches = schema.get(key)
            if isinstance(branches, list):
                typed[key] = [self.typed(branch) if isinstance(branch, dict) else branch for branch in branches]
        return typed

    def _is_plain_object(self, reference: object) -> bool:
        """What the reference leads to says itself that it is an object, and nothing stronger than that."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return False
        here: object = self._schema
        for key in reference[1:].split("/")[1:]:
            here = here.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(here, dict) else None
        if not isinstance(here, dict) or here.get("type") != "object":
            return False
        return here.keys().isdisjoint((*_COMBINED, "$ref", "enum", "const"))

    def _refused(self, found: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"Invalid schema for function '{self._name}': schema must be a JSON schema of 'type: \"object\"', {found}.",
            param=self._param,
            code="invalid_function_parameters",
        )


def _shown(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:64]
