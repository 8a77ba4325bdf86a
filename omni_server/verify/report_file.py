"""Where a report goes: nothing that is there is overwritten."""

import re
from pathlib import Path

from omni_server.errors import ConfigError


class ReportFile:
    """Chosen before the work, which takes minutes, and written after it."""

    def __init__(self, wanted: Path | None, model: str) -> None:
        """`wanted` must not exist yet. Without it, the file is omni-server-verify-MODEL.md in the working
        directory, or where that exists the first free one of -2, -3 and so on. Raises `ConfigError` if it
        cannot be written."""
        self._wanted = wanted
        name = re.sub(r"[^\w.-]+", "-", Path(model).expanduser().resolve().name) or "model"
        self._stem = f"omni-server-verify-{name}"
        if wanted is not None and wanted.exists():
            raise ConfigError(f"--report {wanted} exists; give another name, or remove it")
        try:
            probe = self._create()
        except OSError as error:
            raise ConfigError(f"--report: {error.filename} cannot be written: {error.strerror}") from error
        probe.unlink()

    def write(self, text: str) -> Path:
        """The file that it has become. Raises `OSError`."""
        path = self._create()
        path.write_text(text, encoding="utf-8")
        return path

    def _create(self) -> Path:
        """An empty file that has not been there before."""
        if self._wanted is not None:
            self._wanted.touch(exist_ok=False)
            return self._wanted
        number = 1
        while True:
            path = Path(f"{self._stem}.md" if number == 1 else f"{self._stem}-{number}.md")
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return path
