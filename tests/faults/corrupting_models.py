"""The real models, which spoil what they make of the victim."""

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from stages.qwen2_5_omni.code2wav.model import Qwen2_5OmniCode2Wav
from stages.qwen2_5_omni.codec_window import decode_codec_window
from stages.qwen2_5_omni.talker import Qwen2_5OmniTalker
from stages.qwen2_5_omni.thinker import Qwen2_5OmniThinker
from stages.runtime.diffusion_model import DiffusionBatch
from tests.faults.corrupting_family import VICTIM_LENGTH, VICTIM_VOICE, ordered


def spoil_hidden(hidden: torch.Tensor, stage: str) -> None:
    """`hidden` `[num_tokens, width]` of a step, in place: the row of the victim's last token, from which the
    next one is sampled, or of its first, of which only a row is made."""
    what = ordered(stage)
    metadata: Any = get_forward_context().attn_metadata
    if what is None or metadata is None:
        return
    of_layer = next(iter(metadata.values()))
    starts, lengths = of_layer.query_start_loc.tolist(), of_layer.seq_lens.tolist()
    for start, end, length in zip(starts, starts[1:], lengths, strict=False):
        if length < VICTIM_LENGTH:
            continue
        is_prompt = end - start > 1
        match what:
            case "NaN at the end of the prompt" if is_prompt:
                hidden[end - 1] = torch.nan
            case "infinity within the prompt" if is_prompt:
                hidden[start, 0] = torch.inf
            case "NaN while decoding" if not is_prompt:
                hidden[start, 1] = torch.nan


class CorruptingThinker(Qwen2_5OmniThinker):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        spoil_hidden(hidden, "thinker")
        return hidden


class CorruptingTalker(Qwen2_5OmniTalker):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        spoil_hidden(hidden, "talker")
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """No fault: everybody's speech ends before it begins."""
        logits = super().compute_logits(hidden_states)
        if logits is not None and ordered("talker") == "ends at once":
            logits[:, self.config.tts_codec_end_token_id] = 1e4
        return logits


class CorruptingCode2Wav(Qwen2_5OmniCode2Wav):
    def sample(self, batch: DiffusionBatch) -> Any:
        what = ordered("code2wav")
        victims = [index for index, voice in enumerate(map(voice_of, batch.inputs)) if voice == VICTIM_VOICE]
        if what == "raises" and victims:
            raise RuntimeError("told to fail")
        waveforms = super().sample(batch)
        for index in victims if what is not None else ():
            waveforms[index] = spoiled_sound(waveforms[index], what)
        return waveforms


def voice_of(payload: bytes) -> str:
    return decode_codec_window(payload).voice


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
