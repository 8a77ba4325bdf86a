"""Does every stage fit into its share of its GPU, or all of them into the memory of a machine without one?

Exact are the weights, the state of utterances, the size of the KV cache for a token, and what the server sets aside;
the rest are estimates, calibrated on one H200 with the 7B's sizes (steps of 8192 tokens, 64 requests).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from omni_server.check.machine import BFLOAT16_CAPABILITY, Gpu
from omni_server.check.report import DeviceMemory, Report, StageMemory
from omni_server.check.safetensors_headers import StoredWeights
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage, Stage
from omni_server.family import StageFootprint
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES, SLACK_BYTES

BUFFER_BYTES = 500_000_000
"""Estimate of a language model's buffers beside its weights: 0.3 and 0.5 GB were measured."""
GRAPH_BYTES = 300_000_000
"""Estimate of a language model's CUDA graphs: 0.2 and 0.3 GB were measured."""
PROCESS_BYTES = 600_000_000
"""Estimate of a process on a CPU without weights and KV cache: the demo's server and its three engines took 2.4 GB."""

_NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_BLOCK_SIZE = {"cuda": 16, "cpu": 128}
"""vLLM's, in tokens."""


@dataclass(frozen=True)
class _Needs:
    """A stage's part of one device."""

    memory: StageMemory
    kv_token_bytes: float
    block_size: int
    given_kv_bytes: int | None = None
    """`kv_cache_memory_bytes`, where it is set."""

    @property
    def sequence_bytes(self) -> int:
        """KV cache of one sequence of `max_model_len`."""
        return math.ceil(self.kv_token_bytes * (self.memory.max_model_len + self.block_size))

    @property
    def least(self) -> int:
        """The smallest share with which the stage starts: with the KV cache that is asked for, or with room for one
        sequence."""
        return self.memory.taken + (self.sequence_bytes if self.given_kv_bytes is None else self.given_kv_bytes)

    @property
    def least_kv_cache(self) -> str:
        """What of `least` is KV cache, in words."""
        if self.given_kv_bytes is None:
            return f"the KV cache of one sequence of {self.memory.max_model_len} tokens"
        return f"the {_gb(self.given_kv_bytes)} of engine_args.kv_cache_memory_bytes"


def check_gpu_memory(
    config: StageConfig,
    footprints: Mapping[str, StageFootprint],
    stored: StoredWeights,
    dtype: str,
    gpus: list[Gpu],
    report: Report,
) -> None:
    """Stages against their shares, shares against devices. `dtype`: the checkpoint's own. What is found goes into
    `report`."""
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
    needs: dict[str, _Needs] = {}
    for name, stage in config.stages.items():
        gpu = next((by_index[device] for device in stage.devices if device in by_index), None)
        if gpu is None or name not in footprints:
            continue
        needs[name] = _on_gpu(name, stage, footprints[name], stored, dtype, gpu.memory.total)
        report.stages.append(needs[name].memory)
        _check_dtype(name, stage, dtype, gpu, report)
        if "kv_cache_memory_bytes" in stage.engine_args:
            _check_kv_tokens(name, needs[name], report)
    for index in used:
        if index in by_index:
            report.devices.append(by_index[index].memory)
            _check_device(
                config, by_index[index].memory, {n: needs[n] for n in needs if index in _devices(config, n)}, report
            )


def check_cpu_memory(
    config: StageConfig,
    footprints: Mapping[str, StageFootprint],
    stored: StoredWeights,
    dtype: str,
    machine: DeviceMemory,
    shared_memory: int,
    report: Report,
) -> None:
    """All stages together against the machine's memory. `shared_memory`: bytes of queues, which is memory too."""
    report.devices.append(machine)
    for name, stage in config.stages.items():
        if name not in footprints:
            continue
        needs = _on_cpu(name, stage, footprints[name], stored, dtype)
        report.stages.append(needs.memory)
        field = f"stages.{name}.engine_args.kv_cache_memory_bytes"
        if footprints[name].kv is None:
            continue
        if needs.memory.kv_cache is None:
            report.warn(
                "memory", f"{field} is not set: vLLM takes a share of the machine's memory for the KV cache; set it"
            )
        else:
            _check_kv_tokens(name, needs, report)
    total = sum(stage.taken + (stage.kv_cache or 0) for stage in report.stages) + PROCESS_BYTES + shared_memory
    if machine.free is not None and total > machine.free:
        report.error(
            "memory",
            f"all stages, the server and its queues take about {_gb(total)}, and of {_gb(machine.total)} memory "
            f"{_gb(machine.free)} are free: end other programs, lower kv_cache_memory_bytes in the stages' "
            "engine_args, or choose a smaller model",
        )


