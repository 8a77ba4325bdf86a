"""Checks that every stage fits its share of its GPU, or that all stages fit the memory of a CPU machine.

A stage's memory is computed from its config and its checkpoint's sizes. The weights, the state of streams,
the KV cache size per token and the server's own reserve are exact; the rest are estimates, calibrated on one
H200 with the 7B's sizes (steps of 8192 tokens, 64 requests).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from omni_server.check.files import StoredWeights
from omni_server.check.machine import Gpu
from omni_server.check.report import DeviceMemory, Report, StageMemory, gb
from omni_server.config.checkpoint_files import num_bits
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage, DiffusionStage, Stage
from omni_server.family.footprint import KvLayout, StageFootprint
from omni_server.metrics.replica_name import replica_names, split_replica_name
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES, slack_bytes

BUFFER_BYTES = 500_000_000
"""Estimate of a language model's buffers besides its weights: 0.3 and 0.5 GB were measured."""
GRAPH_BYTES = 100_000_000
GRAPH_WIDTHS = 17
"""Estimate of a language model's CUDA graphs: `GRAPH_BYTES`, plus, per token of the largest graph,
`GRAPH_WIDTHS` times a token's bytes at the widest point of a step. With graphs of up to 512 tokens this gives
1.3 and 0.8 GB for the thinkers of 7B and 3B and 1.2 GB for the talker of the 7B; 1.3, 0.6 and 0.6 GB were
measured. With 2048 tokens: 4.0 and 1.7 GB for thinker and talker of Qwen3-Omni; 4.5 and 2.3 GB were
measured."""
CAPTURE_SIZE = "max_cudagraph_capture_size"
"""vLLM's engine argument for the number of tokens of the largest graph."""
PROCESS_BYTES = 600_000_000
"""Estimate per process on a CPU, without weights and KV cache: the demo's server and three engines used
2.4 GB."""

_FP8_METHODS = ("online", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""vLLM's methods that quantize to FP8 while loading weights."""


@dataclass(frozen=True)
class ModelSizes:
    name: str
    """For messages."""
    footprints: Mapping[str, StageFootprint]
    """By stage."""
    stored: StoredWeights

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for stage in self.footprints.values() for shape in stage.tensors.values())


def stage_memory(
    name: str, config: StageConfig, model: ModelSizes, total: int | None, replica: int = 0
) -> StageMemory:
    """What one replica of the stage needs. `total` is the size of its GPU in bytes; None if it runs on a
    CPU."""
    stage, footprint = config.stages[name], model.footprints[name]
    value_bytes = num_bits(_dtype(stage, footprint)) // 8
    ranks = 1
    reserve = PROCESS_BYTES if total is None else OUTSIDE_TORCH_BYTES
    if total is not None and isinstance(stage, ArStage):
        ranks = stage.num_ranks
        # The server reserves memory for later needs only if something is sized by the remaining memory.
        slack = slack_bytes(stage.max_num_batched_tokens, encodes_media=footprint.encodes_media)
        reserve += slack + BUFFER_BYTES
        if not stage.engine_args.get("enforce_eager"):
            values = largest_graph(stage) * footprint.values_per_token
            reserve += GRAPH_BYTES + GRAPH_WIDTHS * values * value_bytes // ranks
    num_streams = stage.num_stream_slots if isinstance(stage, DiffusionStage) and config.carries_state else 0
    values = stage.max_num_batched_tokens * footprint.values_per_token
    memory = StageMemory(
        name=replica_names(name, stage.replicas)[replica],
        devices=() if total is None else stage.devices_of(replica),
        share=None if total is None else int(total * stage.gpu_memory_utilization),
        weights=_weight_bytes(stage, footprint, model.stored) // ranks,
        state=num_streams * footprint.stream_state_bytes,
        activations=max(values * value_bytes, footprint.preparation_bytes) // ranks,
        reserve=reserve,
        kv_cache=None,
        kv_tokens=None,
        max_model_len=stage.max_model_len,
        max_num_seqs=stage.max_num_seqs,
        precision=_precision(stage, footprint),
    )
    return memory if footprint.kv is None else _with_kv_cache(memory, stage, footprint.kv, value_bytes)


