"""The voice encoder stage as vLLM loads it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import DefaultModelLoader

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.qwen3_tts.checkpoint_config import CODEC_FOLDER
from stages.qwen3_tts.recording import Recording
from stages.qwen3_tts.voice_network import VoiceEncoderNetwork
from stages.runtime.checkpoint_weights import load_weights_exactly
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel

_CODEC = f"{CODEC_FOLDER}."
_PREFIXES = {"speaker_encoder": "speaker_encoder.", "audio_encoder": f"{_CODEC}encoder."}
"""Of the weights in the checkpoint, by the network's parts. Those of the codec's own folder get one more."""


class Qwen3TTSVoiceEncoder(DiffusionModel):
    """The input of a request is a `Recording`, its tokens stand for the recording's frames, and its result
    [width + 16 x frames] is the vector of the voice and, where they are wanted, the codes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        runtime = cast(DiffusionRuntimeConfig, vllm_config.additional_config)
        model_dir = Path(vllm_config.model_config.model)
        network = VoiceEncoderNetwork(vllm_config.model_config.hf_config, model_dir)
        self.network = network.to(getattr(torch, runtime.compute_dtype))
        folder = str(model_dir / CODEC_FOLDER)
        self.secondary_weights = (DefaultModelLoader.Source(folder, revision=None, prefix=_CODEC),)

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
        kept = [(name, weight) for name, weight in weights if not self.is_unused_checkpoint_weight(name)]
        return {
            f"network.{part}.{name}"
            for part, prefix in _PREFIXES.items()
            for name in load_weights_exactly(self.network.get_submodule(part), kept, prefix)
        }

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Lets vLLM's loader skip files with other stages' weights only."""
        return not name.startswith(tuple(_PREFIXES.values()))
