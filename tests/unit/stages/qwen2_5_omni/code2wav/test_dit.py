"""The sampler against transformers' `Qwen2_5OmniToken2WavDiTModel.sample`, from the same noise."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_server.config.stage_config import SolverConfig
from stages.qwen2_5_omni.code2wav.dit import DiTSampler
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.voices import Voice

Codes = Callable[[int, int], torch.Tensor]
Inject = Callable[[torch.Tensor], None]


def noise_of(seed: int, num_codes: int) -> torch.Tensor:
    return torch.from_numpy(noise_frames(seed, 0, 2 * num_codes, 80))


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the spectrogram's variation; its level, about -4.5, is no achievement."""
    return float((result - reference).norm() / (reference - reference.mean()).norm())


@torch.no_grad()
@pytest.mark.parametrize("num_codes", [1, 11, 12, 37, 60])
def test_equals_the_reference(
    token2wav: Qwen2_5OmniToken2WavModel,
    voices: tuple[Voice, Voice],
    random_codes: Codes,
    inject_noise: Inject,
    num_codes: int,
) -> None:
    dit, voice = token2wav.code2wav_dit_model, voices[0]
    codes, noise = random_codes(num_codes, 3)[None], noise_of(5, num_codes)[None]
    mel = DiTSampler(dit, SolverConfig()).sample([voice], codes, noise)
    inject_noise(noise)
    reference = dit.sample(voice.conditioning, voice.reference_mel, codes)
    assert mel.shape == (1, 80, 2 * num_codes)
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
    solver: SolverConfig,
) -> None:
    dit, voice = token2wav.code2wav_dit_model, voices[1]
    codes, noise = random_codes(30, 4)[None], noise_of(6, 30)[None]
    mel = DiTSampler(dit, solver).sample([voice], codes, noise)
    inject_noise(noise)
    settings = solver.model_dump()
    reference = dit.sample(voice.conditioning, voice.reference_mel, codes, **settings)
    assert relative_error(mel, reference) < 1e-4
    default = dit.sample(voice.conditioning, voice.reference_mel, codes)
    assert relative_error(default, reference) > 1e-3


@torch.no_grad()
def test_a_batch_equals_its_requests_alone(
    token2wav: Qwen2_5OmniToken2WavModel, voices: tuple[Voice, Voice], random_codes: Codes
) -> None:
    sampler = DiTSampler(token2wav.code2wav_dit_model, SolverConfig())
    chosen = [voices[0], voices[1], voices[0]]
    codes = torch.stack([random_codes(29, seed) for seed in range(3)])
    noise = torch.stack([noise_of(seed, 29) for seed in range(3)])
    together = sampler.sample(chosen, codes, noise)
    for row in range(3):
        alone = sampler.sample([chosen[row]], codes[row : row + 1], noise[row : row + 1])[0]
        assert relative_error(together[row], alone) < 1e-5


@torch.no_grad()
def test_every_input_is_heard(
    token2wav: Qwen2_5OmniToken2WavModel, voices: tuple[Voice, Voice], random_codes: Codes
) -> None:
    """Otherwise agreement with the reference would mean little."""
    sampler = DiTSampler(token2wav.code2wav_dit_model, SolverConfig())
    codes, noise = random_codes(24, 1)[None], noise_of(1, 24)[None]
    mel = sampler.sample([voices[0]], codes, noise)
    ethan, chelsie = voices
    with_x_vector = Voice("x-vector", 0, chelsie.conditioning, ethan.reference_mel)
    with_reference = Voice("reference", 0, ethan.conditioning, chelsie.reference_mel)
    for other in (
        sampler.sample([with_x_vector], codes, noise),
        sampler.sample([with_reference], codes, noise),
        sampler.sample([ethan], random_codes(24, 2)[None], noise),
        sampler.sample([ethan], codes, noise_of(2, 24)[None]),
    ):
        assert relative_error(other, mel) > 1e-2
