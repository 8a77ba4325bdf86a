"""The reference: transformers' Qwen2.5-Omni, decoding greedily but forced along this server's answer.

Fixes for transformers 5.19, which otherwise deviates from its authors' model:
- `generate()` drops an attention mask of ones, and without one the talker neither adds the codec pad and
  start embeddings to the end of its prompt nor computes M-RoPE positions. A padded batch does both, and so
  does this.
- `talker.generate` receives `pixel_values` and `pixel_values_videos` and rejects them.
- Behind its prompt, the talker continues from the greatest position of all; the thinker, and text in any
  prompt, from the last. They differ behind a heard video of more columns than positions in time.
- An answer of one token (nothing is left to speak) or of no codes fails on an empty tensor; here it is
  silence.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from transformers import BatchFeature, Qwen2_5OmniForConditionalGeneration
from transformers.generation import GenerateDecoderOnlyOutput

from omni_server.protocol.reference import Difference, ReferenceJob
from omni_server.types import ChatMessage, TextPart
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen_omni.forced_reference import (
    ForcedChoice,
    ForcedReference,
    NothingToSpeakError,
    along,
    continue_from_last_position,
    forced_steps,
)

# Copied from the model card, not imported from `family.py`: the comparison covers the server's copy too.
_SPEECH_SYSTEM_PROMPT = ChatMessage(
    "system",
    (
        TextPart(
            "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving "
            "auditory and visual inputs, as well as generating text and speech."
        ),
    ),
)


class _GivenNoise(TorchFunctionMode):
    """Replaces `torch.randn` of [1, frames, bands] inside a `with` statement, in this thread only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is not torch.randn:
            return func(*args, **kwargs)
        _, frames, bands = args[0]
        noise = torch.from_numpy(noise_frames(self._seed, 0, frames, bands))[None]
        return noise.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))


class Qwen25OmniReference(ForcedReference):
    """Implements `omni_server.protocol.reference.Reference`."""

    model_class = Qwen2_5OmniForConditionalGeneration
    noise_seed = 0
    """Of the waveform."""

    @property
    def codec_stop_ids(self) -> tuple[int, int]:
        return self.model.talker.codec_pad_token, self.model.talker.codec_eos_token

    def repair(self) -> None:
        model = self.model
        ends = model.thinker.generation_config.eos_token_id
        ends = self.processor.tokenizer.eos_token_id if ends is None else ends
        self.text_ends = (ends,) if isinstance(ends, int) else tuple(ends)
        if not model.has_talker:
            return
        talker, dit = model.talker, model.token2wav.code2wav_dit_model
        write, generate, sample = model.thinker.generate, talker.generate, dit.sample

        def with_speech(*, input_ids: torch.Tensor, **kwargs: Any) -> object:
            result = write(input_ids=input_ids, **kwargs)
            is_spoken = isinstance(result, GenerateDecoderOnlyOutput)
            if is_spoken and result.sequences.shape[1] - input_ids.shape[1] == 1:
                raise NothingToSpeakError  # the last token is not spoken
            return result

        def with_mask(
            _: object, args: tuple[object, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[object, ...], dict[str, Any]]:
            if kwargs.get("attention_mask") is None:
                embeddings, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
                given = kwargs["input_ids"] if embeddings is None else embeddings
                length = given.shape[1] + (0 if cache is None else cache.get_seq_length())
                kwargs["attention_mask"] = torch.ones(1, length, dtype=torch.long, device=given.device)
            return args, kwargs

        def without_pictures(
            *,
            input_ids: torch.Tensor,
            eos_token_id: list[int],
            pixel_values: object = None,
            pixel_values_videos: object = None,
            **kwargs: object,
        ) -> torch.Tensor:
            sequences: torch.Tensor = generate(input_ids=input_ids, eos_token_id=eos_token_id, **kwargs)
            if int(sequences[0, input_ids.shape[1]]) in eos_token_id:
                raise NothingToSpeakError
            return sequences

        def with_noise(*args: object, **kwargs: object) -> object:
            with _GivenNoise(self.noise_seed):
                return sample(*args, **kwargs)

        talker.register_forward_pre_hook(with_mask, with_kwargs=True)
        model.thinker.generate, dit.sample = with_speech, with_noise
        talker.generate = without_pictures
        continue_from_last_position(talker)

    def spoken_messages(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        has_system_prompt = any(message.role == "system" for message in messages)
        return messages if has_system_prompt else (_SPEECH_SYSTEM_PROMPT, *messages)

    def speak(
        self, inputs: BatchFeature, job: ReferenceJob, text: dict[str, object]
    ) -> tuple[tuple[Difference, ...], npt.NDArray[np.float32]]:
        assert job.voice is not None
        self.noise_seed = job.noise_seed
        codes = ForcedChoice(forced_steps(job.codes, self.codec_stop_ids, job.max_codes))
        talker = along(codes, self.codec_stop_ids, job.repetition_penalties["talker"])
        waveform = self.generate(inputs, job.messages, job.voice, text, talker)
        return tuple(codes.differences), waveform
