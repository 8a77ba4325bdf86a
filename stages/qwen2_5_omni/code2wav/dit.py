"""Codec tokens to mel spectrogram: Qwen2.5-Omni's DiT and its flow-matching solver over packed windows.

The mathematics is that of transformers' `Qwen2_5OmniToken2WavDiTModel.sample`, rearranged. Values that depend
on the voice, the codes or the time alone are computed once, not in every evaluation of the solver: the ECAPA
encoding of the voice, its share of the input projection, and the modulation of each layer at each time.
Attention is computed block by block instead of with dense masks. Both guidance branches go through the layers
as one batch. The solver's state, the residual stream, the norms and the first and last projection are
float32; the products inside the layers use the given dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    DiTDecoderLayer,
    Qwen2_5OmniToken2WavDiTModel,
)

from stages.qwen2_5_omni.code2wav.dit_ops import TorchDiTOps
from stages.qwen2_5_omni.code2wav.packing import BlockLayout
from stages.qwen2_5_omni.code2wav.stream_kv import StreamKV, slot_shape
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.options import SolverConfig


def time_grid(solver: SolverConfig) -> torch.Tensor:
    """The solver's times from 0 to 1, float32 [num_steps] on the CPU; negative sway is denser near 0."""
    grid = torch.linspace(0, 1, solver.num_steps)
    return grid + solver.sway_coefficient * (torch.cos(torch.pi / 2 * grid) - 1 + grid)


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer in the dtype of its products; one matrix for query, key and value."""

    qkv: tuple[torch.Tensor, torch.Tensor]
    out: tuple[torch.Tensor, torch.Tensor]
    up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]
    ahead: bool
    back_number: int | None
    """Index among the layers that look back, if this one does."""


class Interval(NamedTuple):
    """Inputs of the solver's four evaluations in one interval of its time grid."""

    number: torch.Tensor
    """Counted from 0, int32 []."""
    step: torch.Tensor
    """Length of the interval, float32 []."""
    modulation: torch.Tensor
    """float32 [4, num_layers, 6, hidden]: shift, scale, gate of the attention, then of the feed-forward."""
    final: torch.Tensor
    """float32 [4, 2, hidden]: scale and shift of the last norm."""


