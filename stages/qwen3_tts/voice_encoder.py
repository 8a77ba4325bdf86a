"""The voice encoder stage as vLLM loads it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch
from safetensors import safe_open
from vllm.config import VllmConfig

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.qwen3_tts.checkpoint_config import CODEC_FOLDER
from stages.qwen3_tts.recording import Recording
from stages.qwen3_tts.voice_network import VoiceEncoderNetwork
from stages.runtime.checkpoint_weights import load_weights_exactly
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel

_SPEAKER_ENCODER = "speaker_encoder."
"""Prefix of its weights in the checkpoint's folder."""
_AUDIO_ENCODER = "encoder."
"""Prefix of its weights in the codec's folder."""


class Qwen3TTSVoiceEncoder(DiffusionModel):
    """The input of a request is a `Recording`, its tokens stand for the recording's frames, and its result
    [width + 16 x frames] is the vector of the voice and, where they are wanted, the codes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        runtime = cast(DiffusionRuntimeConfig, vllm_config.additional_config)
        model_dir = Path(vllm_config.model_config.model)
        network = VoiceEncoderNetwork(vllm_config.model_config.hf_config, model_dir)
        self.network = network.to(getattr(torch, runtime.compute_dtype))
        self._codec_folder = model_dir / CODEC_FOLDER

    def sample(self, batch: DiffusionBatch) -> Sequence[torch.Tensor]:
        return [self._hear(msgspec.msgpack.decode(data, type=Recording)) for data in batch.inputs]

    def _hear(self, recording: Recording) -> torch.Tensor:
        samples = torch.frombuffer(bytearray(recording.samples), dtype=torch.float32)
        samples = samples.to(next(self.parameters()).device)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # PyTorch allows it by default
            vector = self.network.vector(samples).float()
            if not recording.has_codes:
                return vector
            return torch.cat((vector, self.network.codes(samples).flatten().float()))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises `ConfigError` if one is missing, unknown or misshapen."""
        codec = _stored_weights(self._codec_folder, _AUDIO_ENCODER)
        speaker_encoder = load_weights_exactly(self.network.speaker_encoder, weights, _SPEAKER_ENCODER)
        audio_encoder = load_weights_exactly(self.network.audio_encoder, codec, _AUDIO_ENCODER)
        return {f"network.speaker_encoder.{name}" for name in speaker_encoder} | {
            f"network.audio_encoder.{name}" for name in audio_encoder
        }

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Lets vLLM's loader skip files with other stages' weights only."""
        return not name.startswith(_SPEAKER_ENCODER)


def _stored_weights(folder: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """vLLM's loader reads one folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name.startswith(prefix):
                    yield name, file.get_tensor(name)
