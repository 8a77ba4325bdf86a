"""The toy families' models, which run in the engines."""

import time
from collections.abc import Set
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel
from tests.toy_families.decoding import render, waveform
from tests.toy_families.image_only import SLOW_S, ImageInput
from tests.toy_families.speech_only import NUM_CODEBOOKS, SpeechModel, WindowInput
from tests.toy_families.toy import END, FIRST_CODE


class ToySpeaker(Qwen2ForCausalLM):
    """Samples codec tokens and the end token only."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, :END] = float("-inf")
        return logits


class WriterRows:
    """Implements `stages.runtime.row_producer.RowProducer`: a row is the last hidden state."""

    hidden_layer: int | None = None

    def __init__(self, model: nn.Module, model_dir: Path) -> None:
        device = next(model.parameters()).device
        wanted = torch.tensor([END, *(ord(voice[0]) for voice in SpeechModel.voices)], device=device)
        embeds = model.embed_input_ids(wanted).cpu()  # type: ignore[operator]
        self._tail = embeds[:1]
        self._boundary = {name: embeds[1 + i : 2 + i] for i, name in enumerate(SpeechModel.voices)}

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        return hidden.clone()

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        return None

    def boundary_rows(self, voice: str) -> torch.Tensor:
        return self._boundary[voice]

    def tail_rows(self) -> torch.Tensor:
        return self._tail


class ToyVocoder(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Waveforms, float32 `[num_frames * 1280]`."""
        results = []
        for tokens, payload in zip(batch.token_ids, batch.inputs, strict=True):
            window = msgspec.msgpack.decode(payload, type=WindowInput)
            codes = (tokens - FIRST_CODE).reshape(-1, NUM_CODEBOOKS)
            results.append(torch.from_numpy(waveform(codes.numpy(), window.first_frame, window.voice)))
        return results


class ToyPainter(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Images, float32 `[height, width, 3]` in [0, 1].

        Some prompts request a broken model's output (NaN, pixels beyond white, a wrong size) or a slow step.
        """
        asked = [msgspec.msgpack.decode(payload, type=ImageInput) for payload in batch.inputs]
        if any(image.prompt == "slow" for image in asked):
            time.sleep(SLOW_S)
        return [self._paint(image) for image in asked]

    def _paint(self, image: ImageInput) -> torch.Tensor:
        pixels = torch.from_numpy(render(image.prompt, image.width, image.height, image.seed))
        match image.prompt:
            case "NaN":
                pixels[3, 5, 1] = float("nan")
            case "dazzling":
                pixels[3, 5, 1] = 1.1
            case "cropped":
                pixels = pixels[1:]
        return pixels
