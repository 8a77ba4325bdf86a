"""transformers' Qwen3-Omni, repaired where it deviates from its authors' model.

All line numbers are those of modeling_qwen3_omni_moe.py in version 5.19, if no other is named. What is not
repaired: in a batch, shorter answers get the end of their text one frame late (4144), so a reference
generates one answer at a time.
"""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import BatchFeature, Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPooling

from stages.qwen_omni.forced_reference import NothingToSpeakError, continue_from_last_position


def repair(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """Change a loaded model that has a talker. Its `generate` raises `NothingToSpeakError` for silence."""
    # 356, 402: the positions of prompts with audio beside images read it from the talker's config.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    # 3846: `chunked_decode` loses the decoder's lead, 555 samples, before each chunk but the first.
    model.code2wav.chunked_decode = _single_pass(model)
    continue_from_last_position(model.talker)  # 3101 in 5.17
    _Repairs(model)


def _single_pass(model: Qwen3OmniMoeForConditionalGeneration) -> Any:
    def decode(codes: torch.Tensor, **_: object) -> torch.Tensor:
        waveform: torch.Tensor = model.code2wav(codes)
        return waveform

    return decode


def repair_processor(processor: Any) -> None:
    """Change a checkpoint's processor: recordings do not influence each other's features.

    It pads them to the longest one first, and silence instead of the reflected end then changes the last
    frame of all others.
    """
    processor.feature_extractor = _OneByOne.from_dict(processor.feature_extractor.to_dict())


def repair_audio(thinker: Any) -> None:
    """Change a thinker: recordings do not influence each other's embeddings.

    809: they are cut into pieces of one second, and one that is shorter is padded if another is longer. Its
    last embedding then contains what the convolutions make of the padding.
    """
    encode = thinker.audio_tower.forward

    def alone(
        input_features: torch.Tensor, feature_lens: torch.Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        each = [
            encode(frames, feature_lens=length[None], **kwargs).last_hidden_state
            for frames, length in zip(
                input_features.split(feature_lens.tolist(), dim=1), feature_lens, strict=True
            )
        ]
        return BaseModelOutputWithPooling(last_hidden_state=torch.cat(each))

    thinker.audio_tower.forward = alone


class _OneByOne(WhisperFeatureExtractor):
    def __call__(self, raw_speech: Any, **kwargs: Any) -> BatchFeature:
        kwargs["return_tensors"] = "pt"
        each = [super(_OneByOne, self).__call__([sound], **kwargs) for sound in raw_speech]
        longest = max(features["input_features"].shape[-1] for features in each)
        return BatchFeature(
            {
                key: torch.cat(
                    [pad(features[key], (0, longest - features[key].shape[-1])) for features in each]
                )
                for key in ("input_features", "attention_mask")
            }
        )


class _Repairs:
    def __init__(self, model: Qwen3OmniMoeForConditionalGeneration) -> None:
        self._thinker = model.thinker
        self._thinker_generate = model.thinker.generate
        self._talker_generate = model.talker.generate
        self._audio_in_video = False
        model.thinker.generate = self._generate_text
        model.talker.generate = self._generate_codes

    def _generate_text(self, *, use_audio_in_video: bool = False, **kwargs: Any) -> Any:
        self._audio_in_video = use_audio_in_video
        result = self._thinker_generate(use_audio_in_video=use_audio_in_video, **kwargs)
        if not isinstance(result, GenerateDecoderOnlyOutput):  # text alone
            return result
        ends = torch.as_tensor(kwargs["eos_token_id"], device=result.sequences.device).flatten()
        last = result.sequences[:, -1:]
        if not torch.isin(last, ends).any():
            self._append(result, int(ends[0]))
        elif result.sequences.shape[1] - kwargs["input_ids"].shape[1] == 1:
            raise NothingToSpeakError  # 3946: the talker's prompt needs a token that is spoken
        return result

    def _append(self, result: GenerateDecoderOnlyOutput, end: int) -> None:
        """Let an answer that reached its limit end one token later.

        4051: the last token was sampled but never computed, and is left out as if it were the end.
        """
        last = result.sequences[:, -1:]
        embedding = self._thinker.get_input_embeddings()(last)  # all that is read of generated positions
        result.hidden_states += ((embedding,) * len(result.hidden_states[-1]),)
        result.sequences = torch.cat([result.sequences, torch.full_like(last, end)], 1)

    def _generate_codes(self, **kwargs: Any) -> Any:
        # 4034: the talker's positions depend on it as well, but it is not handed on.
        result = self._talker_generate(use_audio_in_video=self._audio_in_video, **kwargs)
        # 4170: speech that ends with its first code has no frames to stack.
        if all(codes is None for _, codes in result.hidden_states):
            raise NothingToSpeakError
        return result
