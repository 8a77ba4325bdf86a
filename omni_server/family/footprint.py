"""The weights that a stage of a family loads from a checkpoint, and the memory that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KvLayout:
    """What attention stores in the KV cache per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Quantizable:
    """The weights of a stage that can be quantized. All other weights stay unchanged."""

    weights: frozenset[str]
    """Their names in a checkpoint that is not quantized."""
    method: str | None
    """How this checkpoint stores them, such as `awq`; None if not quantized."""
    bits: float
    """Bits per weight in this checkpoint, including scales and zero points."""
    fp8_engine_args: Mapping[str, object]
    """vLLM engine arguments that quantize exactly these weights to FP8 during loading."""


@dataclass(frozen=True)
class StageFootprint:
    """The weights that one stage loads and the memory that it needs, according to the checkpoint's config."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shapes of the weights that the stage loads, by their names in a checkpoint that is not quantized."""
    dtype: str
    """What `dtype: auto` means for the stage: float32, bfloat16 or float16."""
    values_per_token: int
    """Estimate of the most values per token that a step holds at the same time."""
    loads_float32: bool = False
    """Weights are float32 in memory, regardless of their type in the checkpoint."""
    encodes_media: bool = False
    """The stage runs audio, image or video encoders."""
    kv: KvLayout | None = None
    """None if the stage has no KV cache."""
    stream_state_bytes: int = 0
    """Memory reserved at startup for each stream's state, besides weights and KV cache."""
    preparation_bytes: int = 0
    """Memory needed in addition to the loaded weights while they are converted for the GPU; freed before the
    first step."""
    quantizable: Quantizable | None = None
    """None if it is never quantized."""
    weight_bytes: int | None = None
    """Of all weights in memory, where that does not follow from `tensors` and `dtype`."""
