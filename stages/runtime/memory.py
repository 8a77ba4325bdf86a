"""Computes how much GPU memory a stage uses, from its own allocations alone.

Stages start concurrently, so vLLM's method does not work here: it takes the drop in free device memory during
its profile run as its own consumption, and would include the weights that another stage loads meanwhile. A
stage's *share* is `gpu_memory_utilization` x the device's memory, divided as follows:

    share = OUTSIDE_TORCH + limit of torch's allocator
    limit = resident (weights, buffers) + activations + CUDA graphs + slack + KV cache

Torch's allocator in this process reports resident memory after the profile run and activations during it. The
graphs' part is what it reserves while vLLM captures a sample of them, and the KV cache gets the rest. The
limit is enforced: torch refuses to exceed it, whatever a stage computes later. So all stages of a device use
at most the sum of their shares, which the stage config limits to 0.95, as long as no process uses more than
OUTSIDE_TORCH outside torch's allocator.
"""

import gc
from dataclasses import dataclass

import torch

from omni_server.errors import ConfigError
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES

GRAPH_BYTES = 2 << 20
"""Reserved for each CUDA graph outside the sample. vLLM assumes at least 1 MiB."""


@dataclass(frozen=True)
class MemoryBudget:
    """A stage's share of one device, in bytes."""

    share: int
    resident: int
    """Memory that torch's allocator reserves while idle with an empty cache: weights and buffers."""
    activations: int
    """Additional peak memory of a step."""
    graphs: int
    slack: int
    """`omni_server.protocol.device_memory.slack_bytes`"""

    @property
    def kv_cache(self) -> int:
        """Negative if the share is too small."""
        return torch_limit(self.share) - self.slack - self.resident - self.activations - self.graphs

    def describe(self) -> str:
        """The whole sum, for logs."""
        parts = {
            "KV cache": self.kv_cache,
            "weights and buffers": self.resident,
            "activations": self.activations,
            "CUDA graphs": self.graphs,
            "reserve": OUTSIDE_TORCH_BYTES + self.slack,
        }
        return f"{self.share / 1e9:.1f} GB = " + " + ".join(
            f"{part / 1e9:.1f} {name}" for name, part in parts.items()
        )


def torch_limit(share: int) -> int:
    """The part of `share` bytes that torch's allocator may use. Raises `ConfigError` if nothing is left for
    it."""
    limit = share - OUTSIDE_TORCH_BYTES
    if limit <= 0:
        raise ConfigError(
            f"gpu_memory_utilization gives this stage {share / 1e9:.2f} GB, and "
            f"{OUTSIDE_TORCH_BYTES / 1e9:.2f} GB of that go to the CUDA context and kernels: raise it"
        )
    return limit


def enforce_share(share: int, device: torch.device) -> None:
    """Make torch raise `OutOfMemoryError` in this process instead of exceeding the share of `device`."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(torch_limit(share) / total, device)


def start_measuring(device: torch.device) -> None:
    """Reset the memory peak."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def measured_use(device: torch.device) -> tuple[int, int]:
    """`MemoryBudget.resident` and `activations` since `start_measuring`."""
    gc.collect()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats(device)
    activations = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
    return stats["reserved_bytes.all.current"], activations


def reserved_above(resident: int, device: torch.device) -> int:
    """Peak number of bytes reserved by the allocator above `resident` since `start_measuring`."""
    peak: int = torch.cuda.memory_stats(device)["reserved_bytes.all.peak"]
    return max(0, peak - resident)


def check_budget(budget: MemoryBudget, device: torch.device) -> None:
    """Raises `ConfigError` if the share leaves no room for a KV cache, or the device has too little free."""
    if budget.kv_cache <= 0:
        raise ConfigError(f"gpu_memory_utilization is too small for this stage: {budget.describe()}")
    free, _ = torch.cuda.mem_get_info(device)
    if free < budget.kv_cache:
        raise ConfigError(
            f"the device has {free / 1e9:.1f} GB free, less than the KV cache of this stage "
            f"({budget.describe()}): another program uses it; end that program, or lower "
            "gpu_memory_utilization"
        )