class PackedDiT:
    """The prepared DiT. It keeps no reference to its source module."""

    def __init__(
        self,
        dit: Qwen2_5OmniToken2WavDiTModel,
        solver: SolverConfig,
        voices: Sequence[Voice],
        ops: TorchDiTOps,
        *,
        dtype: torch.dtype,
        longest_window_frames: int,
        num_streams: int,
    ) -> None:
        """`voices` defines the row order for `BlockLayout.voice`, `num_streams` the number of slots that a
        layout can name. Frees the weights of `dit`, each layer's as soon as they have been copied, so that
        the device never holds two copies of all layers."""
        config = dit.config
        self._ops = ops
        self._dtype = dtype
        self._head_dim: int = config.head_dim
        self._frames_per_code: int = config.repeats
        self._guidance = solver.guidance_scale
        self.num_branches = solver.num_branches
        self.mel_dim: int = config.mel_dim
        self.block_size: int = config.block_size
        self.hidden_size: int = config.hidden_size
        looks_back = [layer.look_backward_block > 0 for layer in dit.transformer_blocks]
        self._layers: list[_Layer] = []
        for number, layer in enumerate(dit.transformer_blocks):
            back_number = sum(looks_back[:number]) if looks_back[number] else None
            self._layers.append(_prepared(layer, dtype, config.head_dim, back_number))
            layer.attn.to("meta")
            layer.ff.to("meta")
        self._last = dit.proj_out.weight.detach().clone(), dit.proj_out.bias.detach().clone()
        self._codec_table = dit.text_embed.codec_embed.weight.detach().clone()
        # Columns of the input projection: state | ECAPA of the reference mel | code embedding | x-vector.
        widths = [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        state, ecapa, code, x_vector = (
            part.clone() for part in dit.input_embed.proj.weight.detach().split(widths, 1)
        )
        self._state_projection, self._code_projection = state, code
        self._voice_bias = _voice_bias(dit, voices, ecapa, code, x_vector)
        # A window that reads a slot starts at the second block of positions.
        self._rotary = _rotary(dit, longest_window_frames + config.block_size)
        self.intervals = _intervals(dit, solver)
        self.streams: StreamKV | None = None
        if num_streams and any(looks_back):
            per_slot = slot_shape(config, solver)
            self.streams = StreamKV(num_streams, per_slot, dtype, dit.proj_out.weight.device)
        dit.to("meta")

    def input_bias(self, layout: BlockLayout, codes: torch.Tensor) -> torch.Tensor:
        """The input projection without its share of the state, float32 [branches, blocks, frames, hidden].

        codes: int64 [blocks, codes per block].
        """
        embedded = F.linear(F.embedding(codes, self._codec_table), self._code_projection)
        conditional, unconditional = self._voice_bias[:, layout.voice.long()][:, :, None]
        bias = embedded.repeat_interleave(self._frames_per_code, 1) + conditional
        if self.num_branches == 1:
            return bias[None]
        return torch.stack([bias, unconditional.expand_as(bias)])

    def advance(
        self, state: torch.Tensor, bias: torch.Tensor, layout: BlockLayout, interval: Interval
    ) -> torch.Tensor:
        """Advances the state to the end of an interval; float32 [blocks, frames, mel_dim].

        Runge-Kutta of order 4, Kutta's 3/8 rule, as `RungeKutta4ODESolver`.
        """
        step = interval.step

        def velocity(evaluation: int, x: torch.Tensor) -> torch.Tensor:
            return self.velocity(x, bias, layout, interval, evaluation)

        k1 = velocity(0, state)
        k2 = velocity(1, state + k1 * (step / 3))
        k3 = velocity(2, state + (k2 - k1 / 3) * step)
        k4 = velocity(3, state + (k1 - k2 + k3) * step)
        return state + (k1 + 3 * (k2 + k3) + k4) * (step / 8)

    def velocity(
        self,
        state: torch.Tensor,
        bias: torch.Tensor,
        layout: BlockLayout,
        interval: Interval,
        evaluation: int,
    ) -> torch.Tensor:
        """d(state)/dt with guidance, float32 [blocks, frames, mel_dim]. Reads and writes `layout`'s slots.

        evaluation: 0 to 3 within the interval.
        """
        modulation, final = interval.modulation[evaluation], interval.final[evaluation]
        hidden = (F.linear(state, self._state_projection) + bias).view(-1, self.hidden_size)
        ops, dtype = self._ops, self._dtype
        normed = ops.norm(hidden, modulation[0, 1], modulation[0, 0], dtype)
        for number, layer in enumerate(self._layers):
            _, _, attention_gate, shift, scale, gate = modulation[number]
            qkv = F.linear(normed, *layer.qkv)
            kept = None
            if layer.back_number is not None and self.streams is not None:
                kept = self.streams.at(evaluation, layer.back_number, interval.number)
            attended = ops.attention(
                qkv,
                layout,
                self._rotary,
                head_dim=self._head_dim,
                back=layer.back_number is not None,
                ahead=layer.ahead,
                kept=kept,
            )
            if kept is not None:
                ops.keep(qkv, layout, kept)  # overwrites what attention just read
            update = F.linear(attended, *layer.out)
            normed = ops.norm(hidden, scale, shift, dtype, (attention_gate, update))
            update = F.linear(ops.linear_gelu(normed, *layer.up), *layer.down)
            if number + 1 < len(self._layers):
                shift, scale = modulation[number + 1, :2]
                normed = ops.norm(hidden, scale, shift, dtype, (gate, update))
            else:
                normed = ops.norm(hidden, final[0], final[1], torch.float32, (gate, update))
        velocities = F.linear(normed, *self._last).view(-1, *state.shape)
        if self.num_branches == 1:
            return velocities[0]
        conditional, unconditional = velocities
        return conditional + (conditional - unconditional) * self._guidance


def _prepared(layer: DiTDecoderLayer, dtype: torch.dtype, head_dim: int, back_number: int | None) -> _Layer:
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])

    def joined(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The rotary embedding rotates pairs of neighbouring components. Permuting queries and keys alike
        # keeps their products, and with even components first, pairs are a constant offset apart.
        query, key = (
            part.unflatten(0, (-1, head_dim))[:, order.to(part.device)].flatten(0, 1) for part in (query, key)
        )
        return torch.cat([query, key, value])

    def typed(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.detach().to(dtype, copy=True), bias.detach().to(dtype, copy=True)

    out = layer.attn.to_out[0]
    q, k, v = layer.attn.to_q, layer.attn.to_k, layer.attn.to_v
    up, _, _, down = layer.ff.ff
    return _Layer(
        qkv=typed(joined(q.weight, k.weight, v.weight), joined(q.bias, k.bias, v.bias)),
        out=typed(out.weight, out.bias),
        up=typed(up.weight, up.bias),
        down=typed(down.weight, down.bias),
        ahead=layer.look_ahead_block > 0,
        back_number=back_number,
    )


def _voice_bias(
    dit: Qwen2_5OmniToken2WavDiTModel,
    voices: Sequence[Voice],
    ecapa: torch.Tensor,
    code: torch.Tensor,
    x_vector: torch.Tensor,
) -> torch.Tensor:
    """Each voice's share of the input projection at every frame, float32 [2, voices, hidden].

    Index 0 is conditional. Index 1 is unconditional: silent reference mel, which the encoder does not map to
    zeros, no x-vector, and code 0's embedding.
    """
    embed = dit.input_embed
    null_code = dit.text_embed.codec_embed.weight[0]
    with_voice, without = [], []
    for voice in voices:
        reference = voice.reference_mel.to(embed.proj.weight.device)
        encoded = embed.spk_encoder(torch.cat([reference, torch.zeros_like(reference)]))
        spoken, silent = F.linear(encoded, ecapa, embed.proj.bias)
        with_voice.append(spoken + F.linear(voice.conditioning.to(reference.device)[0], x_vector))
        without.append(silent + F.linear(null_code, code))
    return torch.stack([torch.stack(with_voice), torch.stack(without)])


def _rotary(dit: Qwen2_5OmniToken2WavDiTModel, num_frames: int) -> torch.Tensor:
    """Cosine and sine of every position, float32 [2, positions, head_dim / 2]."""
    positions = torch.arange(num_frames, device=dit.proj_out.weight.device)
    cos, sin = dit.rotary_embed(torch.zeros(1, device=positions.device), positions[None])
    return torch.stack([cos[0], sin[0]])[..., : cos.shape[-1] // 2].contiguous()


def _intervals(dit: Qwen2_5OmniToken2WavDiTModel, solver: SolverConfig) -> list[Interval]:
    grid = time_grid(solver)
    start, step = grid[:-1], grid[1:] - grid[:-1]
    # Float32 as in the reference: the sinusoids magnify rounding errors of the time a thousandfold.
    times = torch.stack([start, start + step * (1 / 3), start + step * (2 / 3), grid[1:]], dim=1)
    device = dit.proj_out.weight.device
    intervals = []
    for number, (four_times, length) in enumerate(zip(times, step, strict=True)):
        embedding = F.silu(dit.time_embed(four_times.to(device)))
        modulation = torch.stack([layer.attn_norm.linear(embedding) for layer in dit.transformer_blocks], 1)
        intervals.append(
            Interval(
                torch.tensor(number, dtype=torch.int32, device=device),
                length.to(device),
                modulation.unflatten(-1, (6, -1)).contiguous(),
                dit.norm_out.linear(embedding).unflatten(-1, (2, -1)).contiguous(),
            )
        )
    return intervals
