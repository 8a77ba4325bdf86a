"""Prompts with heard videos, made by our processors for vLLM and by the checkpoints' own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.multimodal.processing import BaseMultiModalProcessor

from omni_server.family import AUDIO_TRACK
from omni_server.types import ChatMessage, TextPart
from stages.chat_prompts import PromptRenderer
from stages.forced_reference import processed
from tests.reference.synthetic_media import chirp, heard, sliding_tiles

RATES = (2.0, 1.9, 0.4, 3.7)
"""Frames per second, with which a track of 5 s ends before, with and after the frames."""


def messages(fps: float) -> tuple[ChatMessage, ...]:
    """Other audio before and behind two videos."""
    first, second = sliding_tiles(10, 56, 84, fps), sliding_tiles(6, 56, 84, fps)
    parts = (chirp(0.4, 300), heard(first, chirp(5.03, 600)), chirp(1.2, 500), heard(second, chirp(2.2, 400)))
    return (ChatMessage("user", (*parts, TextPart("Which is louder?"))),)


def ids_of(folder: Path, ours: BaseMultiModalProcessor[Any], chat: Sequence[ChatMessage]) -> list[int]:
    prompt = PromptRenderer(folder, tools_system_prompt=None).render(chat)
    tracks = [video.audio for video in prompt.videos]
    assert all(tracks)
    videos = [
        (video.frames, {AUDIO_TRACK: (track.samples, track.sample_rate_hz)})
        for video, track in zip(prompt.videos, tracks, strict=True)
        if track is not None
    ]
    items = ours.info.parse_mm_data({"audio": list(prompt.audios), "video": videos})
    result = ours(prompt.text, items, hf_processor_mm_kwargs=dict(prompt.processor_kwargs))
    ids: list[int] = result["prompt_token_ids"]
    return ids


def reference_ids(processor: Any, chat: Sequence[ChatMessage]) -> list[int]:
    ids: list[int] = processed(processor, chat)["input_ids"][0].tolist()
    return ids
