"""The whole check, from MODEL and a stage config to a report."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omni_server.check.default_config import base_config, chosen_config, find_folder
from omni_server.check.files import StoredWeights, read_weights, small_file_problems, weight_problems
from omni_server.check.machine import (
    Gpu,
    check_installation,
    gpus_of_this_machine,
    has_gpu,
    memory_of_this_machine,
    shared_memory_free,
)
from omni_server.check.memory import ModelSizes, check_cpu_memory, check_gpu_memory
from omni_server.check.report import DeviceMemory, Report
from omni_server.check.stage_flags import NO_STAGE_FLAGS, StageFlags
from omni_server.config.load import load_stage_config
from omni_server.config.model_folder import HubUnreachableError, architectures_of
from omni_server.config.speech_model import LLM_FOLDER, SPEECH_FOLDER
from omni_server.config.stage_config import Platform, StageConfig
from omni_server.engine.queue_layout import queue_layout
from omni_server.errors import ConfigError
from omni_server.family import (
    FamilyModel,
    load_family,
    open_model,
    servable_architectures,
    without_missing_voice_encoder,
)
from omni_server.family.footprint import StageFootprint
from omni_server.orchestrator.codec_edge import check_longest_window
from omni_server.transport.slab_queue import queue_bytes, refuse_unordered_machine


@dataclass(frozen=True)
class CheckOptions:
    model: str
    speech_model: str | None = None
    """None is the stage config's."""
    stage_config: Path | None = None
    """None uses what `serve` chooses."""
    use_cpu: bool = False
    flags: StageFlags = NO_STAGE_FLAGS
    revision: str | None = None
    load_format: str = "auto"
    device_memory: tuple[int, ...] | None = None
    """Bytes of each GPU of another machine to check for; None checks this machine."""


def check(options: CheckOptions, on_progress: Callable[[str], None]) -> Report:
    """Checks everything that can be checked without starting an engine. Raises `ConfigError` if the stage
    config itself is invalid."""
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # read at its import; warns of ids that are right here
    on_gpu = not options.use_cpu and (options.device_memory is not None or has_gpu())
    path, named_config, speech_model = options.stage_config, None, options.speech_model
    platform: Platform = "cuda" if on_gpu else "cpu"
    architectures = servable_architectures()
    if path is not None:
        named_config = load_stage_config(path)
        platform, architectures = named_config.platform, load_family(named_config.model_family).architectures
        speech_model = speech_model or named_config.speech_model
    report = Report(options.model, stage_config="" if path is None else str(path), platform=platform)
    is_here = options.device_memory is None
    if is_here:
        check_installation(platform, report)
    try:
        folder = find_folder(
            options.model,
            speech_model,
            architectures=architectures,
            revision=options.revision,
            needs_weights=False,
            on_progress=on_progress,
        )
        if named_config is None:
            family, path, config = base_config(folder, options.model, on_gpu=on_gpu)
            report.stage_config = str(path)
        else:
            family, config = load_family(named_config.model_family), named_config
    except HubUnreachableError as error:
        report.leave_open("files", str(error))
        return report
    except ConfigError as error:
        report.error("files", str(error))
        return report
    config = options.flags.applied(config)
    report.folder = str(folder)
    report.architecture = ", ".join(architectures_of(folder))
    report.errors("files", small_file_problems(folder, family))
    stored = StoredWeights()
    if options.load_format != "dummy":
        stored = read_weights(folder, config)
        report.num_weight_files, report.weight_bytes = stored.num_files, stored.num_bytes
    model: FamilyModel | None = None
    if report.fits and not stored.problems:
        with report.noting("files"):
            model = open_model(family, folder)  # as the server does, tokenizer and voices included
            report.dtype = model.dtype_name()
    footprints: dict[str, StageFootprint] = {}
    with report.noting("files"):
        config = without_missing_voice_encoder(config, family, folder)
        footprints = family.footprints(folder, config)
    if options.load_format != "dummy":
        models = {folder: options.model}
        if speech_model is not None:
            models = {folder / LLM_FOLDER: options.model, folder / SPEECH_FOLDER: speech_model}
        on_hub = {part: name for part, name in models.items() if not Path(name).expanduser().is_dir()}
        awaited = {part: name for part, name in on_hub.items() if not any(part.rglob("*.safetensors"))}
        for part, name in awaited.items():
            _check_download(part, name, report)
        if not awaited:
            report.errors("files", weight_problems(folder, stored, footprints))
    gpus: list[Gpu] | None = None
    sizes = ModelSizes(options.model, footprints, stored)
    if named_config is None and footprints:
        gpus = _gpus(config, options) if on_gpu else []
        try:
            config = chosen_config(gpus, config, sizes, family, use_cpu=options.use_cpu, flags=options.flags)
        except ConfigError as error:
            report.devices = list(gpus)
            report.error("memory", str(error))
            return report
        report.stage_config = f"chosen for this model and these devices, from {path}"
    if model is not None:
        with report.noting("stage config", f"{report.stage_config}: "):
            check_longest_window(config, model)
        _check_shared_memory(config, model, report, is_here=is_here)
        if config.platform == "cpu":
            memory = memory_of_this_machine()
            if options.device_memory is not None:
                size = options.device_memory[0]
                memory = DeviceMemory(None, "memory", size, size)
            check_cpu_memory(config, sizes, memory, report.shared_memory_needed or 0, report)
        else:
            check_gpu_memory(config, sizes, _gpus(config, options) if gpus is None else gpus, report)
    return report


def _check_download(folder: Path, model: str, report: Report) -> None:
    """Checks the download size of a hub model with small files in `folder`."""
    free = shutil.disk_usage(folder).free
    index = folder / "model.safetensors.index.json"
    size = None
    with suppress(OSError, LookupError, RecursionError, TypeError, ValueError):  # it does not say
        size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    not_here = f"the weights of {model} are not here yet"
    if size is None:
        report.warn("files", f"{not_here}; 'omni-server serve' downloads them")
    elif size <= free:
        report.warn("files", f"{not_here}: 'omni-server serve' downloads {size / 1e9:.1f} GB")
    else:
        report.error(
            "files",
            f"{not_here} and take {size / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free: set "
            "HF_HOME to a larger disk",
        )


def _check_shared_memory(config: StageConfig, model: FamilyModel, report: Report, *, is_here: bool) -> None:
    edges = [edge for edge in config.edges if edge.queue.transport == "shared_memory"]
    report.shared_memory_needed = needed = sum(
        config.stages[edge.source].replicas * queue_bytes(queue_layout(config, edge, model)) for edge in edges
    )
    if not is_here:
        return
    if edges:
        with report.noting("shared memory"):
            refuse_unordered_machine()
    report.shared_memory_free = free = shared_memory_free()
    if needed > free:
        report.error(
            "shared memory",
            f"the queues need {needed / 2**20:.0f} MiB in /dev/shm, which has {free / 2**20:.0f} MiB free: "
            "enlarge it (docker run --shm-size or --ipc=host), or lower queue.capacity of the edge or "
            "max_num_batched_tokens of the stage that sends",
        )


def _gpus(config: StageConfig, options: CheckOptions) -> list[Gpu]:
    if options.device_memory is None:
        return gpus_of_this_machine()
    sizes = list(options.device_memory)
    if options.stage_config is not None:  # the last size applies to the file's further devices
        sizes += sizes[-1:] * max(
            0, 1 + max(max(stage.devices) for stage in config.stages.values()) - len(sizes)
        )
    return [Gpu(i, "GPU of the size given", size, None, None) for i, size in enumerate(sizes)]
