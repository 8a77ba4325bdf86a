"""Random weights of a Qwen3-TTS demo checkpoint."""

import math

import torch
from torch import nn

from tests.checkpoints.codec_weights import CODEBOOKS, calibrate_level, distribution, shape_codec_head
from tests.checkpoints.qwen3_tts.config import (
    CODEC_BOS,
    CODEC_END,
    CODEC_NOTHINK,
    CODEC_PAD,
    CODEC_THINK,
    CODEC_THINK_BOS,
    CODEC_THINK_END,
    LANGUAGES,
    SPEAKERS,
)
from tests.checkpoints.qwen3_tts.model import Qwen3TTS
from tests.checkpoints.qwen3_tts.tokens import TokenIds
from tests.checkpoints.random_values import fill_parameters, normal

_SPECIAL = (CODEC_PAD, CODEC_BOS, CODEC_THINK, CODEC_NOTHINK, CODEC_THINK_BOS, CODEC_THINK_END)

_VOICE_GAIN = 2.0
"""Scale of the speaker encoder's last layer: the voice in a recording is as strong as an embedding."""


@torch.no_grad()
def fill(model: Qwen3TTS, ids: TokenIds, seed: int) -> None:
    """Overwrite all values with random ones that give varied speech."""
    fill_parameters(model, _distribution, seed)
    for name, module in model.audio_encoder.named_modules():
        if name.endswith(".codebook"):
            module.embed_sum.copy_(normal(f"{name}.embed_sum", module.embed_sum.shape, seed))
            module.cluster_usage.copy_(1.2 + 0.2 * normal(f"{name}.usage", module.cluster_usage.shape, seed))
    if model.speaker_encoder is not None:
        for module in model.speaker_encoder.modules():
            if isinstance(module, nn.Conv1d):  # or what all voices share would outweigh a voice
                module.weight -= module.weight.mean((1, 2), keepdim=True)
        model.speaker_encoder.fc.weight *= _VOICE_GAIN
    talker = model.talker
    shape_codec_head(
        talker.codec_head,
        talker.model,
        talker.model.codec_embedding,
        talker.code_predictor.model.codec_embedding,
        talker.text_rows,
        spoken=ids.spoken,
        text_pad=ids.tts_pad,
        bos=CODEC_BOS,
        end=CODEC_END,
        end_chance=0.05,
        banned=(*_SPECIAL, *LANGUAGES.values(), *SPEAKERS.values()),
        seed=seed,
    )
    calibrate_level(model.code2wav, seed)


def _distribution(
    module: nn.Module, module_name: str, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    if name == "cluster_usage":  # never near zero
        return 1.2, 0.2
    if name == "embedding_sum":  # the sum of 15 vectors is as long as the first codebook's
        return 0.0, 1.0 if "rvq_first" in module_name else 1 / math.sqrt(CODEBOOKS - 1)
    return distribution(module, module_name, name, parameter)
