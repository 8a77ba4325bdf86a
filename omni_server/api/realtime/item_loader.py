"""Loads items that clients write, and decodes their audio and images."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import check_media
from omni_server.api.realtime import client_events as client
from omni_server.api.realtime.audio_format import decode_audio
from omni_server.api.realtime.conversation import MAX_BYTES, Conversation
from omni_server.api.realtime.items import (
    AnswerText,
    AssistantItem,
    CallItem,
    CallOutputItem,
    HeardAudio,
    InputContent,
    Item,
    SeenImage,
    SpokenAudio,
    SystemItem,
    UserItem,
    WrittenText,
    content_bytes,
)
from omni_server.api.realtime.server_events import new_id
from omni_server.api.realtime.session_config import WireFormat
from omni_server.api.schemas import ImageUrlContent, MediaUrl
from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart, MediaKind, ModelInfo


@dataclass(frozen=True)
class ItemLoader:
    media: MediaLoader
    limits: MediaLimits
    model: ModelInfo

    async def load(
        self,
        given: Mapping[str, client.GivenItem | client.ItemReference],
        format: WireFormat,
        param: str,
        conversation: Conversation,
    ) -> list[Item]:
        """Loads items of clients and decodes their media. `given` maps each item's name in errors to the
        item; items may refer to items and calls of `conversation`. `format` is the session's input audio
        format; `param` names all of `given` in errors.

        Raises `InvalidRequestError`, or `OverloadedError` if an image has to wait too long.
        Decodes nothing if there are more media than a prompt holds, and stops when their total size is too
        large.
        """
        check_media(
            (media for name, item in given.items() for media in _media_of(item, name)), self.model, param
        )
        room = _Room(param)
        items: list[Item] = []
        call_ids = conversation.call_ids
        for name, item in given.items():
            if isinstance(item, client.ItemReference):
                found = conversation.find(item.id)
                if found is None:
                    raise InvalidRequestError(f"The item '{item.id}' does not exist.", param=f"{name}.id")
            else:
                found = await self._load(item, format, name, room)
            if isinstance(found, CallItem):
                call_ids.add(found.call_id)
            elif isinstance(found, CallOutputItem) and found.call_id not in call_ids:
                raise InvalidRequestError(  # OpenAI's wording
                    f"Tool call ID '{found.call_id}' not found in conversation.",
                    param=f"{name}.call_id",
                    code="invalid_tool_call_id",
                )
            items.append(found)
        return items

    async def _load(self, given: client.GivenItem, format: WireFormat, param: str, room: "_Room") -> Item:
        item_id = given.id if given.id is not None else new_id("item")
        match given:
            case client.SystemMessage():
                return SystemItem(item_id, [WrittenText(part.text) for part in given.content])
            case client.AssistantMessage():
                return AssistantItem(
                    item_id,
                    [
                        AnswerText(part.text)
                        if isinstance(part, client.OutputText)
                        else SpokenAudio(part.transcript)
                        for part in given.content
                    ],
                )
            case client.UserMessage():
                content: list[InputContent] = []
                for index, part in enumerate(given.content):
                    content.append(await self._user_part(part, format, f"{param}.content[{index}]"))
                    room.take(content[-1])
                return UserItem(item_id, content)
            case client.FunctionCall(name=name, arguments=arguments):
                call_id = given.call_id if given.call_id is not None else new_id("call")
                return CallItem(item_id, call_id, name, arguments)
            case client.FunctionCallOutput(call_id=call_id, output=output):
                return CallOutputItem(item_id, call_id, output)

    async def _user_part(self, part: client.UserContent, format: WireFormat, param: str) -> InputContent:
        match part:
            case client.InputText(text=text):
                return WrittenText(text)
            case client.InputAudio():
                return await self._audio(part, format, f"{param}.audio")
            case client.InputImage(image_url=url):
                image = await self.media.load(
                    ImageUrlContent(type="image_url", image_url=MediaUrl(url=url)), param
                )
                assert isinstance(image, ImagePart)
                return SeenImage(image)

    async def _audio(self, part: client.InputAudio, format: WireFormat, param: str) -> HeardAudio:
        samples = await asyncio.to_thread(decode_audio, part.audio, format, param)
        least_s, most_s = self.limits.min_audio_seconds, self.limits.max_audio_seconds
        if not least_s * format.rate_hz <= len(samples) <= most_s * format.rate_hz:
            raise InvalidRequestError(
                f"Invalid '{param}': {least_s:g} to {most_s:g} s of audio are allowed, "
                f"but it has {len(samples) / format.rate_hz:.2f} s.",
                param=param,
            )
        return HeardAudio(samples, format.rate_hz, part.transcript)


def _media_of(given: client.GivenItem | client.ItemReference, param: str) -> Iterator[tuple[MediaKind, str]]:
    """Yields the kind of each audio and image of `given`, and its name in errors."""
    for index, part in enumerate(given.content if isinstance(given, client.UserMessage) else []):
        if not isinstance(part, client.InputText):
            yield "audio" if isinstance(part, client.InputAudio) else "image", f"{param}.content[{index}]"


@dataclass
class _Room:
    """The remaining memory budget of the item or input that `param` names."""

    param: str
    num_bytes: int = MAX_BYTES

    def take(self, part: InputContent) -> None:
        """Raises `InvalidRequestError` if `part` exceeds the budget."""
        self.num_bytes -= content_bytes(part)
        if self.num_bytes < 0:
            what = self.param.removeprefix("response.")
            raise InvalidRequestError(f"The {what} is larger than a conversation may be.", param=self.param)
