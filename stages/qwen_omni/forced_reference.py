"""What the families' references share: transformers, decoding greedily but forced along this server's answer.

`ForcedReference` is the one implementation of the right answers: `omni-server verify` forces it along an
answer, and the parity tests let it generate freely.

It is forced token by token and records every step at which it would have chosen another token. Forcing
changes nothing as long as it agrees, so no difference means equal answers. After a first difference, where
two free generations would have nothing in common any more, the comparison continues.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor, BatchFeature, LogitsProcessor, LogitsProcessorList

from omni_server.protocol.reference import Difference, ReferenceAnswer, ReferenceJob
from omni_server.types import AudioPart, ChatMessage, ContentPart, ImagePart, VideoPart
from stages.chat_prompts import template_part


class NothingToSpeakError(Exception):
    """Exits `generate` where transformers fails on an empty tensor: the answer is silence."""


def continue_from_last_position(talker: Any) -> None:
    """Changes a talker of transformers: behind a prompt with media, its positions continue from the last one
    and not from the greatest one."""
    get_rope_index = talker.get_rope_index

    def from_last(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions, _ = get_rope_index(*args, **kwargs)
        return positions, positions[0, :, -1:] + 1 - positions.shape[-1]

    talker.get_rope_index = from_last


class ForcedReference(ABC):
    """Implements `omni_server.protocol.reference.Reference` for models of a thinker, a talker and a
    decoder."""

    model_class: Any
    """Of transformers."""
    text_ends: tuple[int, ...]
    """Tokens that end the text."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.model: Any = self.model_class.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.repair()

    @abstractmethod
    def repair(self) -> None:
        """Changes processor and model where transformers deviates from its authors' model. `generate` then
        raises `NothingToSpeakError` for silence. Sets `text_ends`."""

    @abstractmethod
    def speak(
        self, inputs: BatchFeature, job: ReferenceJob, text: dict[str, object]
    ) -> tuple[tuple[Difference, ...], npt.NDArray[np.float32]]:
        """Returns the differences in the codes, and the waveform. `text`: arguments for the thinker's
        `generate`."""

    def spoken_messages(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Returns the messages of a chat that is answered by voice."""
        return messages

    def prompt(self, messages: Sequence[ChatMessage]) -> BatchFeature:
        return moved(processed(self.processor, messages), self.model.device, self.model.thinker.dtype)

    def generate(
        self,
        inputs: BatchFeature,
        messages: Sequence[ChatMessage],
        voice: str,
        thinker: dict[str, object],
        talker: dict[str, object],
    ) -> npt.NDArray[np.float32]:
        """Returns the waveform [num_samples], empty for silence. `thinker` and `talker`: arguments for their
        `generate`."""
        try:
            _, waveform = self.model.generate(
                **inputs,
                speaker=voice,
                use_audio_in_video=hears_videos(messages),
                **{f"thinker_{name}": value for name, value in thinker.items()},
                **{f"talker_{name}": value for name, value in talker.items()},
            )
        except NothingToSpeakError:
            return np.zeros(0, np.float32)
        samples: npt.NDArray[np.float32] = waveform.flatten().float().cpu().numpy()
        return samples

    @torch.inference_mode()
    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Raises what transformers raises."""
        messages = job.messages if job.voice is None else self.spoken_messages(job.messages)
        inputs = self.prompt(messages)
        given_ids = None
        if job.given_text is not None:
            tokenized = self.processor.tokenizer(job.given_text, add_special_tokens=False)
            given_ids = tuple(tokenized["input_ids"])
            # The thinker's last token is not spoken, so an end token follows the text.
            text = ForcedChoice([*one_each(given_ids), self.text_ends])
        else:
            text = ForcedChoice(forced_steps(job.text_ids, self.text_ends, job.max_text_tokens))
        arguments = along(text, self.text_ends, job.repetition_penalties["thinker"])
        codes, waveform = tuple[Difference, ...](), np.zeros(0, np.float32)
        if job.voice is None:
            self.model.thinker.generate(**inputs, **arguments, use_audio_in_video=hears_videos(messages))
        else:
            codes, waveform = self.speak(inputs, job, arguments)
        return ReferenceAnswer(
            prompt_tokens=inputs["input_ids"].shape[1],
            text=tuple(text.differences) if given_ids is None else (),
            given_ids=given_ids,
            codes=codes,
            waveform=waveform,
        )


class ForcedChoice(LogitsProcessor):
    """`steps` holds the allowed tokens of each step: one, or all that end the answer."""

    def __init__(self, steps: Sequence[tuple[int, ...]]) -> None:
        self._steps = steps
        self._num_done = 0
        self.differences: list[Difference] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """`scores`: float32 [1, vocabulary]. Keeps the best allowed token only."""
        allowed = self._steps[self._num_done]
        row = scores[0]
        ours = max(allowed, key=lambda token: float(row[token]))
        best = int(row.argmax())
        if best not in allowed:
            margin, largest = float(row[best] - row[ours]), float(row[row.isfinite()].abs().max())
            self.differences.append(Difference(self._num_done, ours, best, margin, largest))
        self._num_done += 1
        forced = torch.full_like(scores, -torch.inf)
        forced[0, ours] = 0.0
        return forced


def forced_steps(ids: tuple[int, ...], ends: tuple[int, ...], limit: int) -> list[tuple[int, ...]]:
    """The tokens of an answer, plus any end token if it ended before the limit with an unknown one."""
    has_ended = bool(ids) and ids[-1] in ends
    return [*one_each(ids), ends] if len(ids) < limit and not has_ended else one_each(ids)


def one_each(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Steps with one allowed token each."""
    return [(token,) for token in ids]


def along(choice: ForcedChoice, ends: Sequence[int], repetition_penalty: float) -> dict[str, object]:
    """Arguments for `generate`."""
    return {
        "eos_token_id": list(ends),
        "repetition_penalty": repetition_penalty,
        "do_sample": False,
        "max_new_tokens": choice.num_steps,
        "logits_processor": LogitsProcessorList([choice]),
    }


def processed(processor: Any, messages: Sequence[ChatMessage]) -> BatchFeature:
    """Applies a checkpoint's chat template and processor as the models' docs do."""
    rendered = processor.apply_chat_template(
        [{"role": m.role, "content": [template_part(part) for part in m.content]} for m in messages],
        add_generation_prompt=True,
        tokenize=False,
    )
    parts = [part for message in messages for part in message.content]
    media: dict[str, object] = {}
    if sounds := [heard.samples for part in parts if (heard := _heard(part)) is not None]:
        media["audio"] = sounds
    if pictures := [Image.fromarray(part.pixels) for part in parts if isinstance(part, ImagePart)]:
        media["images"] = pictures
    if videos := [part for part in parts if isinstance(part, VideoPart)]:
        media["videos"] = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos]
        # All frames unchanged.
        media["videos_kwargs"] = {
            "fps": videos[0].fps,
            "do_sample_frames": False,
            "use_audio_in_video": hears_videos(messages),
        }
    inputs: BatchFeature = processor(text=[rendered], return_tensors="pt", **media)
    if videos:
        # transformers knows one rate for all videos of a chat.
        seconds = [processor.video_processor.temporal_patch_size / video.fps for video in videos]
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    return inputs


def moved(inputs: BatchFeature, device: torch.device, dtype: torch.dtype) -> BatchFeature:
    """For a model on `device` and in `dtype`. Positions are computed of the seconds per grid, which keep
    their precision."""
    seconds = inputs.get("video_second_per_grid")
    on_device: BatchFeature = inputs.to(device).to(dtype)
    if seconds is not None:
        on_device["video_second_per_grid"] = seconds
    return on_device


def hears_videos(messages: Sequence[ChatMessage]) -> bool:
    """What transformers calls `use_audio_in_video`: either all videos of a chat have an audio track, or none.

    Raises `ValueError` if some have one and others not, or if they are sampled at different rates.
    """
    videos = [part for message in messages for part in message.content if isinstance(part, VideoPart)]
    has_track = {video.audio is not None for video in videos}
    if len(has_track) > 1:
        raise ValueError("transformers cannot hear some videos of a chat and not others")
    if True in has_track and len({video.fps for video in videos}) > 1:
        raise ValueError("transformers hears all videos of a chat at one rate")
    return True in has_track


def _heard(part: ContentPart) -> AudioPart | None:
    match part:
        case AudioPart():
            return part
        case VideoPart(audio=track):
            return track
        case _:
            return None
