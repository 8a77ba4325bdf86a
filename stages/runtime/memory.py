"""How much of a GPU one stage takes, computed from its own allocations alone.

Stages start side by side, so what vLLM does is of no use here: it takes the fall of the device's free memory
during its profile run for its own consumption, and so would book the weights that another stage loads
meanwhile. A stage's *share* is `gpu_memory_utilization` x the device's memory, and it is divided up like
this:

    share = OUTSIDE_TORCH + limit of torch's allocator
    limit = resident (weights, buffers) + activations + CUDA graphs + slack + KV cache

Resident memory and activations are what torch's allocator of this process says after and during the profile
run; the graphs' part is what it reserves while vLLM captures a sample of them; the KV cache gets what is
left. The limit is enforced: torch refuses to grow beyond it, whatever a stage computes later. So all stages
of a device together take at most the sum of their shares, which the stage config holds to 0.95, as long as
each process has no more than OUTSIDE_TORCH beside torch's allocator.
"""

import gc
from dataclasses import dataclass

import torch

from omni_server.errors import ConfigError
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES

GRAPH_BYTES = 2 << 20
"""Set aside for each graph that the sample does not hold. vLLM counts 1 MiB at least."""


@dataclass(frozen=True)
class MemoryBudget:
    """A stage's share of one device, in bytes."""

    share: int
    resident: int
    """What torch's allocator has reserved when nothing runs and its cache is empty: weights and buffers."""
    activations: int
    """What a step takes beside that, at its peak."""
    graphs: int
    slack: int
    """`omni_server.protocol.device_memory.slack_bytes`"""

    @property
    def kv_cache(self) -> int:
        """May be negative: the share is too small."""
        return torch_limit(self.share) - self.slack - self.resident - self.activations - self.graphs

    def describe(self) -> str:
        """The whole sum, for a log."""
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
    """The part of `share` bytes that torch's allocator may take. Raises `ConfigError` if nothing is left for
    it."""
    limit = share - OUTSIDE_TORCH_BYTES
    if limit <= 0:
        raise ConfigError(
            f"gpu_memory_utilization gives this stage {share / 1e9:.2f} GB, and "
            f"{OUTSIDE_TORCH_BYTES / 1e9:.2f} GB of that go to the CUDA context and kernels: raise it"
        )
    return limit


def enforce_share(share: int, device: torch.device) -> None:
    """From now on torch raises `OutOfMemoryError` in this process rather than exceed the share of
    `device`."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(torch_limit(share) / total, device)


def start_measuring(device: torch.device) -> None:
    """The peak counts from here."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def measured_use(device: torch.device) -> tuple[int, int]:
    """`MemoryBudget.resident` and `activations`, since `start_measuring`."""
    gc.collect()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats(device)
    activations = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
    return stats["reserved_bytes.all.current"], activations


def reserved_above(resident: int, device: torch.device) -> int:
    """By how much the allocator's reserve has exceeded `resident` bytes since `start_measuring`."""
    peak: int = torch.cuda.memory_stats(device)["reserved_bytes.all.peak"]
    return max(0, peak - resident)


def check_budget(budget: MemoryBudget, device: torch.device) -> None:
    """Raises `ConfigError` if no KV cache fits into the share, or the share into what the device has free."""
    if budget.kv_cache <= 0:
        raise ConfigError(f"gpu_memory_utilization is too small for this stage: {budget.describe()}")
    free, _ = torch.cuda.mem_get_info(device)
    if free < budget.kv_cache:
        raise ConfigError(
            f"the device has {free / 1e9:.1f} GB free, less than the KV cache of this stage "
            f"({budget.describe()}): another program uses it; end that program, or lower "
            "gpu_memory_utilization"
        )
