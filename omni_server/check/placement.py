"""Plans a stage config for the available GPUs: devices, shares, lengths and batch sizes of all stages.

This module does not inspect the machine: it takes sizes and returns a stage config, or raises the reason.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from omni_server.check.machine import Gpu
from omni_server.check.memory import (
    CAPTURE_SIZE,
    ModelSizes,
    cpu_bytes,
    dtype_problems,
    largest_graph,
    stage_memory,
)
from omni_server.check.report import DeviceMemory, StageMemory, gb
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage, DiffusionStage, Stage
from omni_server.errors import ConfigError

Quantization = Literal["fp8", "awq", "gptq"]

TOKENS_PER_REQUEST = 1024
"""KV cache tokens per request for `max_num_seqs` requests: about 20 s of Qwen2.5-Omni's speech, with the
prompt and 50 codec tokens per second. Requests that outgrow the KV cache are preempted."""

_SHARE_STEPS = 10_000
"""Shares are multiples of a ten-thousandth of their device."""
_INT4 = "awq"
_INT4_BITS = 4.16
"""4 bits, plus a 16-bit scale and a 4-bit zero point per group of 128."""


@dataclass(frozen=True)
class _Size:
    """Upper bounds of a deployment's concurrent load."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cudagraph_capture_size: int
    """Tokens of the largest step with a CUDA graph: the 7B thinker's graphs of up to 512 take 1.3 GB."""


_SIZES = (
    _Size(32768, 64, 8192, 2048),
    _Size(32768, 64, 8192, 512),
    _Size(32768, 32, 4096, 512),
    _Size(32768, 16, 2048, 256),
    _Size(16384, 8, 2048, 128),
    _Size(8192, 8, 1024, 128),
    _Size(8192, 4, 1024, 16),
    _Size(4096, 4, 1024, 16),
)
"""The largest that fits is chosen. Smaller values in the base config are kept."""

_Sizes = Sequence[_Size]
_Devices = dict[str, Gpu]
"""By stage."""
_Fields = dict[str, object]
"""A stage's new values by name."""


def plan(
    gpus: Sequence[Gpu],
    base: StageConfig,
    model: ModelSizes,
    quantization: Quantization | None,
    min_model_len: int = 0,
) -> StageConfig:
    """Sets devices, shares, lengths, batch sizes and precision in `base` so that `model` fits `gpus`. No
    `max_model_len` is lowered below `min_model_len`.

    `base` stays unchanged if it fits one GPU. Otherwise chooses the largest deployment that fits, on one GPU
    if possible, else with the first stage on one and the others on a second. Raises a one-line `ConfigError`
    that says what would fit.
    """
    base = _quantized(base, model, quantization)
    gpus = [gpu for gpu in gpus if gpu.has_bfloat16] or gpus
    sizes = [replace(size, max_model_len=max(size.max_model_len, min_model_len)) for size in _SIZES]
    fitting = _fitting(gpus, base, model, sizes)
    if fitting is None:
        raise ConfigError(_refusal(gpus, base, model, sizes, can_be_quantized=quantization is None))
    by_index = {gpu.index: gpu for gpu in gpus}
    for name, stage in fitting.stages.items():
        if isinstance(stage, ArStage):
            for problem in dtype_problems(name, stage, model.footprints[name], by_index[stage.devices[0]]):
                raise ConfigError(f"{problem} in a stage config")
    return fitting


def check_cpu_plan(machine: DeviceMemory, config: StageConfig, model: ModelSizes) -> None:
    """Raises `ConfigError` if the stages do not fit the machine's memory."""
    total = cpu_bytes(stage_memory(name, config, model, None) for name in model.footprints)
    if machine.free is not None and total > machine.free:
        raise ConfigError(
            f"{model.name} takes about {gb(total)} of memory on a CPU, and of {gb(machine.total)} "
            f"{gb(machine.free)} are free: end other programs, or choose a smaller model"
        )


