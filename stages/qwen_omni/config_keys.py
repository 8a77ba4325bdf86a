"""Reads a checkpoint's config.json, with errors that name the key."""

from pathlib import Path

from omni_server.config.checkpoint_files import read_json_object
from omni_server.errors import ConfigError


class ConfigKeys:
    def __init__(self, model_dir: Path, model: str) -> None:
        """`model`: the name of the family's models."""
        self._path = model_dir / "config.json"
        self._model = model
        self._config = read_json_object(self._path)

    def find(self, *keys: str) -> object:
        """None if there is no such key."""
        value: object = self._config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, *keys: str) -> int:
        """Raises `ConfigError`, as `numbers` does."""
        return self._checked(self._needed(*keys), ".".join(keys))

    def numbers(self, *keys: str) -> dict[str, int]:
        """Numbers by name, at least one."""
        found, where = self._needed(*keys), ".".join(keys)
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{self._path}: '{where}' must name at least one number, not {found!r}")
        return {name: self._checked(value, f"{where}.{name}") for name, value in found.items()}

    def _needed(self, *keys: str) -> object:
        value = self.find(*keys)
        if value is None:
            raise ConfigError(
                f"{self._path}: '{'.'.join(keys)}' is missing; is this a {self._model} checkpoint?"
            )
        return value

    def _checked(self, value: object, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self._path}: '{where}' must be a whole number, not {value!r}")
        return value
