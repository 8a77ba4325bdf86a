"""What a comparison found."""

from dataclasses import dataclass
from pathlib import Path

from omni_server.config.stage_config import StageConfig
from omni_server.verify.compare import CaseResult, Precision
from omni_server.verify.machine import Checkpoint


@dataclass(frozen=True)
class Report:
    model: str
    """Hub id, or the last part of the folder's path."""
    checkpoint: Checkpoint
    versions: tuple[tuple[str, str], ...]
    hardware: tuple[str, ...]
    stage_config_name: str | None
    """None: it was made for the model and this machine."""
    stage_config: StageConfig
    precision: Precision
    reference_device: str
    results: tuple[CaseResult, ...]
    left_out: tuple[str, ...]
    """What no case compared, each with its reason."""
    folders: tuple[Path, ...]
    """Whose names are nobody's business."""

    @property
    def agrees(self) -> bool:
        return all(result.agrees for result in self.results)
