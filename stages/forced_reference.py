"""What the families' references share: transformers, decoding greedily but forced along this server's answer.

It is forced token by token and records every step at which it would have chosen another token. Forcing
changes nothing as long as it agrees, so no difference means equal answers. After a first difference, where
two free generations would have nothing in common any more, the comparison continues.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature, LogitsProcessor, LogitsProcessorList

from omni_server.reference import Difference
from omni_server.types import AudioPart, ChatMessage, ContentPart, ImagePart, VideoPart
from stages.chat_prompts import template_part


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


def along(choice: ForcedChoice, repetition_penalty: float) -> dict[str, object]:
    """Arguments for `generate`."""
    return {
        "repetition_penalty": repetition_penalty,
        "do_sample": False,
        "max_new_tokens": choice.num_steps,
        "logits_processor": LogitsProcessorList([choice]),
    }


def prefixed(prefix: str, arguments: dict[str, object]) -> dict[str, object]:
    """Arguments for the whole model's `generate`, which hands them to one of its parts."""
    return {f"{prefix}_{name}": value for name, value in arguments.items()}


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
    """For a model on `device` and in `dtype`. Positions are computed of the seconds per grid, which keep their
    precision."""
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