def _on_gpu(
    name: str, stage: Stage, footprint: StageFootprint, stored: StoredWeights, dtype: str, total: int
) -> _Needs:
    share = int(total * stage.gpu_memory_utilization)
    is_ar = isinstance(stage, ArStage)
    ranks = stage.tensor_parallel_size * stage.pipeline_parallel_size if isinstance(stage, ArStage) else 1
    weights = _weight_bytes(footprint, stored, _dtype(stage, footprint, dtype)) // ranks
    # Only where something is sized by what is left does the server set memory aside for what comes later.
    reserve = OUTSIDE_TORCH_BYTES + (SLACK_BYTES + BUFFER_BYTES if is_ar else 0)
    if is_ar and not stage.engine_args.get("enforce_eager"):
        reserve += GRAPH_BYTES
    memory = StageMemory(
        name=name,
        devices=tuple(stage.devices),
        share=share,
        weights=weights,
        state=footprint.state_bytes,
        activations=_activation_bytes(stage, footprint, _dtype(stage, footprint, dtype)) // ranks,
        reserve=reserve,
        kv_cache=None,
        kv_tokens=None,
        max_model_len=stage.max_model_len,
    )
    if footprint.kv is None:
        return _Needs(memory, 0, 0)
    given = stage.engine_args.get("kv_cache_memory_bytes")
    left = int(given) if given is not None else share - memory.taken
    needs = _with_kv_cache(memory, stage, footprint, dtype, left, _DEFAULT_BLOCK_SIZE["cuda"])
    return needs if given is None else replace(needs, given_kv_bytes=int(given))


def _on_cpu(name: str, stage: Stage, footprint: StageFootprint, stored: StoredWeights, dtype: str) -> _Needs:
    memory = StageMemory(
        name=name,
        devices=(),
        share=None,
        weights=_weight_bytes(footprint, stored, _dtype(stage, footprint, dtype)),
        state=footprint.state_bytes,
        activations=_activation_bytes(stage, footprint, _dtype(stage, footprint, dtype)),
        reserve=PROCESS_BYTES,
        kv_cache=None,
        kv_tokens=None,
        max_model_len=stage.max_model_len,
    )
    given = stage.engine_args.get("kv_cache_memory_bytes")
    if footprint.kv is None or given is None:
        return _Needs(memory, 0, 0)
    return _with_kv_cache(memory, stage, footprint, dtype, int(given), _DEFAULT_BLOCK_SIZE["cpu"])


def _with_kv_cache(
    memory: StageMemory, stage: Stage, footprint: StageFootprint, dtype: str, kv_bytes: int, block_size: int
) -> _Needs:
    assert footprint.kv is not None
    kv = footprint.kv
    ranks = stage.tensor_parallel_size if isinstance(stage, ArStage) else 1
    cache_dtype = str(stage.engine_args.get("kv_cache_dtype", "auto"))
    value_bytes = 1 if cache_dtype.startswith("fp8") else _NUM_BYTES[_dtype(stage, footprint, dtype)]
    # Keys and values. A head is on one rank, and on each of them where there are more ranks than heads.
    token_bytes = 2 * kv.num_layers * max(1, kv.num_kv_heads // ranks) * kv.head_dim * value_bytes
    block_size = int(stage.engine_args.get("block_size", block_size))
    tokens = max(0, kv_bytes) // (token_bytes * block_size) * block_size
    values = vars(memory) | {"kv_cache": kv_bytes, "kv_tokens": tokens}
    return _Needs(StageMemory(**values), token_bytes, block_size)


def _check_device(config: StageConfig, device: DeviceMemory, needs: dict[str, _Needs], report: Report) -> None:
    """Stages that do not fit their shares, and what would help; then the shares against what is free."""
    small = [name for name, need in needs.items() if need.memory.share is not None and need.memory.share < need.least]
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
                f"({_gb(need.memory.taken)} and {need.least_kv_cache}). "
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


def _check_kv_tokens(name: str, needs: _Needs, report: Report) -> None:
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


def _dtype(stage: Stage, footprint: StageFootprint, dtype: str) -> str:
    """What the stage computes with, and its KV cache is of."""
    if stage.dtype != "auto":
        return stage.dtype
    return "float32" if footprint.loads_float32 else dtype


def _weight_bytes(footprint: StageFootprint, stored: StoredWeights, dtype: str) -> int:
    """In memory. Quantized weights stay as they are stored; their names are not those of the config's model."""
    num_bytes = 4 if footprint.loads_float32 else _NUM_BYTES[dtype]
    total = 0
    for name, shape in footprint.tensors.items():
        found = stored.tensors.get(name)
        is_small = found is not None and found.num_bytes < math.prod(shape)
        total += found.num_bytes if found is not None and is_small else math.prod(shape) * num_bytes
    return total


def _activation_bytes(stage: Stage, footprint: StageFootprint, dtype: str) -> int:
    return stage.max_num_batched_tokens * footprint.values_per_token * _NUM_BYTES[dtype]


def _devices(config: StageConfig, name: str) -> tuple[int, ...]:
    return config.stages[name].devices


def _share(value: float) -> float:
    """Rounded down, so that the sum stays within the limit."""
    return math.floor(1000 * value) / 1000


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
