"""What `serve` asks of a checkpoint's files: is anything damaged, and where an engine did not start, is it
their fault?

vLLM's own messages for damaged files are hundreds of lines, the last of which names neither the file nor the
reason.
"""

from pathlib import Path

from omni_server.check.files import check_architecture, check_small_files, check_weights
from omni_server.check.report import Report
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError
from omni_server.family import StageFootprint, load_family


def refuse_damaged_files(folder: Path, config: StageConfig, *, load_format: str) -> None:
    """What costs milliseconds: the small files, and the headers of the weights. Raises `ConfigError`."""
    found = _damage(folder, config, {}, load_format=load_format)
    if found is not None:
        raise ConfigError(found)


def explained(error: ConfigError, folder: Path, config: StageConfig, *, load_format: str) -> ConfigError:
    """`error` of a start, with what is wrong with the checkpoint's files, where something is.

    Compares every weight with what config.json describes, which takes seconds.
    """
    try:
        footprints = load_family(config.model_family).footprints(folder, config)
        found = _damage(folder, config, footprints, load_format=load_format)
    except ConfigError as reason:
        found = str(reason)
    return error if found is None else ConfigError(f"{found} ({error})")


def _damage(
    folder: Path, config: StageConfig, footprints: dict[str, StageFootprint], *, load_format: str
) -> str | None:
    set_engine_environment(config)  # before the family imports what reads it
    family = load_family(config.model_family)
    report = Report(str(folder))
    check_small_files(folder, family, report)
    if check_architecture(folder, config, family, report) and load_format != "dummy":
        check_weights(folder, str(folder), footprints, is_hub_id=False, report=report)
    return "; ".join(finding.message for finding in report.findings if finding.severity == "error") or None
