"""Codec tokens to mel spectrogram: the flow-matching sampler around transformers' DiT.

Same mathematics as `Qwen2_5OmniToken2WavDiTModel.sample`, with the noise given instead of drawn and without repeated
work: what depends on the voice, the codes or the time alone is computed once instead of in each of the solver's
evaluations, the two guidance branches share the projection of the state, and the attention mask is one [T, T] table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from omni_server.config.stage_config import SolverConfig
from stages.qwen2_5_omni.code2wav.voices import Voice

GUIDANCE_OFF_BELOW = 1e-5
"""The reference evaluates no unconditional branch below this guidance scale."""


@dataclass(frozen=True)
class SpeakerBias:
    """What a voice adds to the DiT's input projection at every frame, both [hidden]."""

    conditional: torch.Tensor
    unconditional: torch.Tensor
    """Of silence instead of the reference mel, no x-vector, and code 0 everywhere."""


def time_grid(solver: SolverConfig) -> torch.Tensor:
    """The solver's time points from 0 to 1, float32 [num_steps] on the CPU, denser near 0 for negative sway."""
    grid = torch.linspace(0, 1, solver.num_steps)
    return grid + solver.sway_coefficient * (torch.cos(torch.pi / 2 * grid) - 1 + grid)


class DiTSampler:
    """Draws mel spectrograms from `dit`, whose weights must not change any more once `sample` has run."""

    def __init__(self, dit: Qwen2_5OmniToken2WavDiTModel, solver: SolverConfig) -> None:
        self._dit = dit
        self._solver = solver
        config = dit.config
        # Columns of the input projection: state | ECAPA of the reference mel | code embedding | x-vector.
        widths = (config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim)
        self._columns = tuple(slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths)))
        self._speakers: dict[str, SpeakerBias] = {}
        self._time_embeddings: torch.Tensor | None = None

    def sample(self, voices: Sequence[Voice], codes: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Mel spectrograms, float32 [batch, mel_dim, num_frames], natural logarithm of amplitude.

        codes: int64 [batch, num_codes]; noise: float32 [batch, num_codes * repeats, mel_dim], both on the device of
        the DiT. One voice per row.
        """
        bias = self._input_bias(voices, codes)
        num_frames = noise.shape[1]
        positions = torch.arange(num_frames, device=noise.device)
        rotary = self._dit.rotary_embed(noise, positions[None])
        blocks = positions // self._dit.block_size
        block_diff = (blocks[None, :] - blocks[:, None])[None, None]

        grid = time_grid(self._solver)
        embeddings = self._embed_times(grid)
        state = noise
        for interval in range(self._solver.num_steps - 1):
            step = float(grid[interval + 1] - grid[interval])
            times = embeddings[4 * interval : 4 * interval + 4]

            def velocity(stage: int, x: torch.Tensor, times: torch.Tensor = times) -> torch.Tensor:
                return self._velocity(x, bias, times[stage : stage + 1], rotary, block_diff)

            # Runge-Kutta of order 4, Kutta's 3/8 rule.
            k1 = velocity(0, state)
            k2 = velocity(1, state + k1 * (step / 3))
            k3 = velocity(2, state + (k2 - k1 / 3) * step)
            k4 = velocity(3, state + (k1 - k2 + k3) * step)
            state = state + (k1 + 3 * (k2 + k3) + k4) * (step / 8)
        return state.transpose(1, 2)

    def _velocity(
        self,
        state: torch.Tensor,
        bias: torch.Tensor,
        time_embedding: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        block_diff: torch.Tensor,
    ) -> torch.Tensor:
        """d(state)/dt, [batch, num_frames, mel_dim]. `bias` has the unconditional branch behind the conditional one."""
        hidden = F.linear(state, self._projection(0))
        if self._is_guided:
            hidden = torch.cat([hidden, hidden])
        hidden = hidden + bias
        for block in self._dit.transformer_blocks:
            hidden = block(hidden, time_embedding, position_embeddings=rotary, block_diff=block_diff)
        velocity: torch.Tensor = self._dit.proj_out(self._dit.norm_out(hidden, time_embedding))
        if not self._is_guided:
            return velocity
        conditional, unconditional = velocity.chunk(2)
        return conditional + (conditional - unconditional) * self._solver.guidance_scale

    @property
    def _is_guided(self) -> bool:
        return self._solver.guidance_scale >= GUIDANCE_OFF_BELOW

    def _projection(self, part: int) -> torch.Tensor:
        weight: torch.Tensor = self._dit.input_embed.proj.weight
        return weight[:, self._columns[part]]

    def _input_bias(self, voices: Sequence[Voice], codes: torch.Tensor) -> torch.Tensor:
        """Input projection without its share of the state: [batch or 2 * batch, num_frames, hidden]."""
        speakers = [self._speaker(voice) for voice in voices]
        embedded = self._dit.text_embed(codes)
        bias = F.linear(embedded, self._projection(2)) + torch.stack([s.conditional for s in speakers])[:, None]
        if self._is_guided:
            unconditional = torch.stack([s.unconditional for s in speakers])[:, None]
            bias = torch.cat([bias, unconditional.expand_as(bias)])
        return bias

    def _speaker(self, voice: Voice) -> SpeakerBias:
        if voice.name not in self._speakers:
            embed = self._dit.input_embed
            device = embed.proj.weight.device
            reference = voice.reference_mel.to(device)
            # Silence passes through the encoder as well: its output is not zero.
            encoded = embed.spk_encoder(torch.cat([reference, torch.zeros_like(reference)]))
            conditional, unconditional = F.linear(encoded, self._projection(1), embed.proj.bias)
            null_code = self._dit.text_embed.codec_embed.weight[0]
            self._speakers[voice.name] = SpeakerBias(
                conditional=conditional + F.linear(voice.conditioning.to(device)[0], self._projection(3)),
                unconditional=unconditional + F.linear(null_code, self._projection(2)),
            )
        return self._speakers[voice.name]

    def _embed_times(self, grid: torch.Tensor) -> torch.Tensor:
        """Embeddings of the four times of each interval, [4 * (num_steps - 1), hidden]."""
        if self._time_embeddings is None:
            # Float32 as in the reference: the embedding's sinusoids magnify a rounding of the time a thousandfold.
            start, step = grid[:-1], grid[1:] - grid[:-1]
            times = torch.stack([start, start + step * (1 / 3), start + step * (2 / 3), grid[1:]], dim=1).flatten()
            self._time_embeddings = self._dit.time_embed(times.to(self._dit.proj_out.weight.device))
        return self._time_embeddings
