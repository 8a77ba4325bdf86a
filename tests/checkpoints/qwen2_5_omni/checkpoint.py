"""Writes all files of a Qwen2.5-Omni demo checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen2_5OmniForConditionalGeneration

from tests.checkpoints.options import Dtype, Options
from tests.checkpoints.qwen2_5_omni.config import DEMO_PREPROCESSING, demo_model_config, write_configs
from tests.checkpoints.qwen2_5_omni.genuine import (
    GENUINE_MEL_FRAMES,
    GENUINE_PREPROCESSING,
    GENUINE_SIZES,
    genuine_model_config,
)
from tests.checkpoints.qwen2_5_omni.sizes import SIZES
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds, write_tokenizer
from tests.checkpoints.qwen2_5_omni.weights import fill, speakers

DEMO_MEL_FRAMES = 120


class Qwen25OmniCheckpoints:
    """Implements `tests.checkpoints.options.DemoFamily`."""

    pipelines: tuple[str, ...] = ()
    sizes: tuple[str, ...] = tuple(SIZES)
    genuine_sizes: Mapping[str, int] = GENUINE_SIZES

    def write(self, folder: Path, options: Options) -> None:
        """In the dtype of `options` are thinker and talker; code2wav stays in float32, in which the reference
        always runs it."""
        ids = write_tokenizer(folder, options.vocabulary)
        if options.size in GENUINE_SIZES:
            model, preprocessing = genuine_model_config(options.size), GENUINE_PREPROCESSING
            num_mel_frames = GENUINE_MEL_FRAMES
        else:
            model = demo_model_config(SIZES[options.size], ids, options.dtype)
            preprocessing, num_mel_frames = DEMO_PREPROCESSING, DEMO_MEL_FRAMES
        write_configs(folder, model, ids, preprocessing)
        if options.weights == "random":
            _write_weights(folder, ids, options.seed, options.dtype)
        torch.save(speakers(ids, options.seed, num_mel_frames), folder / "spk_dict.pt")

    def num_parameters(self, folder: Path) -> int:
        with torch.device("meta"):
            model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder))
        num: int = model.num_parameters()
        return num


def _write_weights(folder: Path, ids: TokenIds, seed: int, dtype: Dtype) -> None:
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights, which are then overwritten
        model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder)).float().eval()
    fill(model, ids, seed)
    target = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model.thinker.to(target)
    model.talker.to(target)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
