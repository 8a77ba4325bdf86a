"""Random weights that make every input of every stage affect the output.

As transformers initialises it (standard deviation 0.02), a model gives every question the same answer: its
residual stream is little more than the last token's embedding. Here matrices preserve the scale of their
inputs, and a few are stronger, so that greedy tokens depend on all media, on the voice, on positions and on
the repetition penalty, while the first and the second choice stay far apart compared with float32 rounding.
"""

import math

import torch
from torch import nn
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
)

from tests.checkpoints.end_token import end_row
from tests.checkpoints.qwen2_5_omni.config import CODEC_END, CODEC_PAD, CODEC_START, CODES
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds
from tests.checkpoints.random_values import fill_parameters, normal
from tests.checkpoints.text_head import shape_text_head

_POSITION_GAIN = 1.5
"""Scale of query and key biases. Rotated, they score a pair by distance alone, about the square of this,
which makes a wrong position as visible as a wrong token."""
_CONTENT_GAIN = 1.3
"""Scale of query and key matrices: attention selects few positions instead of averaging over the prompt."""
_CODEC_LOGITS = 2.0
_CODEC_SPREAD = 0.25
"""Spread of the logarithm of row lengths. Some codes win more often than others, so codes repeat and the
repetition penalty has an effect."""
_CODEC_END, _CODEC_PAD = 0.014, 0.003
"""Chances of the end code and of the pad code, where the reference also stops, once the text is used up."""
_CODEC_START = 2.0
"""Would win often if not suppressed."""
_END_LEAN = 2.0
"""How far the end codes' rows lean towards the talker's mean state once the text is used up, relative to
their random part: speech that outlasts its text ends sooner than speech that does not."""
_MEL_LEVEL = -4.5
"""Natural logarithm of the mel amplitude: the middle of what the vocoder does not clip (-10.9 to 2.3)."""
_RMS = 0.1
"""Waveform level."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)


@torch.no_grad()
def fill(model: Qwen2_5OmniForConditionalGeneration, ids: TokenIds, seed: int) -> None:
    """Overwrite all parameters with random values that give varied answers."""
    fill_parameters(model, _distribution, seed)
    shape_text_head(
        model.thinker.lm_head,
        model.thinker.model,
        spoken=ids.spoken,
        end=ids.im_end,
        opening=[ids.im_end, ids.newline, ids.im_start, ids.assistant, ids.newline],
        seed=seed,
    )
    _shape_codec_head(model.talker, model.thinker.get_input_embeddings().weight[ids.tts_pad], seed)
    model.token2wav.code2wav_dit_model.proj_out.bias += _MEL_LEVEL
    _calibrate_vocoder(model.token2wav, seed)


def speakers(ids: TokenIds, seed: int, num_frames: int) -> dict[str, dict[str, int | torch.Tensor]]:
    """Content of spk_dict.pt: per voice its text token, x-vector [1, 192] and reference mel [1, num_frames,
    80]."""
    return {
        name: {
            "bos_token": token,
            "cond": normal(f"{name}.cond", (1, 192), seed),
            "ref_mel": _MEL_LEVEL + 1.5 * normal(f"{name}.ref_mel", (1, num_frames, 80), seed),
        }
        for name, token in ids.speakers.items()
    }


def _distribution(
    module: nn.Module, module_name: str, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    """Mean and standard deviation of one parameter."""
    kind = type(module).__name__
    text_attention = (
        ".layers." in module_name
        and module_name.endswith(("q_proj", "k_proj"))
        and "audio" not in module_name
    )
    if name in ("alpha", "beta"):  # SnakeBeta's, on a logarithmic scale
        return 0.0, 0.2
    if "Norm" in kind and name == "weight":
        return 1.0, 0.1
    if name == "bias":
        return 0.0, _POSITION_GAIN if text_attention else 0.05
    if isinstance(module, nn.Embedding):
        return 0.0, 1.0
    if isinstance(module, nn.ConvTranspose1d):  # stride half the kernel: two taps reach an output sample
        return 0.0, 1 / math.sqrt(2 * module.in_channels)
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and name == "weight":
        return 0.0, (_CONTENT_GAIN if text_attention else 1.0) / math.sqrt(parameter[0].numel())
    raise AssertionError(f"no rule for parameter {module_name}.{name} of {kind}")


def _shape_codec_head(
    talker: Qwen2_5OmniTalkerForConditionalGeneration, text_pad: torch.Tensor, seed: int
) -> None:
    """Keep only the rows of the 8193 codes and three special codes: the DiT cannot embed the ids between.

    `text_pad` [thinker's hidden]: the talker's text input once the text is used up.
    """
    weight = talker.codec_head.weight
    rows = weight.clone()
    weight.zero_()
    length = (_CODEC_SPREAD * normal("codec_head.length", (CODES, 1), seed)).exp()
    weight[:CODES] = rows[:CODES] * length * _CODEC_LOGITS

    codes = torch.randint(CODES, (400,), generator=torch.Generator().manual_seed(seed))
    codec = talker.get_input_embeddings()(torch.cat([torch.tensor([CODEC_START]), codes]))
    text = math.sqrt(2) * normal("thinker rows", codec.shape, seed)  # hidden state + embedding

    def hidden(text: torch.Tensor) -> torch.Tensor:
        fed = talker.thinker_to_talker_proj(codec + text)
        return talker.model(inputs_embeds=fed[None]).last_hidden_state[0]

    talking, exhausted = hidden(text), hidden(text_pad)
    common = torch.stack([talking[0], talking[1:].mean(0), exhausted[1:].mean(0)])
    lean = common[2] - common[1]
    lean *= _END_LEAN / lean.norm() / math.sqrt(len(lean))
    ends = {
        code: end_row(rows[code], chance, weight, exhausted[1:], common, lean)
        for code, chance in ((CODEC_END, _CODEC_END), (CODEC_PAD, _CODEC_PAD))
    }
    for code, row in ends.items():
        weight[code] = row
    weight[CODEC_START] = rows[CODEC_START] * _CODEC_START * _CODEC_LOGITS


def _calibrate_vocoder(token2wav: Qwen2_5OmniToken2WavModel, seed: int) -> None:
    """Scale the last convolution to the wanted level; random weights saturate the final clamp."""
    last = token2wav.code2wav_bigvgan_model.conv_post
    last.weight -= last.weight.mean(-1, keepdim=True)  # no direct current
    levels: list[float] = []
    hook = last.register_forward_hook(
        lambda _m, _i, wave: levels.append(wave[..., 480:-480].square().mean().sqrt())
    )
    codes = torch.randint(CODES, (1, 60), generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        token2wav(
            codes,
            conditioning=torch.zeros(1, 192),
            reference_mel=torch.full((1, 120, 80), _MEL_LEVEL),
            num_steps=4,
        )
    hook.remove()
    last.weight *= float(f"{_RMS / float(levels[0]):.1e}")  # two digits, as above
