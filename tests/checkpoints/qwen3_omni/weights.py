"""Random weights of a Qwen3-Omni demo checkpoint."""

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from tests.checkpoints.codec_weights import calibrate_level, distribution, shape_codec_head
from tests.checkpoints.qwen3_omni.config import (
    CODEC_BOS,
    CODEC_END,
    CODEC_NOTHINK,
    CODEC_PAD,
    CODEC_THINK_BOS,
    CODEC_THINK_END,
    SPEAKERS,
)
from tests.checkpoints.qwen3_omni.tokens import TokenIds
from tests.checkpoints.random_values import fill_parameters
from tests.checkpoints.text_head import shape_text_head


@torch.no_grad()
def fill(model: Qwen3OmniMoeForConditionalGeneration, ids: TokenIds, seed: int) -> None:
    """Overwrite all parameters with random values that give varied answers."""
    fill_parameters(model, distribution, seed)
    shape_text_head(
        model.thinker.lm_head,
        model.thinker.model,
        spoken=ids.spoken,
        end=ids.im_end,
        opening=[ids.im_end, ids.newline, ids.im_start, ids.assistant, ids.newline],
        seed=seed,
    )
    talker, text = model.talker, model.thinker.get_input_embeddings()
    shape_codec_head(
        talker.codec_head,
        talker.model,
        talker.get_input_embeddings(),
        talker.code_predictor.get_input_embeddings(),
        lambda text_ids: talker.text_projection(text(text_ids)),
        spoken=ids.spoken,
        text_pad=ids.tts_pad,
        bos=CODEC_BOS,
        end=CODEC_END,
        end_chance=0.03,
        banned=(CODEC_PAD, CODEC_BOS, CODEC_NOTHINK, CODEC_THINK_BOS, CODEC_THINK_END, *SPEAKERS.values()),
        seed=seed,
    )
    calibrate_level(model.code2wav, seed)