def _quantized(base: StageConfig, model: ModelSizes, quantization: Quantization | None) -> StageConfig:
    """Adds the engine arguments for the wanted precision to `base`. Raises `ConfigError` if the checkpoint
    has another."""
    quantizables = {
        name: fp.quantizable for name, fp in model.footprints.items() if fp.quantizable is not None
    }
    methods = {quantizable.method for quantizable in quantizables.values() if quantizable.method is not None}
    if quantization is None or quantization in methods:
        return base  # vLLM reads the checkpoint
    if methods:
        raise ConfigError(
            f"--quantization {quantization}: the weights of {model.name} are quantized already, with "
            f"{', '.join(sorted(methods))}: leave the flag out"
        )
    if not quantizables:
        raise ConfigError(
            f"--quantization {quantization}: {model.name} has no weights that could be quantized"
        )
    if quantization != "fp8":
        raise ConfigError(
            f"--quantization {quantization}: {model.name} names no quantization_config in its config.json: "
            f"give a checkpoint that was quantized with {quantization}, or --quantization fp8, which needs "
            "none"
        )
    return _with_fields(
        base,
        {
            name: {"engine_args": {**base.stages[name].engine_args, **quantizable.fp8_engine_args}}
            for name, quantizable in quantizables.items()
        },
    )


def _fitting(gpus: Sequence[Gpu], base: StageConfig, model: ModelSizes, sizes: _Sizes) -> StageConfig | None:
    placements = list(_placements(gpus, base))
    on_one = _placed(base, placements[0])
    if _fits_as_it_is(on_one, placements[0], model):
        return on_one
    for size in sizes:
        for devices in placements:
            fitting = _with_shares(_sized(_placed(base, devices), size), devices, model)
            if fitting is not None:
                return fitting
    return None


def _placements(gpus: Sequence[Gpu], base: StageConfig) -> Iterator[_Devices]:
    """Yields all stages on the largest GPU; then the first on it, the others on the next largest."""
    largest = sorted(gpus, key=lambda gpu: -budget(gpu))[:2]
    for gpu in largest[:1]:
        yield dict.fromkeys(base.stages, gpu)
    if len(largest) == 2 and len(base.stages) > 1:
        first, *others = base.stages
        yield {first: largest[0]} | dict.fromkeys(others, largest[1])


def budget(gpu: Gpu, share: float = MAX_MEMORY_FRACTION) -> int:
    """Bytes of a GPU for stages, at most `share` of it."""
    limit = int(share * gpu.total)
    return limit if gpu.free is None else min(limit, gpu.free)


def _placed(base: StageConfig, devices: _Devices) -> StageConfig:
    return _with_fields(base, {name: {"devices": (gpu.index,)} for name, gpu in devices.items()})


def _sized(config: StageConfig, size: _Size) -> StageConfig:
    return _with_fields(config, {name: _sized_fields(stage, size) for name, stage in config.stages.items()})


