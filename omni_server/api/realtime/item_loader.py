"""Items that clients write themselves, with their sound and pictures decoded."""

import asyncio

from omni_server.api.media_loader import MediaLoader
from omni_server.api.realtime import client_events as client
from omni_server.api.realtime.audio_format import decode_audio, rate_of
from omni_server.api.realtime.items import (
    AssistantItem,
    CallItem,
    CallOutputItem,
    HeardAudio,
    Item,
    SeenImage,
    SpokenAudio,
    SystemItem,
    UserItem,
    WrittenText,
)
from omni_server.api.realtime.server_events import new_id
from omni_server.api.realtime.session import WireFormat
from omni_server.api.schemas import ImageUrlContent, MediaUrl
from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart, ModelInfo


class ItemLoader:
    def __init__(self, media: MediaLoader, limits: MediaLimits, model: ModelInfo) -> None:
        self._media = media
        self._limits = limits
        self._model = model

    async def load(self, given: client.GivenItem, format: WireFormat, param: str) -> Item:
        """`format` is the session's for input audio; `param` names `given` in errors.

        Raises `InvalidRequestError`, and `OverloadedError` if no thread became free to decode a picture.
        """
        item_id = given.id if given.id is not None else new_id("item")
        match given:
            case client.SystemMessage():
                return SystemItem(item_id, [WrittenText(part.text) for part in given.content])
            case client.AssistantMessage():
                return AssistantItem(
                    item_id,
                    [
                        WrittenText(part.text) if isinstance(part, client.OutputText) else SpokenAudio(part.transcript)
                        for part in given.content
                    ],
                )
            case client.UserMessage():
                content = [
                    await self._user_part(part, format, f"{param}.content[{index}]")
                    for index, part in enumerate(given.content)
                ]
                return UserItem(item_id, content)
            case client.FunctionCall(name=name, arguments=arguments):
                call_id = given.call_id if given.call_id is not None else new_id("call")
                return CallItem(item_id, call_id, name, arguments)
            case client.FunctionCallOutput(call_id=call_id, output=output):
                return CallOutputItem(item_id, call_id, output)

    async def _user_part(
        self, part: client.InputText | client.InputAudio | client.InputImage, format: WireFormat, param: str
    ) -> WrittenText | HeardAudio | SeenImage:
        match part:
            case client.InputText(text=text):
                return WrittenText(text)
            case client.InputAudio():
                return await self._audio(part, format, param)
            case client.InputImage(image_url=url):
                self._check_kind("image" in self._model.input_modalities, "image", param)
                image = await self._media.load(ImageUrlContent(type="image_url", image_url=MediaUrl(url=url)), param)
                assert isinstance(image, ImagePart)
                return SeenImage(image)

    async def _audio(self, part: client.InputAudio, format: WireFormat, param: str) -> HeardAudio:
        self._check_kind("audio" in self._model.input_modalities, "audio", param)
        samples = await asyncio.to_thread(decode_audio, part.audio, format, f"{param}.audio")
        rate = rate_of(format)
        limits = self._limits
        if not limits.min_audio_seconds * rate <= len(samples) <= limits.max_audio_seconds * rate:
            raise InvalidRequestError(
                f"Invalid '{param}.audio': {limits.min_audio_seconds:g} to {limits.max_audio_seconds:g} s of audio "
                f"are allowed, but it has {len(samples) / rate:.2f} s.",
                param=f"{param}.audio",
            )
        return HeardAudio(samples, rate, part.transcript)

    def _check_kind(self, is_taken: bool, kind: str, param: str) -> None:
        if not is_taken:
            raise InvalidRequestError(
                f"This model does not take {kind} input.", param=f"{param}.type", code="unsupported_value"
            )
