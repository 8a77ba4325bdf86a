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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoProcessor, BatchFeature, Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniToken2WavDiTModel,
)

from omni_server.reference import ReferenceAnswer, ReferenceJob
from omni_server.types import ChatMessage, TextPart
from stages.forced_reference import (
    ForcedChoice,
    along,
    forced_steps,
    hears_videos,
    moved,
    one_each,
    prefixed,
    processed,
)
from stages.qwen2_5_omni.code2wav.noise import noise_frames

# Copied from the model card, not imported from `prompt.py`: the comparison covers the server's copy too.
_SPEECH_SYSTEM_PROMPT = ChatMessage(
    "system",
    (
        TextPart(
            "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving "
            "auditory and visual inputs, as well as generating text and speech."
        ),
    ),
)


class _NothingToSpeakError(Exception):
    """Exits `generate` where transformers would fail on an empty tensor."""


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


class Qwen25OmniReference:
    """Implements `omni_server.reference.Reference`."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._processor = AutoProcessor.from_pretrained(folder)
        model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model = model = model.eval().to(device)
        self._noise_seed = 0
        ends = model.thinker.generation_config.eos_token_id
        self._text_ends = _ids(self._processor.tokenizer.eos_token_id if ends is None else ends)
        if model.has_talker:
            self._repair(model.talker)
            self._give_noise(model.token2wav.code2wav_dit_model)

    def _repair(self, talker: Qwen2_5OmniTalkerForConditionalGeneration) -> None:
        generate, get_rope_index = talker.generate, talker.get_rope_index

        def from_last(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            positions, _ = get_rope_index(*args)
            return positions, positions[0, :, -1:] + 1 - positions.shape[-1]

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
                raise _NothingToSpeakError
            return sequences

        talker.register_forward_pre_hook(with_mask, with_kwargs=True)
        talker.generate, talker.get_rope_index = without_pictures, from_last

    def _give_noise(self, dit: Qwen2_5OmniToken2WavDiTModel) -> None:
        sample = dit.sample

        def with_noise(*args: object, **kwargs: object) -> object:
            with _GivenNoise(self._noise_seed):
                return sample(*args, **kwargs)

        dit.sample = with_noise

    @torch.inference_mode()
    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Raises what transformers raises."""
        self._noise_seed = job.noise_seed
        inputs = self._inputs(job)
        given_ids = None
        if job.given_text is not None:
            tokenized = self._processor.tokenizer(job.given_text, add_special_tokens=False)
            given_ids = tuple(tokenized["input_ids"])
            # The thinker's last token is not spoken, so an end token follows the text.
            text = ForcedChoice([*one_each(given_ids), self._text_ends])
        else:
            text = ForcedChoice(forced_steps(job.text_ids, self._text_ends, job.max_text_tokens))
        codes, waveform = ForcedChoice([]), np.zeros(0, np.float32)
        if job.voice is None or text.num_steps == 1:  # the last token is not spoken
            thinker = along(text, job.repetition_penalties["thinker"])
            self._model.thinker.generate(**inputs, **thinker, use_audio_in_video=hears_videos(job.messages))
        else:
            codes, waveform = self._speak(inputs, job, text)
        return ReferenceAnswer(
            prompt_tokens=inputs["input_ids"].shape[1],
            text=tuple(text.differences) if given_ids is None else (),
            given_ids=given_ids,
            codes=tuple(codes.differences),
            waveform=waveform,
        )

    def _speak(
        self, inputs: BatchFeature, job: ReferenceJob, text: ForcedChoice
    ) -> tuple[ForcedChoice, npt.NDArray[np.float32]]:
        talker = self._model.talker
        stops = (talker.codec_pad_token, talker.codec_eos_token)
        codes = ForcedChoice(forced_steps(job.codes, stops, job.max_codes))
        try:
            _, waveform = self._model.generate(
                **inputs,
                speaker=job.voice,
                use_audio_in_video=hears_videos(job.messages),
                **prefixed("thinker", along(text, job.repetition_penalties["thinker"])),
                **prefixed("talker", along(codes, job.repetition_penalties["talker"])),
                talker_eos_token_id=list(stops),
            )
        except _NothingToSpeakError:
            return codes, np.zeros(0, np.float32)
        return codes, waveform.float().cpu().numpy()

    def _inputs(self, job: ReferenceJob) -> BatchFeature:
        """Uses chat template and processor as the model's docs do."""
        messages = job.messages
        if job.voice is not None and not any(message.role == "system" for message in messages):
            messages = (_SPEECH_SYSTEM_PROMPT, *messages)
        inputs = processed(self._processor, messages)
        return moved(inputs, self._model.device, self._model.thinker.dtype)


def _ids(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