def _with_kv_cache(memory: StageMemory, stage: Stage, kv: KvLayout, value_bytes: int) -> StageMemory:
    """Unchanged on a CPU unless the size is set."""
    given = stage.engine_args.get("kv_cache_memory_bytes")
    if given is None and memory.share is None:
        return memory
    kv_bytes = (memory.share or 0) - memory.taken if given is None else int(given)
    if str(stage.engine_args.get("kv_cache_dtype", "auto")).startswith("fp8"):
        value_bytes = 1
    # Keys and values. A head is on one rank, or on several if there are more ranks than heads.
    token_bytes = 2 * kv.num_layers * max(1, kv.num_kv_heads // stage.num_ranks) * kv.head_dim * value_bytes
    # vLLM's, in tokens.
    block_size = int(stage.engine_args.get("block_size", 128 if memory.share is None else 16))
    return replace(
        memory,
        kv_cache=kv_bytes,
        kv_tokens=max(0, kv_bytes) // (token_bytes * block_size) * block_size,
        kv_token_bytes=token_bytes,
        block_size=block_size,
        given_kv_bytes=None if given is None else kv_bytes,
    )


def largest_graph(stage: Stage) -> int:
    """Tokens of the largest step with a CUDA graph; vLLM's default is twice the number of requests, at most
    512."""
    num_tokens = stage.engine_args.get(CAPTURE_SIZE, min(2 * stage.max_num_seqs, 512))
    return min(int(num_tokens), stage.max_num_batched_tokens)


def _dtype(stage: Stage, footprint: StageFootprint) -> str:
    """The dtype of the stage's computation and KV cache."""
    return footprint.dtype if stage.dtype == "auto" else stage.dtype


def _is_fp8(stage: Stage) -> bool:
    return stage.engine_args.get("quantization") in _FP8_METHODS


def _precision(stage: Stage, footprint: StageFootprint) -> str:
    """Precision of the quantizable weights, else of all."""
    if footprint.quantizable is not None:
        if footprint.quantizable.method is not None:
            return footprint.quantizable.method
        if _is_fp8(stage):
            return "fp8"
    return _dtype(stage, footprint)


def _weight_bytes(stage: Stage, footprint: StageFootprint, stored: StoredWeights) -> int:
    """Size in memory. Weights stored smaller than config.json says keep their stored size."""
    if footprint.weight_bytes is not None:
        return footprint.weight_bytes
    num_bytes = 4 if footprint.loads_float32 else num_bits(_dtype(stage, footprint)) // 8
    quantizable = footprint.quantizable
    total = 0.0
    for name, shape in footprint.tensors.items():
        tensor = stored.tensors.get(name)
        size: float = math.prod(shape) * num_bytes
        if tensor is not None and tensor.num_bytes < math.prod(shape):
            size = tensor.num_bytes
        elif quantizable is not None and name in quantizable.weights:
            if quantizable.method is not None:
                # Stored under the weight's own name, it may be one that the checkpoint does not quantize.
                stored_bytes = math.prod(shape) * quantizable.bits / 8 if tensor is None else tensor.num_bytes
                size = min(size, stored_bytes)
            elif _is_fp8(stage):
                size = math.prod(shape)
        total += size
    return math.ceil(total)


def check_gpu_memory(config: StageConfig, model: ModelSizes, gpus: list[Gpu], report: Report) -> None:
    """Compares stages with their shares and shares with devices. Adds findings to `report`."""
    by_index = {gpu.index: gpu for gpu in gpus}
    for name, stage in config.stages.items():
        problems: list[str] = []
        for number in range(stage.replicas):
            gpu = next((by_index[i] for i in stage.devices_of(number) if i in by_index), None)
            if gpu is None or name not in model.footprints:
                continue
            memory = stage_memory(name, config, model, gpu.total, number)
            report.stages.append(memory)
            problems += dtype_problems(name, stage, model.footprints[name], gpu)
            if memory.given_kv_bytes is not None:
                problems += _kv_problems(name, memory)
        report.errors("memory", problems)
    for index in sorted({device for stage in config.stages.values() for device in stage.devices}):
        if index in by_index:
            report.devices.append(by_index[index])
            there = [memory for memory in report.stages if index in memory.devices]
            report.errors("memory", _device_problems(config, by_index[index], there))
        else:
            users = [name for name, stage in config.stages.items() if index in stage.devices]
            report.error(
                "memory",
                f"device {index}, on which 'devices' puts {_and(users)}, is not there: this machine has "
                f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}; choose devices among {list(by_index)}",
            )


