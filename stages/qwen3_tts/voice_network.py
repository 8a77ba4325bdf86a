"""Computes the voice of a recording: a vector, and codes.

Source: `extract_speaker_embedding` of `Qwen3TTSForConditionalGeneration`, and `encode` of
`Qwen3TTSTokenizerV2Model`.
"""

from pathlib import Path
from typing import cast

import torch
from torch.nn.functional import pad
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from omni_server.types import SAMPLE_RATE_HZ
from stages.qwen3_tts.checkpoint_config import CODEC_FOLDER
from stages.qwen3_tts.hf_config import Qwen3TTSTokenizerConfig, Qwen3TTSVoiceEncoderConfig
from stages.qwen_codec.codec_layout import NUM_CODEBOOKS

_FFT_SIZE, _HOP, _MAX_HZ = 1024, 256, 12_000
_SMALLEST_POWER, _SMALLEST_LEVEL = 1e-9, 1e-5


class VoiceEncoderNetwork(torch.nn.Module):
    def __init__(self, config: Qwen3TTSVoiceEncoderConfig, model_dir: Path) -> None:
        super().__init__()
        # The same network, with the same fields in its config.
        self.speaker_encoder = ECAPA_TimeDelayNet(cast(Qwen2_5OmniDiTConfig, config))
        self.audio_encoder = _audio_encoder(model_dir / CODEC_FOLDER)
        mels = mel_filter_bank(
            _FFT_SIZE // 2 + 1, config.mel_dim, 0, _MAX_HZ, SAMPLE_RATE_HZ, norm="slaney", mel_scale="slaney"
        )
        self._mels = torch.from_numpy(mels.T).float()

    def vector(self, samples: torch.Tensor) -> torch.Tensor:
        """Of float32 [num_samples]: [enc_dim]."""
        dtype = next(self.parameters()).dtype
        vectors: torch.Tensor = self.speaker_encoder(self._features(samples).T[None].to(dtype))
        return vectors[0]

    def codes(self, samples: torch.Tensor) -> torch.Tensor:
        """Of float32 [num_samples]: int64 [num_frames, NUM_CODEBOOKS]. The last frame may be incomplete."""
        audio = samples.to(next(self.parameters()).dtype)[None, None]
        codes: torch.Tensor = self.audio_encoder.encode(audio, num_quantizers=NUM_CODEBOOKS).audio_codes
        return codes[0].T

    def _features(self, samples: torch.Tensor) -> torch.Tensor:
        """The log mel spectrogram [bands, num_samples / 256]."""
        padded = pad(samples[None], 2 * ((_FFT_SIZE - _HOP) // 2,), mode="reflect")[0]
        window = torch.hann_window(_FFT_SIZE, device=samples.device)
        spectrum = torch.stft(padded, _FFT_SIZE, _HOP, window=window, center=False, return_complex=True)
        magnitudes = torch.sqrt(spectrum.real**2 + spectrum.imag**2 + _SMALLEST_POWER)
        return torch.log((self._mels.to(samples.device) @ magnitudes).clamp(min=_SMALLEST_LEVEL))


def _audio_encoder(folder: Path) -> MimiModel:
    codec = Qwen3TTSTokenizerConfig.from_pretrained(folder)
    config = MimiConfig(**(codec.encoder_config or {}))
    # The model was trained on codes of a transformers whose Mimi ignored its sliding window.
    config.sliding_window = config.max_position_embeddings
    model = MimiModel(config)
    del model.upsample, model.decoder_transformer, model.decoder
    return model
