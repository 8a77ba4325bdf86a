"""Turns prompts into token ids, and media into the model's inputs."""

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from vllm.exceptions import VLLMClientError
from vllm.inputs import TextPrompt, TokensPrompt

from omni_server.engine.async_engine import StageAsyncLLM, stage_errors
from omni_server.errors import InvalidRequestError
from omni_server.family import AUDIO_TRACK, SAMPLED_FPS, PlaceholderIds
from omni_server.types import Prompt, PromptTokens, TokenizedPrompt, VideoPart

INLINE_CHARS, _INLINE_PIECES = 2000, 8
"""Text up to this length is tokenised within a millisecond or two, mostly in less than half of one. In a
thread, next to an event loop that is busy with a burst, it would wait for Python's lock instead, up to 5 ms
each time."""


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt after tokenisation and media preprocessing."""

    token_ids: tuple[int, ...]
    engine_input: Any
    """vLLM's own form of the prompt."""
    reply: str | None = None
    """Text of the last `num_reply` tokens: not part of the chat, but the answer that is to be spoken."""
    num_reply: int = 0

    @property
    def length(self) -> int:
        """Tokens of the chat."""
        return len(self.token_ids) - self.num_reply

    def count(self, placeholders: PlaceholderIds) -> PromptTokens:
        """The chat's tokens by kind. `placeholders` are the model's."""
        ids = self.token_ids[: self.length]
        kinds = (placeholders.audio, placeholders.image, placeholders.video)
        media = [0 if token is None else ids.count(token) for token in kinds]
        return PromptTokens(len(ids), len(ids) - sum(media), *media)


