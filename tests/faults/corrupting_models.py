"""The real models, which spoil what they make of the victim."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from stages.qwen2_5_omni import codec_window as qwen25
from stages.qwen2_5_omni.code2wav.model import Qwen2_5OmniCode2Wav
from stages.qwen2_5_omni.talker import Qwen2_5OmniTalker
from stages.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from stages.qwen3_omni import codec_window as qwen3
from stages.qwen3_omni.code2wav.model import Qwen3OmniCode2Wav
from stages.qwen3_omni.talker import Qwen3OmniTalker
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from stages.runtime.code_sampling import Choose
from stages.runtime.diffusion_model import DiffusionBatch
from tests.faults.corrupting_family import VICTIM_LENGTH, VICTIM_STREAM, VICTIM_VOICE, ordered


def victims() -> Iterator[tuple[int, slice]]:
    """Of the step that is being computed: each one's index among the requests, and its tokens."""
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:
        return
    of_layer = next(iter(metadata.values()))
    starts, lengths = of_layer.query_start_loc.tolist(), of_layer.seq_lens.tolist()
    for index, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if length >= VICTIM_LENGTH:
            yield index, slice(start, end)


class SpoilsHidden:
    """Before a language model whose stage is `stage`: of the victim, the row of its last token, from which
    the next one is sampled, or those of which rows are made."""

    stage: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden, of_layers = made if isinstance(made, tuple) else (made, [made])
        what = ordered(self.stage)
        for _, tokens in victims() if what is not None else ():
            is_prompt = tokens.stop - tokens.start > 1
            match what:
                case "NaN at the end of the prompt" if is_prompt:
                    hidden[tokens.stop - 1] = torch.nan
                case "infinity within the prompt" if is_prompt:
                    of_layers[0][tokens.start : tokens.stop - 1, 0] = torch.inf
                case "NaN while decoding" if not is_prompt:
                    hidden[tokens.start, 1] = torch.nan
        return made


def ended(logits: torch.Tensor | None, end_id: int) -> torch.Tensor | None:
    """No fault: everybody's speech ends before it begins."""
    if logits is not None and ordered("talker") == "ends at once":
        logits[:, end_id] = 1e4
    return logits


class CorruptingQwen25Thinker(SpoilsHidden, Qwen2_5OmniThinker):
    stage = "thinker"


class CorruptingQwen25Talker(SpoilsHidden, Qwen2_5OmniTalker):
    stage = "talker"

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return ended(super().compute_logits(hidden_states), self.config.tts_codec_end_token_id)


class CorruptingQwen3Thinker(SpoilsHidden, Qwen3OmniThinker):
    stage = "thinker"


class CorruptingQwen3Talker(SpoilsHidden, Qwen3OmniTalker):
    stage = "talker"
    _victims: list[int]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return ended(super().compute_logits(hidden_states), self.config.codec_eos_token_id)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._victims = [index for index, _ in victims()]
        return super().forward(*args, **kwargs)

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        """The token has been sampled already."""
        if ordered("predicted codes") == "NaN":
            hidden = hidden.clone()
            hidden[self._victims] = torch.nan
        return super().predict(hidden, sampled, choose)


class SpoilsSound:
    """Before a model of code2wav."""

    def is_victim(self, payload: bytes) -> bool:
        raise NotImplementedError

    def fail(self, batch: DiffusionBatch) -> Any:
        """Raises in the middle of the computation, if there is one."""
        raise NotImplementedError

    def sample(self, batch: DiffusionBatch) -> Any:
        what = ordered("code2wav")
        spoiled = [index for index, payload in enumerate(batch.inputs) if self.is_victim(payload)]
        if what == "raises" and spoiled:
            return self.fail(batch)
        waveforms = super().sample(batch)  # type: ignore[misc]
        for index in spoiled if what is not None else ():
            waveforms[index] = spoiled_sound(waveforms[index], what)
        return waveforms


class CorruptingQwen25Code2Wav(SpoilsSound, Qwen2_5OmniCode2Wav):
    def is_victim(self, payload: bytes) -> bool:
        return qwen25.CodecWindow.decode(payload).voice == VICTIM_VOICE

    def fail(self, batch: DiffusionBatch) -> Any:
        raise RuntimeError("told to fail")


class CorruptingQwen3Code2Wav(SpoilsSound, Qwen3OmniCode2Wav):
    def is_victim(self, payload: bytes) -> bool:
        return qwen3.CodecWindow.decode(payload).stream.startswith(VICTIM_STREAM)

    def fail(self, batch: DiffusionBatch) -> Any:
        """When the states of all streams in the batch have changed."""

        def raise_error(*_: Any) -> None:
            raise RuntimeError("told to fail")

        hook = self.code2wav.register_forward_hook(raise_error)
        try:
            return Qwen3OmniCode2Wav.sample(self, batch)
        finally:
            hook.remove()


def spoiled_sound(sound: torch.Tensor, what: str | None) -> torch.Tensor:
    match what:
        case "NaN":
            sound[-1] = torch.nan
        case "silence":
            sound.zero_()
        case "too loud":
            sound *= 2 / sound.abs().max()
        case "clipped":
            sound = sound.sign()
        case "cut":
            sound = sound[:-1]
        case "stereo":
            sound = sound.expand(2, -1)
        case "whole numbers":
            sound = sound.to(torch.int64)
    return sound
