"""What a check found."""

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "unknown"]
Area = Literal["files", "stage config", "memory", "shared memory", "installation", "network"]


@dataclass(frozen=True)
class Finding:
    """Something to change, in words that name the file, the field or the flag."""

    severity: Severity
    """`error`: the model does not fit. `warning`: it does, but the server may not start or run as wanted.
    `unknown`: whether it fits cannot be told from here."""
    area: Area
    message: str


@dataclass(frozen=True)
class StageMemory:
    """What one stage takes of one device, or of the machine's memory on a CPU. Bytes."""

    name: str
    devices: tuple[int, ...]
    """Empty on a CPU."""
    share: int | None
    """`gpu_memory_utilization` of the device; None on a CPU."""
    weights: int
    state: int
    """Of the utterances between their windows."""
    activations: int
    """Estimated."""
    reserve: int
    """What the server itself sets aside on a GPU, and estimates of what else comes with a process."""
    kv_cache: int | None
    """What is left, or what `kv_cache_memory_bytes` says; None for a stage that has none. May be negative."""
    kv_tokens: int | None
    """Tokens for which it has room."""
    max_model_len: int
    max_num_seqs: int
    precision: str
    """Of the weights, as `bfloat16`; where a language model's are quantized the method, as `fp8`, `awq`."""

    @property
    def taken(self) -> int:
        """All but the KV cache."""
        return self.weights + self.state + self.activations + self.reserve


@dataclass(frozen=True)
class DeviceMemory:
    """One GPU, or with the index None the memory of the machine. Bytes."""

    index: int | None
    name: str
    total: int
    free: int | None
    """None where the size was given on the command line."""


@dataclass
class Report:
    """Everything that a check tells."""

    model: str
    folder: str | None = None
    stage_config: str = ""
    platform: str = ""
    architecture: str | None = None
    dtype: str | None = None
    """The checkpoint's own."""
    num_weight_files: int = 0
    weight_bytes: int = 0
    """As stored."""
    devices: list[DeviceMemory] = field(default_factory=list)
    stages: list[StageMemory] = field(default_factory=list)
    shared_memory_needed: int | None = None
    shared_memory_free: int | None = None
    address: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def error(self, area: Area, message: str) -> None:
        self.findings.append(Finding("error", area, message))

    def warn(self, area: Area, message: str) -> None:
        self.findings.append(Finding("warning", area, message))

    def leave_open(self, area: Area, message: str) -> None:
        self.findings.append(Finding("unknown", area, message))

    @property
    def fits(self) -> bool | None:
        """None where that is not known."""
        severities = {finding.severity for finding in self.findings}
        return False if "error" in severities else None if "unknown" in severities else True
