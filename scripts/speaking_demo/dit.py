"""The flow-matching transformer: codes and a voice in, mel frames out. It is transformers' own class, block
masks included; the code table is learned per sound and expanded to all ids in the export."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from scripts.speaking_demo import codes
from scripts.speaking_demo.voice import SPEAKERS

_UNCONDITIONAL = 0.15
"""Share of training clips without codes and voice, for classifier-free guidance."""
_VOICE_WIDTH = 192


@dataclass(frozen=True)
class Clips:
    mel: torch.Tensor
    """Float32 [batch, num_frames, NUM_MELS]."""
    sounds: torch.Tensor
    """Int64 [batch, num_frames / 2]."""
    speaker: torch.Tensor
    """Float32 [batch, _VOICE_WIDTH]: the voice's vector."""
    reference: torch.Tensor
    """Float32 [batch, reference frames, NUM_MELS]."""


def speaker_vector(name: str) -> torch.Tensor:
    """Float32 [1, _VOICE_WIDTH]."""
    generator = torch.Generator().manual_seed(sorted(SPEAKERS).index(name))
    return 0.3 * torch.randn(1, _VOICE_WIDTH, generator=generator)


def build(config: Qwen2_5OmniDiTConfig, mean_mel: torch.Tensor) -> Qwen2_5OmniToken2WavDiTModel:
    """Builds a model with `codes.NUM_SOUNDS` codes that initially outputs the mean frame."""
    model = Qwen2_5OmniToken2WavDiTModel(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                module.reset_parameters()
        table = model.text_embed.codec_embed.weight
        table.normal_()
        table[0] = 0
        width = config.hidden_size
        for block in model.transformer_blocks:
            modulation = block.attn_norm.linear
            modulation.weight.mul_(0.3)
            modulation.bias.zero_()
            modulation.bias[2 * width : 3 * width] = 0.5  # gates of attention and MLP
            modulation.bias[5 * width : 6 * width] = 0.5
        model.norm_out.linear.weight.mul_(0.3)
        model.norm_out.linear.bias.zero_()
        model.proj_out.bias.copy_(mean_mel)
    return model.eval()  # no dropout


def loss(model: Qwen2_5OmniToken2WavDiTModel, clips: Clips) -> torch.Tensor:
    """Squared error of the flow at a random time, denser near 0 like the solver's steps."""
    batch, num_frames, _ = clips.mel.shape
    device = clips.mel.device
    dropped = torch.rand(batch, device=device) < _UNCONDITIONAL
    sounds = (1 + _heard(clips.sounds)).masked_fill(dropped[:, None], 0)
    speaker = clips.speaker[:, None].repeat(1, num_frames, 1) * ~dropped[:, None, None]
    reference = clips.reference * ~dropped[:, None, None]
    time = 1 - torch.cos(math.pi / 2 * torch.rand(batch, device=device))
    noise = torch.randn_like(clips.mel)
    flow = clips.mel - noise
    made = model(
        hidden_states=noise + time[:, None, None] * flow,
        condition_vector=reference,
        speaker_embedding=speaker,
        quantized_code=sounds,
        time_step=time,
        apply_cfg=False,
    )
    return (made - flow).square().mean()


def table_over_ids(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expands the learned table [1 + NUM_SOUNDS, width] to codec ids [num_rows, width]; row 0 is "no
    code"."""
    ids = torch.arange(1, num_rows - 1)
    spread = torch.cat([table[:1], table[1 + _heard(codes.sounds_of(ids))]])
    return torch.cat([spread, table[:1]])


def _heard(sounds: torch.Tensor) -> torch.Tensor:
    """Merges the silences that encode text blocks, which sound the same."""
    return sounds.where(sounds >= codes.BLOCKS, 0)
