"""The producing half of the thinker -> talker edge: makes the talker's input rows.

Source: `Qwen2_5OmniForConditionalGeneration.generate` in transformers 5.19. A row is the thinker's last
hidden state plus its layer-0 input at the same position; at audio, image and video placeholders the input is
left out. The embedding of the voice's begin token separates prompt and reply. The reply is followed by the
embedding of the text-end token, once, and then by that of the text-pad token.
"""

from collections.abc import Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stages.qwen2_5_omni.code2wav.voices import load_voices
from stages.qwen2_5_omni.ids import read_special_ids


class ThinkerToTalker:
    """Implements `stages.runtime.row_producer.RowProducer`."""

    hidden_layer: int | None = None

    def __init__(self, model: nn.Module, model_dir: Path) -> None:
        ids = read_special_ids(model_dir)
        voices = load_voices(model_dir)
        device = next(model.parameters()).device
        wanted = [ids.text_end, ids.text_pad, *(voice.bos_token for voice in voices.values())]
        embeds = model.embed_input_ids(torch.tensor(wanted, device=device)).cpu()  # type: ignore[operator]
        self._tail = embeds[:2]
        self._boundary = {name: embeds[2 + i : 3 + i] for i, name in enumerate(voices)}
        self._placeholders = {
            "audio": (ids.audio_placeholder,),
            "image": (ids.image_placeholder,),
            "video": (ids.video_placeholder, ids.audio_placeholder),  # its track may be heard
        }

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """`[n, width]` each, summed in the model's dtype, as in the reference."""
        if without_embedding is not None:
            embeds = embeds.masked_fill(without_embedding[:, None], 0)
        return hidden + embeds

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        """Placeholder positions of the modalities that have media."""
        placeholders = [token for name in modalities for token in self._placeholders[name]]
        return np.isin(prompt_token_ids, placeholders) if placeholders else None

    def boundary_rows(self, voice: str) -> torch.Tensor:
        return self._boundary[voice]

    def tail_rows(self) -> torch.Tensor:
        return self._tail
