"""Writes a language model and a Qwen3-TTS checkpoint into the folders `llm` and `speech` of one folder."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen2_5_VLConfig

from tests.checkpoints.json_files import dump
from tests.checkpoints.options import Options
from tests.checkpoints.qwen3_omni.tokens import write_tokenizer
from tests.checkpoints.qwen3_tts.checkpoint import Qwen3TTSCheckpoints
from tests.checkpoints.random_values import fill_parameters
from tests.checkpoints.spoken_llm.tokens import TextIds, write_sentencepiece_tokenizer
from tests.checkpoints.text_head import shape_text_head

_SIZE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_PREPROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 50_176,
}


class SpokenLLMCheckpoints:
    """Implements `tests.checkpoints.options.DemoFamily`. The two language models differ in family and
    tokenizer."""

    pipelines: tuple[str, ...] = ("text", "vision")
    sizes: tuple[str, ...] = ("tiny",)
    genuine_sizes: Mapping[str, int] = {}

    def write(self, folder: Path, options: Options) -> None:
        dump(folder / "config.json", {"architectures": ["SpokenLLM"]})
        llm, speech = folder / "llm", folder / "speech"
        for part in (llm, speech):
            part.mkdir()
        config, ids = (_write_text if options.pipeline == "text" else _write_vision)(llm)
        config.dtype = options.dtype
        config.save_pretrained(llm)
        if options.weights == "random":
            _write_weights(llm, config, ids, options)
        dump(llm / "generation_config.json", {"eos_token_id": [ids.end]})
        Qwen3TTSCheckpoints().write(speech, replace(options, pipeline="custom_voice"))

    def num_parameters(self, folder: Path) -> int:
        num: int = _model(AutoConfig.from_pretrained(folder / "llm")).num_parameters()
        return num + Qwen3TTSCheckpoints().num_parameters(folder / "speech")


def _write_text(folder: Path) -> tuple[PreTrainedConfig, TextIds]:
    ids = write_sentencepiece_tokenizer(folder)
    config = LlamaConfig(
        **_SIZE,
        architectures=["LlamaForCausalLM"],
        vocab_size=ids.vocab_size,
        bos_token_id=1,
        eos_token_id=ids.end,
    )
    return config, ids


def _write_vision(folder: Path) -> tuple[PreTrainedConfig, TextIds]:
    ids = write_tokenizer(folder, "small")
    dump(folder / "preprocessor_config.json", _PREPROCESSOR)
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 5, 5]}
    config = Qwen2_5_VLConfig(
        text_config={**_SIZE, "vocab_size": ids.vocab_size, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [1]},
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.vision_start,
        vision_end_token_id=ids.vision_end,
        tie_word_embeddings=False,
    )
    return config, TextIds(ids.vocab_size, ids.im_end, ids.spoken, (ids.im_start, ids.assistant, ids.newline))


def _model(config: PreTrainedConfig) -> Any:
    (architecture,) = config.architectures or ()
    with torch.random.fork_rng(devices=[]):
        return getattr(transformers, architecture)(config).float().eval()


@torch.no_grad()
def _write_weights(folder: Path, config: PreTrainedConfig, ids: TextIds, options: Options) -> None:
    model = _model(config)
    fill_parameters(model, _distribution, options.seed)
    shape_text_head(
        model.lm_head,
        model.get_decoder(),
        spoken=ids.spoken,
        end=ids.end,
        opening=list(ids.opening),
        seed=options.seed,
    )
    model.to(getattr(torch, options.dtype)).save_pretrained(folder)


def _distribution(
    module: nn.Module, module_name: str, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    """Mean and standard deviation, with which a layer keeps the scale of its input."""
    if parameter.dim() == 1:
        return (1.0, 0.1) if name == "weight" else (0.0, 0.05)
    return 0.0, 1.0 if isinstance(module, nn.Embedding) else 1.3 / math.sqrt(parameter[0].numel())
