"""What the footprints of all families have in common: files of a checkpoint, and quantized weights."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from transformers import AutoConfig, PreTrainedConfig

from omni_server.errors import ConfigError
from omni_server.family import NeededFile
from omni_server.family.footprint import Quantizable

NEEDED_FILES = (
    NeededFile(("tokenizer.json", "vocab.json"), "the tokenizer"),
    NeededFile(("tokenizer_config.json",), "the tokenizer's settings"),
    NeededFile(("preprocessor_config.json", "processor_config.json"), "how sound and pictures are prepared"),
    NeededFile(("chat_template.json", "chat_template.jinja", "tokenizer_config.json"), "the chat template"),
)

ConfigT = TypeVar("ConfigT", bound=PreTrainedConfig)


def read_config(model_dir: Path, kind: type[ConfigT]) -> ConfigT:
    """Raises `ConfigError` for a config of another kind, and whatever transformers raises."""
    config = AutoConfig.from_pretrained(model_dir)
    if not isinstance(config, kind):
        raise ConfigError(
            f"{model_dir / 'config.json'}: model_type is {config.model_type}, not {kind.model_type}"
        )
    return config


def dtype_name(config: PreTrainedConfig) -> str:
    """The type of the checkpoint's weights."""
    return "bfloat16" if config.dtype is None else str(config.dtype).removeprefix("torch.")


def widest_layer(channels: int, samples: int, rates: Sequence[int]) -> int:
    """Most values in any layer of a decoder that begins with `samples` of so many channels; each upsampling
    halves the channels."""
    widest = channels * samples
    for rate in rates:
        channels, samples = channels // 2, samples * rate
        widest = max(widest, channels * samples)
    return widest


def quantizable(
    config: PreTrainedConfig, names: Iterable[str], prefix: str, fp8_engine_args: Mapping[str, object]
) -> Quantizable:
    """Of a decoder whose weights begin with `prefix`, the matrices of attention and feed-forward can be
    quantized to FP8 during loading; a published checkpoint may store them in FP8, AWQ or GPTQ."""
    weights = frozenset(name for name in names if name.startswith(prefix) and name.endswith("_proj.weight"))
    stored: dict[str, object] | None = config.to_dict().get("quantization_config")
    if stored is None:
        return Quantizable(weights, None, 16, fp8_engine_args)
    method = str(stored.get("quant_method"))
    if method == "fp8":
        return Quantizable(weights, method, 8, fp8_engine_args)  # and a scale for each of many weights
    bits, group = stored.get("bits"), stored.get("group_size")
    if method not in ("awq", "gptq") or not isinstance(bits, int) or not isinstance(group, int):
        return Quantizable(weights, method, 16, fp8_engine_args)  # unknown: assume 16 bits
    # Each group has a 16-bit scale and a zero point; group -1 is a whole column of thousands.
    return Quantizable(weights, method, bits + ((16 + bits) / group if group > 0 else 0), fp8_engine_args)
