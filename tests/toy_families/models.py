"""The models of the toy families, as they run in the engines."""

import msgspec
import torch
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from omni_server.protocol.diffusion import decode_stage_result
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel
from tests.toy_families.decoding import mixed, render, tones, waveform
from tests.toy_families.speech_only import NUM_CODEBOOKS, WindowInput
from tests.toy_families.toy import END, FIRST_CODE


class ToySpeaker(Qwen2ForCausalLM):
    """Samples codec tokens and the end token only."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, :END] = float("-inf")
        return logits


class ToyVocoder(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Waveforms, float32 `[num_frames * 1280]`."""
        results = []
        for tokens, payload in zip(batch.token_ids, batch.inputs, strict=True):
            window = msgspec.msgpack.decode(payload, type=WindowInput)
            codes = (tokens - FIRST_CODE).reshape(-1, NUM_CODEBOOKS)
            results.append(torch.from_numpy(waveform(codes.numpy(), window.first_frame, window.voice)))
        return results


class ToyTones(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Tones, float32 `[num_frames * 1280, 4]`."""
        results = []
        for tokens, payload in zip(batch.token_ids, batch.inputs, strict=True):
            window = msgspec.msgpack.decode(payload, type=WindowInput)
            codes = (tokens - FIRST_CODE).reshape(-1, NUM_CODEBOOKS)
            results.append(torch.from_numpy(tones(codes.numpy(), window.first_frame, window.voice)))
        return results


class ToyMixer(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Waveforms, float32 `[num_samples]`, of the tones that the stage before has made."""
        return [torch.from_numpy(mixed(decode_stage_result(data)[1])) for data in batch.inputs]


class ToyPainter(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Images, float32 `[height, width, 3]` in [0, 1]."""
        return [torch.from_numpy(render(payload)) for payload in batch.inputs]
