"""The demo models that come with the program."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    package: str
    folder: str
    """Of the checkpoint, below the package."""
    served_name: str

    def path(self) -> Path:
        return Path(str(files(self.package))) / self.folder


DEMOS = {"speaking": Demo("stages.qwen2_5_omni", "speaking_demo", "speaking-demo")}
DEFAULT_DEMO = "speaking"