def check_cpu_memory(
    config: StageConfig, model: ModelSizes, machine: DeviceMemory, shared_memory: int, report: Report
) -> None:
    """Compares all stages' sum with the machine's memory. `shared_memory`: bytes of queues, included."""
    report.devices.append(machine)
    for name, stage in config.stages.items():
        if name not in model.footprints:
            continue
        memory = stage_memory(name, config, model, None)
        names = replica_names(name, stage.replicas)
        report.stages += [replace(memory, name=replica) for replica in names]
        if model.footprints[name].kv is not None and memory.kv_cache is None:
            report.warn(
                "memory",
                f"stages.{name}.engine_args.kv_cache_memory_bytes is not set: vLLM takes a share of the "
                "machine's memory for the KV cache; set it",
            )
        report.errors("memory", _kv_problems(name, memory))
    total = cpu_bytes(report.stages) + shared_memory
    if machine.free is not None and total > machine.free:
        report.error(
            "memory",
            f"all stages, the server and its queues take about {gb(total)}, and of {gb(machine.total)} "
            f"memory {gb(machine.free)} are free: end other programs, lower kv_cache_memory_bytes in the "
            "stages' engine_args, or choose a smaller model",
        )


def cpu_bytes(stages: Iterable[StageMemory]) -> int:
    """What `stages` and the server take of the memory of a CPU machine."""
    return sum(stage.taken + (stage.kv_cache or 0) for stage in stages) + PROCESS_BYTES


def _device_problems(
    config: StageConfig, device: DeviceMemory, stages: Sequence[StageMemory]
) -> Iterator[str]:
    """Yields stages that exceed their shares, with remedies; then shares that exceed free memory. `stages`
    are the replicas on the device."""
    small = [memory for memory in stages if (memory.share or 0) < memory.least]
    limit = int(MAX_MEMORY_FRACTION * device.total)
    together = sum(memory.least for memory in stages)
    if small and together > limit:
        parts = " + ".join(f"{memory.name} {gb(memory.least)}" for memory in stages)
        fixed = [memory.name for memory in stages if memory.given_kv_bytes is not None]
        lower = f"lower kv_cache_memory_bytes of {_and(fixed)}, " if fixed else ""
        yield (
            f"device {device.index} has {gb(device.total)}, of which stages may take {gb(limit)}; they need "
            f"at least {gb(together)} ({parts}): {lower}put stages on other GPUs with 'devices', spread one "
            "over several with 'tensor_parallel_size', lower max_model_len and max_num_batched_tokens, or "
            "choose a smaller model"
        )
    elif small:
        # Rounded down, so that the sum stays within the limit.
        fitting = ", ".join(
            f"{memory.name} {math.floor(1000 * memory.least * limit / together / device.total) / 1000:g}"
            for memory in stages
        )
        for memory in small:
            stage, _ = split_replica_name(memory.name)
            kv_cache = f"the KV cache of one sequence of {memory.max_model_len} tokens"
            if memory.given_kv_bytes is not None:
                kv_cache = f"the {gb(memory.given_kv_bytes)} of engine_args.kv_cache_memory_bytes"
            yield (
                f"stages.{stage}.gpu_memory_utilization {config.stages[stage].gpu_memory_utilization:g} is "
                f"{gb(memory.share or 0)} of device {device.index}; the stage needs {gb(memory.least)} at "
                f"least ({gb(memory.taken)} and {kv_cache}). Shares that fit: {fitting}"
            )
    total = sum(memory.share or 0 for memory in stages)
    if device.free is not None and total > device.free:
        yield (
            f"the stages ask for {gb(total)} of device {device.index}, which has {gb(device.free)} of "
            f"{gb(device.total)} free: end the programs that use it, or lower gpu_memory_utilization of "
            f"{_and([memory.name for memory in stages])}"
        )


def _kv_problems(name: str, memory: StageMemory) -> Iterator[str]:
    if memory.kv_tokens is not None and memory.kv_tokens < memory.max_model_len:
        yield (
            f"stages.{name}.engine_args.kv_cache_memory_bytes has room for {memory.kv_tokens} tokens, fewer "
            f"than the stage's max_model_len ({memory.max_model_len}): raise it to at least "
            f"{memory.kv_bytes(memory.max_model_len)}, or lower max_model_len"
        )


def dtype_problems(name: str, stage: Stage, footprint: StageFootprint, gpu: Gpu) -> Iterator[str]:
    dtype = _dtype(stage, footprint)
    if isinstance(stage, DiffusionStage):
        dtype = stage.compute_dtype("cuda")
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        yield (
            f"stages.{name}.dtype is bfloat16, which {gpu.name} ({gpu.description}) does not have: set "
            "it to float16"
        )


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
