"""Writes all files of a Qwen3-Omni demo checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

from stages.qwen3_omni.footprint import published_tensors
from tests.checkpoints.options import Dtype, Options
from tests.checkpoints.qwen3_omni.config import DEMO_PREPROCESSING, demo_model_config, write_configs
from tests.checkpoints.qwen3_omni.genuine import (
    GENUINE_PREPROCESSING,
    GENUINE_SIZES,
    genuine_model_config,
)
from tests.checkpoints.qwen3_omni.sizes import SIZES
from tests.checkpoints.qwen3_omni.tokens import TokenIds, write_tokenizer
from tests.checkpoints.qwen3_omni.weights import fill


class Qwen3OmniCheckpoints:
    """Implements `tests.checkpoints.options.DemoFamily`."""

    pipelines: tuple[str, ...] = ()
    sizes: tuple[str, ...] = tuple(SIZES)
    genuine_sizes: Mapping[str, int] = GENUINE_SIZES

    def write(self, folder: Path, options: Options) -> None:
        ids = write_tokenizer(folder, options.vocabulary)
        if options.size in GENUINE_SIZES:
            model, preprocessing = genuine_model_config(), GENUINE_PREPROCESSING
        else:
            model = demo_model_config(SIZES[options.size], ids, options.dtype)
            preprocessing = DEMO_PREPROCESSING
        write_configs(folder, model, preprocessing)
        if options.weights == "random":
            _write_weights(folder, ids, options.seed, options.dtype)

    def num_parameters(self, folder: Path) -> int:
        with torch.device("meta"):
            model = Qwen3OmniMoeForConditionalGeneration(AutoConfig.from_pretrained(folder))
        num: int = model.num_parameters()
        return num


def _write_weights(folder: Path, ids: TokenIds, seed: int, dtype: Dtype) -> None:
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights, which are then overwritten
        model = Qwen3OmniMoeForConditionalGeneration(AutoConfig.from_pretrained(folder)).float().eval()
    fill(model, ids, seed)
    model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(model.state_dict()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
