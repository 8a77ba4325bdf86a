"""Token counts of answers, as chats report them."""

from collections.abc import Sequence
from dataclasses import astuple, replace

from pydantic import BaseModel

from omni_server.types import PromptTokens, Usage


class PromptTokensDetails(BaseModel):
    text_tokens: int
    audio_tokens: int
    image_tokens: int
    video_tokens: int
    """Not an OpenAI field: the four counts add up to `prompt_tokens`."""
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    text_tokens: int
    audio_tokens: int
    """Codec frames that became audio."""
    image_tokens: int
    """Not an OpenAI field: squares of 16 x 16 pixels of the images."""
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    """Text tokens, codec frames and image tokens."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def total_usage(usages: Sequence[Usage], num_choices: int | None = None) -> Usage:
    """Adds up all choices: of one prompt, or `num_choices` of each."""
    prompts = [astuple(usage.prompt) for usage in usages[:: num_choices or len(usages)]]
    return replace(
        usages[0],
        prompt=PromptTokens(*map(sum, zip(*prompts, strict=True))),
        text_tokens=sum(usage.text_tokens for usage in usages),
        codec_tokens=sum(usage.codec_tokens for usage in usages),
        image_tokens=sum(usage.image_tokens for usage in usages),
    )


def completion_usage(usage: Usage) -> CompletionUsage:
    completion_tokens = usage.text_tokens + usage.codec_tokens + usage.image_tokens
    return CompletionUsage(
        prompt_tokens=usage.prompt.total,
        completion_tokens=completion_tokens,
        total_tokens=usage.prompt.total + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            text_tokens=usage.prompt.text,
            audio_tokens=usage.prompt.audio,
            image_tokens=usage.prompt.image,
            video_tokens=usage.prompt.video,
            cached_tokens=usage.prompt.cached,
        ),
        completion_tokens_details=CompletionTokensDetails(
            text_tokens=usage.text_tokens,
            audio_tokens=usage.codec_tokens,
            image_tokens=usage.image_tokens,
            reasoning_tokens=0,
            accepted_prediction_tokens=0,
            rejected_prediction_tokens=0,
        ),
    )
