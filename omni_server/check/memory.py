"""Checks that every stage fits its share of its GPU, or that all stages fit the memory of a CPU machine.

A stage's memory is computed from its config and its checkpoint's sizes. The weights, the state of streams,
the KV cache size per token and the server's own reserve are exact; the rest are estimates, calibrated on one
H200 with the 7B's sizes (steps of 8192 tokens, 64 requests).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from omni_server.check.machine import Gpu
from omni_server.check.report import DeviceMemory, Report, StageMemory, gb
from omni_server.check.safetensors_headers import StoredWeights
from omni_server.config.checkpoint_files import num_bits
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage, DiffusionStage, Stage
from omni_server.family import StageFootprint
from omni_server.metrics.replica_name import replica_names, split_replica_name
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES, slack_bytes

BUFFER_BYTES = 500_000_000
"""Estimate of a language model's buffers besides its weights: 0.3 and 0.5 GB were measured."""
GRAPH_BYTES = 100_000_000
GRAPH_WIDTHS = 17
"""Estimate of a language model's CUDA graphs: `GRAPH_BYTES`, plus, per token of the largest graph,
`GRAPH_WIDTHS` times a token's bytes at the widest point of a step. With graphs of up to 512 tokens this gives
1.3 and 0.8 GB for the thinkers of 7B and 3B and 1.2 GB for the talker of the 7B; 1.3, 0.6 and 0.6 GB were
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


@dataclass(frozen=True)
class StageNeeds:
    """A stage's part of one device."""

    memory: StageMemory
    kv_token_bytes: float
    block_size: int
    given_kv_bytes: int | None = None
    """`kv_cache_memory_bytes`, if it is set."""

    def kv_bytes(self, num_tokens: int) -> int:
        """KV cache size for `num_tokens`."""
        return math.ceil(self.kv_token_bytes * (num_tokens + self.block_size))

    @property
    def sequence_bytes(self) -> int:
        """KV cache of one sequence of `max_model_len`."""
        return self.kv_bytes(self.memory.max_model_len)

    @property
    def least(self) -> int:
        """The smallest share with which the stage starts, with the requested KV cache or room for one
        sequence."""
        kv_bytes = self.sequence_bytes if self.given_kv_bytes is None else self.given_kv_bytes
        return self.memory.taken + kv_bytes


def stage_needs(
    name: str, config: StageConfig, model: ModelSizes, total: int | None, replica: int = 0
) -> StageNeeds:
    """What one replica of the stage needs. `total` is the size of its GPU in bytes; None if it runs on a
    CPU."""
    stage, footprint = config.stages[name], model.footprints[name]
    tensor_ranks = stage.tensor_parallel_size if isinstance(stage, ArStage) else 1
    ranks = 1
    value_bytes = num_bits(_dtype(stage, footprint)) // 8
    share = None if total is None else int(total * stage.gpu_memory_utilization)
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
        share=share,
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
    kv, kv_argument = footprint.kv, stage.engine_args.get("kv_cache_memory_bytes")
    kv_bytes = (
        int(kv_argument) if kv_argument is not None else None if share is None else share - memory.taken
    )
    if kv is None or kv_bytes is None:
        return StageNeeds(memory, 0, 0)
    if str(stage.engine_args.get("kv_cache_dtype", "auto")).startswith("fp8"):
        value_bytes = 1
    # Keys and values. A head is on one rank, or on several if there are more ranks than heads.
    token_bytes = 2 * kv.num_layers * max(1, kv.num_kv_heads // tensor_ranks) * kv.head_dim * value_bytes
    block_size = int(stage.engine_args.get("block_size", 128 if total is None else 16))  # vLLM's, in tokens
    tokens = max(0, kv_bytes) // (token_bytes * block_size) * block_size
    memory = replace(memory, kv_cache=kv_bytes, kv_tokens=tokens)
    return StageNeeds(memory, token_bytes, block_size, None if kv_argument is None else kv_bytes)


def largest_graph(stage: Stage) -> int:
    """Tokens of the largest step with a CUDA graph; vLLM's default is twice the number of requests, at most
    512."""
    num_tokens = stage.engine_args.get(CAPTURE_SIZE)
    return min(2 * stage.max_num_seqs, 512) if num_tokens is None else int(num_tokens)


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
    by_index = {gpu.memory.index: gpu for gpu in gpus}
    used = sorted({device for stage in config.stages.values() for device in stage.devices})
    for index in used:
        if index not in by_index:
            users = [name for name, stage in config.stages.items() if index in stage.devices]
            report.error(
                "memory",
                f"device {index}, on which 'devices' puts {_and(users)}, is not there: this machine has "
                f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}; choose devices among {list(by_index)}",
            )
    needs: dict[str, StageNeeds] = {}
    for name, stage in config.stages.items():
        problems: list[str] = []
        for number in range(stage.replicas):
            devices = stage.devices_of(number)
            gpu = next((by_index[device] for device in devices if device in by_index), None)
            if gpu is None or name not in model.footprints:
                continue
            need = stage_needs(name, config, model, gpu.memory.total, number)
            needs[need.memory.name] = need
            report.stages.append(need.memory)
            problems += _dtype_problems(name, stage, model.footprints[name].dtype, gpu)
            if "kv_cache_memory_bytes" in stage.engine_args:
                problems += _kv_problems(name, need)
        report.errors("memory", dict.fromkeys(problems))
    for index in used:
        if index in by_index:
            report.devices.append(by_index[index].memory)
            there = {name: need for name, need in needs.items() if index in need.memory.devices}
            problems = list(_device_problems(config, by_index[index].memory, there))
            report.errors("memory", dict.fromkeys(problems))


