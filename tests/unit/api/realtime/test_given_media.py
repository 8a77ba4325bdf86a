"""Sound and pictures in items that clients write: refused before they could take the server's memory."""

import io
from typing import Any

import pytest
from PIL import Image

from omni_server.api import media_loader
from omni_server.media.image import decode_image
from omni_server.media.limited_process import Cancellation
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart
from tests.unit.api.clients import data_url
from tests.unit.api.fake_generator import MODEL, FakeGenerator
from tests.unit.api.realtime.realtime_client import RealtimeClient, base64_of

SOUND = {"type": "input_audio", "audio": base64_of(bytes(9600))}
BROKEN_PICTURE = {"type": "input_image", "image_url": "data:,broken"}
TEXT = {"type": "input_text", "text": ""}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


def picture(side: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return {"type": "input_image", "image_url": data_url(file.getvalue(), "image/png")}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[ImagePart]:
    """The pictures that have been decoded."""
    found: list[ImagePart] = []

    def noted(data: bytes, limits: MediaLimits, stop: Cancellation) -> ImagePart:
        found.append(decode_image(data, limits, stop))
        return found[-1]

    monkeypatch.setattr(media_loader, "decode_image", noted)
    return found


@pytest.mark.parametrize(("part", "kind"), [(BROKEN_PICTURE, "image"), (SOUND, "audio")])
async def test_an_item_with_more_media_than_a_prompt_holds_is_refused_before_any_is_read(
    part: dict[str, Any], kind: str
) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        error = await client.refused("conversation.item.create", item=user(part, TEXT, part, part))
        assert (error["param"], error["code"]) == ("item", "too_many_media")
        assert error["message"] == f"At most 2 {kind}(s) may be provided in one prompt."


async def test_media_are_counted_over_all_of_a_response_s_input() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        given = [user(BROKEN_PICTURE), user(BROKEN_PICTURE), user(TEXT), user(BROKEN_PICTURE)]
        error = await client.refused("response.create", response={"conversation": "none", "input": given})
        assert (error["param"], error["code"]) == ("response.input", "too_many_media")


async def test_a_kind_that_the_model_lacks_is_refused_before_anything_is_read() -> None:
    model = type(MODEL)(**vars(MODEL) | {"input_modalities": ("image",)})
    async with RealtimeClient(FakeGenerator(model)) as client:
        await client.opened()
        error = await client.refused("conversation.item.create", item=user(BROKEN_PICTURE, SOUND))
        assert (error["param"], error["code"]) == ("item.content[1].type", "unsupported_value")


async def test_decoding_stops_where_an_item_is_too_large(decoded: list[ImagePart]) -> None:
    large = picture(4800)  # 69 MB from a few kB
    async with RealtimeClient() as client:
        await client.opened()
        error = await client.refused("conversation.item.create", item=user(large, large))
        assert (error["param"], error["message"]) == (
            "item",
            "The item is larger than a conversation may be.",
        )
        assert len(decoded) == 1


async def test_decoding_stops_where_a_response_s_input_is_too_large(decoded: list[ImagePart]) -> None:
    model = type(MODEL)(**vars(MODEL) | {"max_media_per_prompt": {"image": 4}})
    half = picture(3500)  # 37 MB
    async with RealtimeClient(FakeGenerator(model)) as client:
        await client.opened()
        error = await client.refused("response.create", response={"input": [user(half)] * 4})
        assert (error["param"], error["message"]) == (
            "response.input",
            "The input is larger than a conversation may be.",
        )
        assert len(decoded) == 2


@pytest.mark.parametrize(
    ("role", "part"),
    [("user", TEXT), ("system", TEXT), ("assistant", {"type": "output_text", "text": ""})],
)
async def test_an_item_has_a_bounded_number_of_parts(role: str, part: dict[str, Any]) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        item = {"type": "message", "role": role, "content": [part] * 257}
        assert (await client.refused("conversation.item.create", item=item))["param"] == "item.content"
        await client.send("conversation.item.create", item=item | {"content": [part] * 256})
        await client.until("conversation.item.done")


async def test_a_response_s_input_has_a_bounded_number_of_items() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        error = await client.refused("response.create", response={"input": [user(TEXT)] * 2001})
        assert error["param"] == "response.input"


async def test_references_are_not_counted_as_new_media() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        for number in range(3):
            await client.send("conversation.item.create", item=user(SOUND) | {"id": f"item_{number}"})
            await client.until("conversation.item.done")
        references = [{"type": "item_reference", "id": f"item_{number}"} for number in range(3)]
        assert (await client.answer({"input": references}))["status"] == "completed"
        assert len(client.generator.last_request.messages) == 2  # the latest, as of the conversation itself
