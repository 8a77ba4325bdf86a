"""The sampler against transformers' `Qwen2_5OmniToken2WavDiTModel.sample`, from the same noise."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.packing import MelJob
from stages.qwen2_5_omni.code2wav.sampler import MelSampler
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.options import SolverConfig

Codes = Callable[[int, int], torch.Tensor]
Inject = Callable[[torch.Tensor], None]
MakeSampler = Callable[..., MelSampler]


def noise_of(seed: int, num_codes: int) -> torch.Tensor:
    return torch.from_numpy(noise_frames(seed, 0, 2 * num_codes, 80))


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the spectrogram's variation; its level, about -4.5, is no achievement."""
    return float((result - reference).norm() / (reference - reference.mean()).norm())


@torch.no_grad()
@pytest.mark.parametrize("num_codes", [1, 12, 37])
def test_equals_the_reference(
    token2wav: Qwen2_5OmniToken2WavModel,
    voices: tuple[Voice, Voice],
    random_codes: Codes,
    inject_noise: Inject,
    make_sampler: MakeSampler,
    num_codes: int,
) -> None:
    codes, noise = random_codes(num_codes, 3), noise_of(5, num_codes)
    (mel,) = make_sampler().sample([MelJob(codes, noise, 0)])
    inject_noise(noise[None])
    dit = token2wav.code2wav_dit_model
    reference = dit.sample(voices[0].conditioning, voices[0].reference_mel, codes[None])[0].T
    assert mel.shape == (2 * num_codes, 80)
    assert relative_error(mel, reference) < 1e-4
    assert reference.std() > 0.5


@torch.no_grad()
@pytest.mark.parametrize(
    "solver",
    [
        SolverConfig(num_steps=2),
        SolverConfig(num_steps=5, guidance_scale=2.0),
        SolverConfig(guidance_scale=0.0),
        SolverConfig(num_steps=4, sway_coefficient=0.3),
    ],
    ids=str,
)
def test_solver_settings_mean_what_they_mean_in_the_reference(
    token2wav: Qwen2_5OmniToken2WavModel,
    voices: tuple[Voice, Voice],
    random_codes: Codes,
    inject_noise: Inject,
    make_sampler: MakeSampler,
    solver: SolverConfig,
) -> None:
    dit, voice = token2wav.code2wav_dit_model, voices[1]
    codes, noise = random_codes(30, 4), noise_of(6, 30)
    (mel,) = make_sampler(solver).sample([MelJob(codes, noise, 1)])
    inject_noise(noise[None])
    settings = solver.model_dump()
    reference = dit.sample(voice.conditioning, voice.reference_mel, codes[None], **settings)[0].T
    assert relative_error(mel, reference) < 1e-4
    default = dit.sample(voice.conditioning, voice.reference_mel, codes[None])[0].T
    assert relative_error(default, reference) > 1e-3