def check_cpu_memory(
    config: StageConfig, model: ModelSizes, machine: DeviceMemory, shared_memory: int, report: Report
) -> None:
    """Compares all stages' sum with the machine's memory. `shared_memory`: bytes of queues, included."""
    report.devices.append(machine)
    for name in config.stages:
        if name not in model.footprints:
            continue
        needs = stage_needs(name, config, model, None)
        names = replica_names(name, config.stages[name].replicas)
        report.stages += [replace(needs.memory, name=replica) for replica in names]
        field = f"stages.{name}.engine_args.kv_cache_memory_bytes"
        if model.footprints[name].kv is None:
            continue
        if needs.memory.kv_cache is None:
            report.warn(
                "memory",
                f"{field} is not set: vLLM takes a share of the machine's memory for the KV cache; set it",
            )
        else:
            report.errors("memory", _kv_problems(name, needs))
    total = (
        sum(stage.taken + (stage.kv_cache or 0) for stage in report.stages) + PROCESS_BYTES + shared_memory
    )
    if machine.free is not None and total > machine.free:
        report.error(
            "memory",
            f"all stages, the server and its queues take about {gb(total)}, and of {gb(machine.total)} "
            f"memory {gb(machine.free)} are free: end other programs, lower kv_cache_memory_bytes in the "
            "stages' engine_args, or choose a smaller model",
        )


def _device_problems(
    config: StageConfig, device: DeviceMemory, needs: Mapping[str, StageNeeds]
) -> Iterator[str]:
    """Yields stages that exceed their shares, with remedies; then shares that exceed free memory. `needs` are
    those of the replicas on the device, by name."""
    shares = {name: need.memory.share or 0 for name, need in needs.items()}
    small = [name for name, need in needs.items() if shares[name] < need.least]
    limit = int(MAX_MEMORY_FRACTION * device.total)
    together = sum(need.least for need in needs.values())
    if small and together > limit:
        parts = " + ".join(f"{name} {gb(need.least)}" for name, need in needs.items())
        fixed = [name for name, need in needs.items() if need.given_kv_bytes is not None]
        lower = f"lower kv_cache_memory_bytes of {_and(fixed)}, " if fixed else ""
        yield (
            f"device {device.index} has {gb(device.total)}, of which stages may take {gb(limit)}; they need "
            f"at least {gb(together)} ({parts}): {lower}put stages on other GPUs with 'devices', spread one "
            "over several with 'tensor_parallel_size', lower max_model_len and max_num_batched_tokens, or "
            "choose a smaller model"
        )
    elif small:
        spare = (limit - together) / together
        fitting = {name: _share(need.least * (1 + spare) / device.total) for name, need in needs.items()}
        for name in small:
            need, (stage, _) = needs[name], split_replica_name(name)
            yield (
                f"stages.{stage}.gpu_memory_utilization {config.stages[stage].gpu_memory_utilization:g} is "
                f"{gb(shares[name])} of device {device.index}; the stage needs {gb(need.least)} at "
                f"least ({gb(need.memory.taken)} and {_least_kv_cache(need)}). Shares that fit: "
                f"{', '.join(f'{n} {share:g}' for n, share in fitting.items())}"
            )
    total = sum(shares.values())
    if device.free is not None and total > device.free:
        yield (
            f"the stages ask for {gb(total)} of device {device.index}, which has {gb(device.free)} of "
            f"{gb(device.total)} free: end the programs that use it, or lower gpu_memory_utilization of "
            f"{_and(list(needs))}"
        )


def _least_kv_cache(need: StageNeeds) -> str:
    """The KV cache in `need.least`, in words."""
    if need.given_kv_bytes is None:
        return f"the KV cache of one sequence of {need.memory.max_model_len} tokens"
    return f"the {gb(need.given_kv_bytes)} of engine_args.kv_cache_memory_bytes"


def _kv_problems(name: str, needs: StageNeeds) -> Iterator[str]:
    """Checks a given KV cache size."""
    memory = needs.memory
    if memory.kv_tokens is not None and memory.kv_tokens < memory.max_model_len:
        yield (
            f"stages.{name}.engine_args.kv_cache_memory_bytes has room for {memory.kv_tokens} tokens, fewer "
            f"than the stage's max_model_len ({memory.max_model_len}): raise it to at least "
            f"{needs.sequence_bytes}, or lower max_model_len"
        )


def _dtype_problems(name: str, stage: Stage, dtype: str, gpu: Gpu) -> Iterator[str]:
    if isinstance(stage, DiffusionStage):
        compute_dtype: str = stage.compute_dtype("cuda")
    else:
        compute_dtype = dtype if stage.dtype == "auto" else stage.dtype
    if compute_dtype == "bfloat16" and not gpu.has_bfloat16:
        yield (
            f"stages.{name}.dtype is bfloat16, which {gpu.memory.name} ({gpu.description}) does not have: set "
            "it to float16"
        )


def _share(value: float) -> float:
    """Rounds down so that the sum stays within the limit."""
    return math.floor(1000 * value) / 1000


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