class PromptRenderer:
    """Renders with the server-side parts of `engine`: its tokenizer, its processor and their threads."""

    def __init__(self, stage: str, engine: StageAsyncLLM) -> None:
        self._stage = stage
        self._engine = engine
        self._max_model_len: int = engine.model_config.max_model_len

    def check_text(self, num_chars: int) -> None:
        """Rejects more text than `max_model_len` tokens can spell. vLLM would reject it only after rendering.

        Raises `InvalidRequestError`.
        """
        if num_chars > self._max_model_len * self._engine.get_tokenizer().max_chars_per_token:
            raise _prompt_too_long(self._max_model_len)

    async def render(self, prompt: Prompt, reply: str | None = None) -> RenderedPrompt:
        """Tokenises the prompt and preprocesses its media, off the event loop if that takes long. Appends the
        tokens of `reply`.

        Raises `InvalidRequestError` if the prompt is too long, has ids that are no tokens, or media that the
        model cannot process.
        """
        media: dict[str, list[Any]] = {}
        heard = [samples for samples, _ in prompt.audios]
        heard += [video.audio.samples for video in prompt.videos if video.audio is not None]
        # The engine would find NaN in the encoder's output and report its own stage as faulty.
        if not all(np.isfinite(samples).all() for samples in heard):
            raise _invalid_audio("has samples that are not finite numbers")
        if prompt.audios:
            media["audio"] = list(prompt.audios)
        if prompt.images:
            media["image"] = [Image.fromarray(pixels) for pixels in prompt.images]
        if prompt.videos:
            media["video"] = [(video.frames, _metadata(video)) for video in prompt.videos]
        if len(prompt.pieces) > self._max_model_len:  # each is at least one token
            raise context_length_exceeded(self._max_model_len, len(prompt.pieces), "messages")
        renderer = self._engine.renderer
        try:
            with stage_errors(self._stage):
                raw = TokensPrompt(prompt_token_ids=await self._ids_of(prompt, self._max_model_len))
                if not media:
                    (engine_input,) = renderer.render_cmpl([raw])
                else:
                    raw["multi_modal_data"] = media
                    raw["mm_processor_kwargs"] = dict(prompt.processor_kwargs)
                    # vLLM's usual cache sends media once and then only refers to them. It counts rendered
                    # media as sent, so a prompt that is dropped afterwards, or overtaken on its way to the
                    # engine, would spoil the next one with the same media. The other cache keeps the
                    # preprocessed media and sends them every time.
                    (engine_input,) = await renderer.render_cmpl_async([raw], skip_mm_cache=True)
        except VLLMClientError as exc:
            raise _invalid_prompt(exc, self._max_model_len) from exc
        except ValueError as exc:
            if "too short to be represented" in str(exc):  # by the models, and all samples
                raise _invalid_audio("is too short") from exc
            raise
        if media:
            self._check_media(engine_input)
        reply_ids = () if reply is None else self._plain_ids(reply)
        token_ids = (*engine_input["prompt_token_ids"], *reply_ids)
        if len(token_ids) >= self._max_model_len:
            raise context_length_exceeded(self._max_model_len, len(token_ids), "messages")
        if reply_ids:
            engine_input = engine_input | {"prompt_token_ids": list(token_ids)}
        return RenderedPrompt(token_ids, engine_input, reply, len(reply_ids))

    async def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Like `render`, but takes more text than the context has room for."""
        if prompt.audios or prompt.images or prompt.videos:
            token_ids = list((await self.render(prompt)).token_ids)
        else:
            token_ids = await self._ids_of(prompt, None)
        tokenizer = self._engine.get_tokenizer()
        strings = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, token_ids)
        text = prompt.text or await asyncio.to_thread(tokenizer.decode, token_ids)
        return TokenizedPrompt(tuple(token_ids), tuple(string or "" for string in strings), text)

    def _check_media(self, engine_input: Any) -> None:
        """Rejects media that the encoder cache cannot hold; the engine would do so only once the request has
        begun."""
        limit: int = self._engine.input_processor.mm_encoder_cache_size
        for modality, places in engine_input["mm_placeholders"].items():
            num_tokens = max(place.get_num_embeds() for place in places)
            if num_tokens > limit:
                raise InvalidRequestError(
                    f"This server takes media of up to {limit} tokens each, but the {modality} has "
                    f"{num_tokens}.",
                    param="messages",
                    code="media_too_large",
                )

    async def _ids_of(self, prompt: Prompt, limit: int | None) -> list[int]:
        """Returns the tokens of a prompt, none of which spans two pieces.

        vLLM's limits apply to each piece alone. The pieces are therefore tokenised one after another, so that
        other prompts can run in between, and no further than `limit`. Raises `InvalidRequestError`.
        """
        if prompt.token_ids:
            vocab_size: int = self._engine.model_config.get_vocab_size()
            if max(prompt.token_ids) >= vocab_size:
                message = f"Invalid token id: the model has those from 0 to {vocab_size - 1}."
                raise InvalidRequestError(message, param="messages")
            return list(prompt.token_ids)
        renderer, pieces = self._engine.renderer, prompt.pieces or (prompt.text,)
        is_short = len(pieces) <= _INLINE_PIECES and sum(map(len, pieces)) <= INLINE_CHARS
        params = replace(renderer.default_cmpl_tok_params, max_total_tokens=limit)
        inner = replace(params, add_special_tokens=False)
        if not prompt.add_special_tokens:
            params = inner
        token_ids: list[int] = []
        for piece in pieces:
            text = TextPrompt(prompt=piece)
            if is_short:
                tokenised = renderer.tokenize_prompt(text, params)
            else:
                tokenised = await renderer.tokenize_prompt_async(text, params)
            token_ids += tokenised["prompt_token_ids"]
            if limit is not None and len(token_ids) > limit:
                raise _prompt_too_long(limit)
            params = inner
        return token_ids

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of `text`, without special tokens even if the text spells one."""
        tokenizer = self._engine.get_tokenizer()
        spelled = "|".join(re.escape(token) for token in tokenizer.get_added_vocab())
        ids: list[int] = []
        for piece in re.split(f"({spelled})", text) if spelled else [text]:
            # Split after its first character, the text of a special token is not recognised as one.
            parts = (piece[:1], piece[1:]) if spelled and re.fullmatch(spelled, piece) else (piece,)
            for part in parts:
                ids += tokenizer.encode(part, add_special_tokens=False)
        return tuple(ids)


def _metadata(video: VideoPart) -> dict[str, object]:
    """What vLLM passes on with the frames, with its names."""
    num_frames = len(video.frames)
    metadata: dict[str, object] = {
        SAMPLED_FPS: video.fps,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "do_sample_frames": False,
    }
    if video.audio is not None:
        metadata[AUDIO_TRACK] = (video.audio.samples, video.audio.sample_rate_hz)
    return metadata


def context_length_exceeded(limit: int, num_tokens: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model's maximum context length is {limit} tokens, but the request needs {num_tokens}.",
        param=param,
        code="context_length_exceeded",
    )


def _prompt_too_long(limit: int) -> InvalidRequestError:
    """For a prompt whose tokens have not been counted."""
    return InvalidRequestError(
        f"This model's maximum context length is {limit} tokens; the request is longer.",
        param="messages",
        code="context_length_exceeded",
    )


def _invalid_prompt(exc: VLLMClientError, limit: int) -> InvalidRequestError:
    text = str(exc)
    if "maximum model length" in text or "context length" in text:
        return _prompt_too_long(limit)
    return InvalidRequestError(f"The prompt cannot be processed: {exc.args[0]}", param="messages")


def _invalid_audio(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The audio {what}.", param="messages", code="invalid_audio")
