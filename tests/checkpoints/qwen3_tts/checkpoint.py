"""Writes all files of a Qwen3-TTS demo checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file

from tests.checkpoints.options import Options
from tests.checkpoints.qwen3_tts.config import KINDS, Kind, write_configs
from tests.checkpoints.qwen3_tts.model import Qwen3TTS, codec_tensors, main_tensors
from tests.checkpoints.qwen3_tts.sizes import PUBLISHED, SIZES
from tests.checkpoints.qwen3_tts.tokens import TokenIds, write_tokenizer
from tests.checkpoints.qwen3_tts.weights import fill


class Qwen3TTSCheckpoints:
    """Implements `tests.checkpoints.options.DemoFamily`."""

    pipelines: tuple[str, ...] = KINDS
    sizes: tuple[str, ...] = tuple(SIZES)
    genuine_sizes: Mapping[str, int] = {"1.7b": 4, "0.6b": 2}

    def write(self, folder: Path, options: Options) -> None:
        ids = write_tokenizer(folder, options.vocabulary)
        size = (SIZES | PUBLISHED)[options.size]
        write_configs(folder, size, cast(Kind, options.pipeline), ids)
        if options.weights == "random":
            _write_weights(folder, ids, options)

    def num_parameters(self, folder: Path) -> int:
        with torch.device("meta"):
            model = Qwen3TTS(folder)
        return sum(parameter.numel() for parameter in model.parameters())


def _write_weights(folder: Path, ids: TokenIds, options: Options) -> None:
    with torch.random.fork_rng(devices=[]):  # torch draws initial weights, which are then overwritten
        model = Qwen3TTS(folder).float().eval()
    fill(model, ids, options.seed)
    codec = folder / "speech_tokenizer" / "model.safetensors"
    save_file(codec_tensors(model), codec, metadata={"format": "pt"})  # published in float32
    if options.dtype == "bfloat16":
        model.bfloat16()
    save_file(main_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
