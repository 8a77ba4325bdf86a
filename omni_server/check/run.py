"""The whole check, from MODEL and a stage config to a report."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omni_server.check.files import check_architecture, check_small_files, check_weights, open_model
from omni_server.check.machine import (
    Gpu,
    check_address,
    check_installation,
    gpus_of_this_machine,
    memory_of_this_machine,
    shared_memory_free,
)
from omni_server.check.memory import check_cpu_memory, check_gpu_memory
from omni_server.check.report import DeviceMemory, Report
from omni_server.check.safetensors_headers import StoredWeights
from omni_server.config.load import load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.edge import check_longest_window
from omni_server.engine.queue_layout import queue_layout
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel, ModelFamily, StageFootprint, load_family
from omni_server.model_folder import resolve_model_folder


@dataclass(frozen=True)
class CheckOptions:
    """What the command line asked for."""

    model: str
    stage_config: Path
    revision: str | None = None
    load_format: str = "auto"
    device_memory: int | None = None
    """Bytes of every GPU of the machine that is meant, which is not this one; None: this one."""
    host: str = "127.0.0.1"
    port: int = 8091


def check(options: CheckOptions, on_progress: Callable[[str], None]) -> Report:
    """Everything that can be told without starting an engine. Raises `ConfigError` for a stage config that is not
    valid by itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read at its import; warns of ids that are right here
    config = load_stage_config(options.stage_config)
    family = load_family(config.model_family)
    report = Report(options.model, stage_config=str(options.stage_config), platform=config.platform)
    is_here = options.device_memory is None
    if is_here:
        check_installation(config.platform, report)
        check_address(options.host, options.port, report)
    try:
        folder = resolve_model_folder(
            options.model, revision=options.revision, needs_weights=False, on_progress=on_progress
        )
    except ConfigError as error:
        report.error("files", str(error))
        return report
    report.folder = str(folder)
    check_small_files(folder, family, report)
    if not check_architecture(folder, config, family, report):
        return report
    model = open_model(folder, family, report) if report.fits else None
    footprints = _footprints(folder, config, family, report)
    stored = StoredWeights()
    if options.load_format != "dummy":
        is_hub_id = not Path(options.model).expanduser().is_dir()
        stored = check_weights(folder, options.model, footprints, is_hub_id=is_hub_id, report=report)
    if model is not None:
        _check_windows(config, model, report)
        _check_shared_memory(config, model, report, is_here=is_here)
        _check_memory(config, footprints, stored, model.dtype_name(), options, report)
    return report


def _footprints(folder: Path, config: StageConfig, family: ModelFamily, report: Report) -> dict[str, StageFootprint]:
    try:
        return family.footprints(folder, config)
    except ConfigError as error:
        report.error("files", str(error))
        return {}


def _check_windows(config: StageConfig, model: FamilyModel, report: Report) -> None:
    for edge in config.edges:
        if edge.chunks is not None:
            try:
                check_longest_window(edge.chunks, model.codec, config.stages[edge.target].max_model_len)
            except ConfigError as error:
                report.error("stage config", f"{report.stage_config}: {error}")


def _check_shared_memory(config: StageConfig, model: FamilyModel, report: Report, *, is_here: bool) -> None:
    edges = [edge for edge in config.edges if edge.queue.transport == "shared_memory"]
    report.shared_memory_needed = needed = sum(queue_layout(config, edge, model).num_bytes for edge in edges)
    if not is_here:
        return
    report.shared_memory_free = free = shared_memory_free()
    if needed > free:
        report.error(
            "shared memory",
            f"the queues need {needed / 2**20:.0f} MiB in /dev/shm, which has {free / 2**20:.0f} MiB free: enlarge it "
            "(docker run --shm-size or --ipc=host), or lower queue.capacity of the edge or max_num_batched_tokens of "
            "the stage that sends",
        )


def _check_memory(
    config: StageConfig,
    footprints: dict[str, StageFootprint],
    stored: StoredWeights,
    dtype: str,
    options: CheckOptions,
    report: Report,
) -> None:
    if config.platform == "cpu":
        machine = memory_of_this_machine()
        if options.device_memory is not None:
            machine = DeviceMemory(None, "memory", options.device_memory, options.device_memory)
        check_cpu_memory(config, footprints, stored, dtype, machine, report.shared_memory_needed or 0, report)
        return
    if options.device_memory is not None:
        indices = sorted({device for stage in config.stages.values() for device in stage.devices})
        gpus = [Gpu(DeviceMemory(i, "GPU of the size given", options.device_memory, None), None) for i in indices]
    else:
        gpus = gpus_of_this_machine()
    check_gpu_memory(config, footprints, stored, dtype, gpus, report)
