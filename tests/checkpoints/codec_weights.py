"""Random weights of talkers, code predictors and code decoders that make every input affect the output.

As transformers initialises it, a model gives every question the same answer. Here matrices preserve the scale
of their inputs, and a few are stronger, so that greedy tokens depend on all media, on the voice, on positions
and on the repetition penalty, while the first and the second choice stay far apart compared with float32
rounding.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.checkpoints.end_token import end_row
from tests.checkpoints.random_values import normal

CODES = 2048
"""Codec ids 0..2047 are sounds, in each of the codebooks. A talker's vocabulary has special ids behind them,
of which only the end can be sampled."""
CODEBOOKS = 16

_ATTENTION_GAIN = 1.4
"""Scale of the norms of queries and keys in language models: attention selects few positions instead of
averaging over the prompt, and a wrong position is as visible as a wrong token."""
_PROJECTION_GAIN = 1.7
"""Scale of the output layers of the talker's projections: SiLU in between leaves about 1 / 1.7 of the scale,
and text is added to codec embeddings of scale 1.4."""
_PREDICTED_EMBEDDING = 1 / math.sqrt(CODEBOOKS - 1)
"""Scale of the embeddings of predicted codes: the sum of 15 is as strong as that of the sampled code."""
_CODEC_LOGITS = 2.0
_CODEC_SPREAD = 0.25
"""Spread of the logarithm of row lengths. Some codes win more often than others, so codes repeat and the
repetition penalty has an effect."""
_CODEC_BANNED = 2.0
"""Scale of the special codes' rows: they would win often if not suppressed."""
_END_LEAN = 2.0
"""How far the end code's row leans towards the talker's mean state once the text is used up, relative to its
random part: speech that outlasts its text ends sooner than speech that does not."""
_RESIDUAL_SCALE = 0.5
"""Of the decoder's residual branches, which transformers begins with at 0.01 and 1e-6."""
_DECODER_GAIN = 0.6
"""Scale of the decoder's convolutions, whose residual branches add up: with 1, values grow to 100 before the
last one, and the rounding of large arguments in SnakeBeta's sine becomes audible."""
_RMS = 0.1
"""Waveform level."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def distribution(
    module: nn.Module, module_name: str, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    """Mean and standard deviation of one parameter. The name of a talker begins with "talker.", that of the
    decoder's convolutions with "code2wav.decoder"."""
    kind = type(module).__name__
    if name in ("alpha", "beta"):  # SnakeBeta's, on a logarithmic scale
        return 0.0, 0.2
    if name in ("gamma", "scale"):  # of residual branches
        return _RESIDUAL_SCALE, 0.1
    if module_name.endswith(("q_norm", "k_norm")):
        return _ATTENTION_GAIN, 0.1
    if "Norm" in kind and name == "weight":
        return 1.0, 0.1
    if name == "bias":
        return 0.0, 0.05
    if isinstance(module, nn.Embedding):
        return 0.0, _PREDICTED_EMBEDDING if "code_predictor" in module_name else 1.0
    gain = _DECODER_GAIN if "code2wav.decoder" in module_name else 1.0
    if isinstance(module, nn.ConvTranspose1d):
        # A kernel of twice the stride: two taps reach an output sample.
        return 0.0, gain / math.sqrt(module.in_channels * module.kernel_size[0] / module.stride[0])
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and name == "weight":
        if module_name.startswith("talker.") and module_name.endswith("linear_fc2"):
            gain = _PROJECTION_GAIN
        return 0.0, gain / math.sqrt(parameter[0].numel())
    if kind.endswith(("Experts", "Router")):  # the experts' matrices are stacked
        return 0.0, 1 / math.sqrt(parameter.shape[-1])
    raise AssertionError(f"no rule for parameter {module_name}.{name} of {kind}")


def shape_codec_head(
    head: nn.Linear,
    talker: nn.Module,
    codes: nn.Embedding,
    predicted: Iterable[nn.Embedding],
    text_rows: Callable[[torch.Tensor], torch.Tensor],
    *,
    spoken: tuple[int, ...],
    text_pad: int,
    bos: int,
    end: int,
    end_chance: float,
    banned: Iterable[int],
    seed: int,
) -> None:
    """Keep only the rows of codes and special codes: real talkers never learn the other ids.

    `talker` takes `inputs_embeds` [1, length, width]: embeddings of `codes`, those of the `predicted`
    codebooks and `text_rows` of text ids. Text is `spoken` tokens, then `text_pad`. From there on, `end` has
    `end_chance` in each greedy step."""
    weight = head.weight
    rows = weight.clone()
    weight.zero_()
    length = (_CODEC_SPREAD * normal("codec_head.length", (CODES, 1), seed)).exp()
    weight[:CODES] = rows[:CODES] * length * _CODEC_LOGITS

    draw = torch.Generator().manual_seed(seed)
    first = torch.cat([torch.tensor([bos]), torch.randint(CODES, (400,), generator=draw)])
    frames = codes(first)
    for table in predicted:
        frames[1:] += table(torch.randint(CODES, (400,), generator=draw))
    words = torch.tensor(spoken)[torch.randint(len(spoken), first.shape, generator=draw)]

    def hidden(text_ids: torch.Tensor) -> torch.Tensor:
        return talker(inputs_embeds=(frames + text_rows(text_ids))[None]).last_hidden_state[0]

    talking, exhausted = hidden(words), hidden(torch.tensor([text_pad]))
    common = torch.stack([talking[0], talking[1:].mean(0), exhausted[1:].mean(0)])
    lean = common[2] - common[1]
    lean *= _END_LEAN / lean.norm() / math.sqrt(len(lean))
    weight[end] = end_row(rows[end], end_chance, weight, exhausted[1:], common, lean)
    for code in banned:
        weight[code] = rows[code] * _CODEC_BANNED * _CODEC_LOGITS


def calibrate_level(code2wav: nn.Module, seed: int) -> None:
    """Scale the last convolution to the wanted level; random weights saturate the final clamp."""
    last = code2wav.decoder[-1].conv
    last.weight -= last.weight.mean(-1, keepdim=True)  # no direct current
    last.bias.zero_()
    levels: list[float] = []
    hook = last.register_forward_hook(
        lambda _m, _i, wave: levels.append(float(wave[..., 480:-480].square().mean().sqrt()))
    )
    draw = torch.Generator().manual_seed(seed)
    code2wav(torch.randint(CODES, (1, CODEBOOKS, 30), generator=draw))
    hook.remove()
    # Two digits: rounding in the pass above (number of threads, kind of machine) must not affect weights.
    last.weight *= float(f"{_RMS / levels[0]:.1e}")
