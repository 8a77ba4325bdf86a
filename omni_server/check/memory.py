"""Does every stage fit into its share of its GPU, or all of them into the memory of a machine without one?"""

import math
from collections.abc import Mapping

from omni_server.check.machine import BFLOAT16_CAPABILITY, Gpu
from omni_server.check.report import DeviceMemory, Report
from omni_server.check.safetensors_headers import StoredWeights
from omni_server.check.stage_memory import PROCESS_BYTES, StageNeeds, needs_on_cpu, needs_on_gpu
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage, Stage
from omni_server.family import StageFootprint


def check_gpu_memory(
    config: StageConfig,
    footprints: Mapping[str, StageFootprint],
    stored: StoredWeights,
    gpus: list[Gpu],
    report: Report,
) -> None:
    """Stages against their shares, shares against devices. What is found goes into `report`."""
    by_index = {gpu.memory.index: gpu for gpu in gpus}
    used = sorted({device for stage in config.stages.values() for device in stage.devices})
    for index in used:
        users = [name for name, stage in config.stages.items() if index in stage.devices]
        if index not in by_index:
            report.error(
                "memory",
                f"device {index}, on which 'devices' puts {_and(users)}, is not there: this machine has "
                f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}; choose devices among {list(by_index)}",
            )
    needs: dict[str, StageNeeds] = {}
    for name, stage in config.stages.items():
        gpu = next((by_index[device] for device in stage.devices if device in by_index), None)
        if gpu is None or name not in footprints:
            continue
        needs[name] = needs_on_gpu(name, config, footprints[name], stored, gpu.memory.total)
        report.stages.append(needs[name].memory)
        _check_dtype(name, stage, footprints[name].dtype, gpu, report)
        if "kv_cache_memory_bytes" in stage.engine_args:
            _check_kv_tokens(name, needs[name], report)
    for index in used:
        if index in by_index:
            report.devices.append(by_index[index].memory)
            _check_device(
                config,
                by_index[index].memory,
                {n: needs[n] for n in needs if index in _devices(config, n)},
                report,
            )


def check_cpu_memory(
    config: StageConfig,
    footprints: Mapping[str, StageFootprint],
    stored: StoredWeights,
    machine: DeviceMemory,
    shared_memory: int,
    report: Report,
) -> None:
    """All stages together against the machine's memory. `shared_memory`: bytes of queues, which is memory
    too."""
    report.devices.append(machine)
    for name in config.stages:
        if name not in footprints:
            continue
        needs = needs_on_cpu(name, config, footprints[name], stored)
        report.stages.append(needs.memory)
        field = f"stages.{name}.engine_args.kv_cache_memory_bytes"
        if footprints[name].kv is None:
            continue
        if needs.memory.kv_cache is None:
            report.warn(
                "memory",
                f"{field} is not set: vLLM takes a share of the machine's memory for the KV cache; set it",
            )
        else:
            _check_kv_tokens(name, needs, report)
    total = (
        sum(stage.taken + (stage.kv_cache or 0) for stage in report.stages) + PROCESS_BYTES + shared_memory
    )
    if machine.free is not None and total > machine.free:
        report.error(
            "memory",
            f"all stages, the server and its queues take about {_gb(total)}, and of {_gb(machine.total)} memory "
            f"{_gb(machine.free)} are free: end other programs, lower kv_cache_memory_bytes in the stages' "
            "engine_args, or choose a smaller model",
        )


def _check_device(
    config: StageConfig, device: DeviceMemory, needs: dict[str, StageNeeds], report: Report
) -> None:
    """Stages that do not fit their shares, and what would help; then the shares against what is free."""
    small = [
        name
        for name, need in needs.items()
        if need.memory.share is not None and need.memory.share < need.least
    ]
    limit = int(MAX_MEMORY_FRACTION * device.total)
    together = sum(need.least for need in needs.values())
    if small and together > limit:
        parts = " + ".join(f"{name} {_gb(need.least)}" for name, need in needs.items())
        given = [name for name, need in needs.items() if need.given_kv_bytes is not None]
        lower = f"lower kv_cache_memory_bytes of {_and(given)}, " if given else ""
        report.error(
            "memory",
            f"device {device.index} has {_gb(device.total)}, of which stages may take {_gb(limit)}; they need at least "
            f"{_gb(together)} ({parts}): {lower}put stages on other GPUs with 'devices', spread one over several with "
            "'tensor_parallel_size', lower max_model_len and max_num_batched_tokens, or choose a smaller model",
        )
    elif small:
        spare = (limit - together) / together
        shares = {name: _share(need.least * (1 + spare) / device.total) for name, need in needs.items()}
        for name in small:
            need = needs[name]
            assert need.memory.share is not None
            report.error(
                "memory",
                f"stages.{name}.gpu_memory_utilization {config.stages[name].gpu_memory_utilization:g} is "
                f"{_gb(need.memory.share)} of device {device.index}; the stage needs {_gb(need.least)} at least "
                f"({_gb(need.memory.taken)} and {_least_kv_cache(need)}). "
                f"Shares that fit: {', '.join(f'{n} {share:g}' for n, share in shares.items())}",
            )
    asked = sum(need.memory.share or 0 for need in needs.values())
    if device.free is not None and asked > device.free:
        report.error(
            "memory",
            f"the stages ask for {_gb(asked)} of device {device.index}, which has {_gb(device.free)} of "
            f"{_gb(device.total)} free: end the programs that use it, or lower gpu_memory_utilization of "
            f"{_and(list(needs))}",
        )


def _least_kv_cache(need: StageNeeds) -> str:
    """What of `need.least` is KV cache, in words."""
    if need.given_kv_bytes is None:
        return f"the KV cache of one sequence of {need.memory.max_model_len} tokens"
    return f"the {_gb(need.given_kv_bytes)} of engine_args.kv_cache_memory_bytes"


def _check_kv_tokens(name: str, needs: StageNeeds, report: Report) -> None:
    """Of a KV cache whose size is given."""
    memory = needs.memory
    if memory.kv_tokens is not None and memory.kv_tokens < memory.max_model_len:
        report.error(
            "memory",
            f"stages.{name}.engine_args.kv_cache_memory_bytes has room for {memory.kv_tokens} tokens, fewer than the "
            f"stage's max_model_len ({memory.max_model_len}): raise it to at least {needs.sequence_bytes}, or "
            "lower max_model_len",
        )


def _check_dtype(name: str, stage: Stage, dtype: str, gpu: Gpu, report: Report) -> None:
    wanted = dtype if stage.dtype == "auto" and isinstance(stage, ArStage) else stage.dtype
    if wanted == "bfloat16" and gpu.capability is not None and gpu.capability < BFLOAT16_CAPABILITY:
        report.error(
            "memory",
            f"stages.{name}.dtype is bfloat16, which {gpu.memory.name} (compute capability "
            f"{'.'.join(map(str, gpu.capability))}) does not have: set it to float16",
        )


def _devices(config: StageConfig, name: str) -> tuple[int, ...]:
    return config.stages[name].devices


def _share(value: float) -> float:
    """Rounded down, so that the sum stays within the limit."""
    return math.floor(1000 * value) / 1000


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
