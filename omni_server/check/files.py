"""The checkpoint's folder, which `resolve_model_folder` has found: is everything there, whole, and of the model
that its config.json describes?

`serve` asks whether anything is damaged, and, if an engine did not start, whether that is the files' fault:
vLLM's own messages for damaged files are hundreds of lines, the last of which names neither the file nor the
reason.
"""

import json
import shutil
from pathlib import Path

from omni_server.check.report import Report
from omni_server.check.safetensors_headers import WHOLE_NUMBERS, StoredWeights, read_weights
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError
from omni_server.family import ModelFamily, StageFootprint, load_family


def refuse_damaged_files(folder: Path, config: StageConfig, *, load_format: str) -> None:
    """Checks the small files and the headers of the weights, within milliseconds. Raises `ConfigError`."""
    found = _damage(folder, config, {}, load_format=load_format)
    if found is not None:
        raise ConfigError(found)


def explained(error: ConfigError, folder: Path, config: StageConfig, *, load_format: str) -> ConfigError:
    """The `error` of a failed start, preceded by what is wrong with the checkpoint's files, if anything.

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
    if load_format != "dummy":
        check_weights(folder, str(folder), footprints, is_hub_id=False, report=report)
    return "; ".join(finding.message for finding in report.findings if finding.severity == "error") or None


def check_small_files(folder: Path, family: ModelFamily, report: Report) -> None:
    """Tokenizer, preprocessor, voices: missing files and damaged JSON."""
    for needed in family.needed_files():
        if not any((folder / name).is_file() for name in needed.names):
            report.error(
                "files", f"{folder} lacks {needed.purpose}: {' or '.join(needed.names)}; download it too"
            )
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            report.error("files", f"{path}: cannot be read as JSON ({error}): download it again")


def check_weights(
    folder: Path, model: str, footprints: dict[str, StageFootprint], *, is_hub_id: bool, report: Report
) -> StoredWeights:
    """Files that are missing or damaged, and weights that are missing or misshapen."""
    stored = read_weights(folder)
    report.num_weight_files, report.weight_bytes = stored.num_files, stored.num_bytes
    if not stored.num_files and is_hub_id:
        _tell_download(folder, model, report)
        return stored
    if not (stored.num_files or stored.missing_files or stored.problems):
        report.error(
            "files",
            f"{folder} has no weights (*.safetensors): download them, or serve random ones with "
            "--load-format dummy, which this command takes too",
        )
        return stored
    for problem in stored.problems:
        report.error("files", problem)
    if not stored.problems and not _is_quantized(folder):
        _check_types(folder, stored, report)
        for name, footprint in footprints.items():
            _compare(name, footprint, stored, report)
    return stored


def _check_types(folder: Path, stored: StoredWeights, report: Report) -> None:
    """Integers would be used as the weights themselves, and produce noise."""
    for name, tensor in stored.tensors.items():
        if name.endswith((".weight", ".bias")) and tensor.dtype in WHOLE_NUMBERS:
            report.error(
                "files",
                f"{folder / tensor.file}: the weight {name} is of type {tensor.dtype}, but config.json "
                "names no quantization: the file is damaged, or of another model",
            )
            return


def _compare(stage: str, footprint: StageFootprint, stored: StoredWeights, report: Report) -> None:
    missing = [name for name in footprint.tensors if name not in stored.tensors]
    if missing:
        report.error(
            "files",
            f"stage '{stage}': {len(missing)} of its {len(footprint.tensors)} weights are in no file, the "
            f"first is {missing[0]}: the checkpoint is incomplete, or config.json is of another one",
        )
    for name, shape in footprint.tensors.items():
        found = stored.tensors.get(name)
        if found is not None and found.shape != shape:
            report.error(
                "files",
                f"stage '{stage}': the weight {name} is {list(found.shape)} in {found.file}, by config.json "
                f"it is {list(shape)}: they are of different models",
            )
            return


def _is_quantized(folder: Path) -> bool:
    """Quantized weights have names and shapes of their own."""
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "quantization_config" in document


def _tell_download(folder: Path, model: str, report: Report) -> None:
    free = shutil.disk_usage(folder).free
    index = folder / "model.safetensors.index.json"
    size = None
    if index.is_file():
        try:
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (KeyError, TypeError, ValueError):
            report.warn("files", f"{index} does not say how large the weights are")
    if size is None:
        report.warn("files", f"the weights of {model} are not here yet; 'omni-server serve' downloads them")
    elif size > free:
        report.error(
            "files",
            f"the weights of {model} are not here yet and take {size / 1e9:.1f} GB, but {folder} has "
            f"{free / 1e9:.1f} GB free: set HF_HOME to a larger disk",
        )
    else:
        report.warn(
            "files",
            f"the weights of {model} are not here yet: 'omni-server serve' downloads {size / 1e9:.1f} GB",
        )