def _sized_fields(stage: Stage, size: _Size) -> _Fields:
    num_seqs = min(stage.max_num_seqs, size.max_num_seqs)
    if isinstance(stage, DiffusionStage):
        # Half of the windows have full length.
        longest_step = stage.max_model_len * max(1, num_seqs // 2)
        return {
            "max_num_seqs": num_seqs,
            "max_streams": min(stage.num_stream_slots, 2 * num_seqs),
            "max_num_batched_tokens": min(stage.max_num_batched_tokens, longest_step),
        }
    largest = min(largest_graph(stage), size.max_cudagraph_capture_size)
    return {
        "max_model_len": min(stage.max_model_len, size.max_model_len),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": min(stage.max_num_batched_tokens, size.max_num_batched_tokens),
        "engine_args": {**stage.engine_args, CAPTURE_SIZE: largest},
    }


def _fits_as_it_is(config: StageConfig, devices: _Devices, model: ModelSizes) -> bool:
    """`devices` are one GPU."""
    needs = _needs(config, devices, model).values()
    total = sum(need.share or 0 for need in needs)
    has_room = all(need.least <= (need.share or 0) for need in needs)
    return has_room and total <= min(map(budget, devices.values()))


def _with_shares(config: StageConfig, devices: _Devices, model: ModelSizes) -> StageConfig | None:
    """Sets shares proportional to the stages' minimum needs, as large as GPUs allow; None if too small."""
    least = {name: _least(need) for name, need in _needs(config, devices, model).items()}
    shares: dict[str, _Fields] = {}
    for name, gpu in devices.items():
        together = sum(least[other] for other in devices if devices[other] is gpu)
        largest = least[name] * budget(gpu) / together / gpu.total
        share = math.floor(_SHARE_STEPS * largest) / _SHARE_STEPS
        if share * gpu.total < least[name]:
            return None
        shares[name] = {"gpu_memory_utilization": share}
    return StageConfig.model_validate(_with_fields(config, shares).model_dump(by_alias=True))


def _least(need: StageMemory) -> int:
    """Includes KV cache for one full-length sequence, or a short one per request."""
    return need.taken + need.kv_bytes(max(need.max_model_len, need.max_num_seqs * TOKENS_PER_REQUEST))


def _needs(config: StageConfig, devices: _Devices, model: ModelSizes) -> dict[str, StageMemory]:
    return {name: stage_memory(name, config, model, gpu.total) for name, gpu in devices.items()}


def _refusal(
    gpus: Sequence[Gpu], base: StageConfig, model: ModelSizes, sizes: _Sizes, *, can_be_quantized: bool
) -> str:
    """One line: what exists, and what would fit."""
    there = ", ".join(
        f"device {gpu.index} has {gb(gpu.total)}, {gb(budget(gpu))} of them for stages" for gpu in gpus
    )
    would_fit = []
    methods = {fp.quantizable.method for fp in model.footprints.values() if fp.quantizable is not None}
    if can_be_quantized and methods == {None}:
        if _fitting(gpus, _quantized(base, model, "fp8"), model, sizes) is not None:
            would_fit.append("--quantization fp8")
        if _fitting(gpus, base, _in_int4(model), sizes) is not None:
            would_fit.append("a checkpoint of it in 4 bits (AWQ or GPTQ)")
    one, two = (_smallest_gpus(base, model, sizes[-1], number) for number in (1, 2))
    would_fit.append(f"one GPU with {one} GB")
    would_fit.append(f"two with {two} GB each")
    return f"{model.name} does not fit: {there}. What would fit: {', '.join(would_fit)}, or a smaller model"


def _in_int4(model: ModelSizes) -> ModelSizes:
    footprints = {
        name: footprint
        if footprint.quantizable is None
        else replace(footprint, quantizable=replace(footprint.quantizable, method=_INT4, bits=_INT4_BITS))
        for name, footprint in model.footprints.items()
    }
    return replace(model, footprints=footprints)


def _smallest_gpus(base: StageConfig, model: ModelSizes, size: _Size, number: int) -> int:
    """GB per GPU that a deployment of `size` needs on `number` GPUs."""
    nowhere = [Gpu(index, "", 1, None, None) for index in range(number)]
    *_, devices = _placements(nowhere, base)
    config = _sized(_placed(base, devices), size)
    least = {name: _least(need) for name, need in _needs(config, devices, model).items()}
    fullest = max(sum(least[name] for name in devices if devices[name] is gpu) for gpu in nowhere)
    return math.ceil(fullest / MAX_MEMORY_FRACTION / 1e9)


def _with_fields(config: StageConfig, fields: Mapping[str, _Fields]) -> StageConfig:
    """`config` with new values for `fields` of some stages."""
    changed = {name: config.stages[name].model_copy(update=values) for name, values in fields.items()}
    return config.model_copy(update={"stages": {**config.stages, **changed}})
