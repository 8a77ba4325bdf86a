"""The conversation: its items, truncation, and what the model reads of it."""

from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_server.errors import InvalidRequestError
from omni_server.generation import Deliver
from omni_server.types import AudioDelta, AudioPart, ImagePart, TextDelta, TextPart
from tests.unit.api.clients import data_url, media
from tests.unit.api.fake_generator import (
    TEXT,
    FakeGenerator,
    ScriptEntry,
    finished,
)
from tests.unit.api.realtime.answers import MANUAL
from tests.unit.api.realtime.realtime_client import (
    RealtimeClient,
    base64_of,
    voice,
)


async def test_the_conversation_becomes_the_prompt() -> None:
    async with RealtimeClient() as client:
        await client.opened(instructions="Be brief.", audio=MANUAL)
        system = [{"type": "input_text", "text": "It is Monday."}]
        await client.send(
            "conversation.item.create", item={"type": "message", "role": "system", "content": system}
        )
        await client.append(voice(0.5))
        await client.send("input_audio_buffer.commit")
        await client.answer()
        await client.say("And now?")
        await client.answer({"output_modalities": ["text"]})
        messages = client.generator.last_request.messages
        assert [message.role for message in messages] == ["system", "system", "user", "assistant", "user"]
        assert messages[0].content == (TextPart("Be brief."),)
        heard = messages[2].content[0]
        assert isinstance(heard, AudioPart)
        assert heard.sample_rate_hz == 24_000
        assert np.abs(heard.samples - voice(0.5)).max() < 1e-4
        assert messages[3].content == (TextPart(TEXT),)
        assert messages[4].content == (TextPart("And now?"),)


async def test_items_of_all_kinds_can_be_written_by_the_client() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        picture = {"type": "input_image", "image_url": data_url(media("shapes.png"), "image/png")}
        pcm = np.rint(voice(0.2) * 32767).astype("<i2").tobytes()
        sound = {"type": "input_audio", "audio": base64_of(pcm), "transcript": "hum"}
        await client.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": [picture, sound]}
        )
        await client.until("conversation.item.done")
        said = [{"type": "output_text", "text": "A hum."}, {"type": "output_audio", "transcript": "I hear."}]
        await client.send(
            "conversation.item.create", item={"type": "message", "role": "assistant", "content": said}
        )
        await client.until("conversation.item.done")
        await client.answer()
        user, assistant = client.generator.last_request.messages
        assert isinstance(user.content[0], ImagePart)
        assert isinstance(user.content[1], AudioPart)
        assert assistant.content == (TextPart("A hum."), TextPart("I hear."))


async def test_items_are_put_found_and_deleted_by_id() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        last = await client.say("last")
        content = [{"type": "input_text", "text": "first"}]
        item = {"type": "message", "role": "user", "id": "first", "content": content}
        await client.send("conversation.item.create", item=item, previous_item_id="root")
        assert (await client.next())["previous_item_id"] is None
        await client.next()
        await client.send("conversation.item.create", item=item | {"id": "second"}, previous_item_id="first")
        assert (await client.next())["previous_item_id"] == "first"
        await client.next()
        assert (await client.refused("conversation.item.create", item=item))["param"] == "item.id"
        error = await client.refused(
            "conversation.item.create", item=item | {"id": "x"}, previous_item_id="nothing"
        )
        assert error["param"] == "previous_item_id"
        await client.send("conversation.item.retrieve", item_id="first")
        assert (await client.next())["item"]["content"][0]["text"] == "first"
        await client.send("conversation.item.delete", item_id="second")
        assert (await client.next())["item_id"] == "second"
        for kind, code in (
            ("retrieve", "item_retrieve_invalid_item_id"),
            ("delete", "item_delete_invalid_item_id"),
        ):
            error = await client.refused(f"conversation.item.{kind}", item_id="second")
            assert error["code"] == code
        await client.answer()
        texts = [message.content for message in client.generator.last_request.messages]
        assert texts == [(TextPart("first"),), (TextPart("last"),)]
        assert last != "first"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "mcp_approval_response"}, "item.type"),
        ({"type": "function_call_output", "output": ""}, "item.call_id"),
        ({"type": "message", "role": "tool", "content": []}, "item.role"),
        ({"type": "message", "role": "user", "content": []}, "item.content"),
        (
            {"type": "message", "role": "user", "content": [{"type": "text", "text": ""}]},
            "item.content[0].type",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]},
            "item.content[0].audio",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]},
            "item.content[0].image_url.url",
        ),
    ],
)
async def test_a_bad_item_is_refused(item: dict[str, Any], param: str) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        assert (await client.refused("conversation.item.create", item=item))["param"] == param


async def test_truncating_cuts_what_the_model_reads_later() -> None:
    script: list[ScriptEntry] = [
        TextDelta("one two three four", (1,)),
        AudioDelta(0, voice(1)),
    ]
    async with RealtimeClient(FakeGenerator(script=[*script, finished(codec_tokens=1)])) as client:
        await client.opened()
        item_id = (await client.answer())["output"][0]["id"]
        await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=500)
        event = await client.next()
        assert event["type"] == "conversation.item.truncated"
        assert (event["item_id"], event["content_index"], event["audio_end_ms"]) == (item_id, 0, 500)
        await client.answer()
        assert client.generator.last_request.messages[0].content == (TextPart("one two"),)


async def test_truncating_what_cannot_be_truncated() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        user_id = await client.say("hi")
        item_id = (await client.answer())["output"][0]["id"]
        truncate: dict[str, Any] = {"type": "conversation.item.truncate", "content_index": 0}
        error = await client.refused(**truncate, item_id="nothing", audio_end_ms=1)
        assert error["code"] == "item_truncate_invalid_item_id"
        assert (await client.refused(**truncate, item_id=user_id, audio_end_ms=1))["param"] == "content_index"
        error = await client.refused(**truncate, item_id=item_id, audio_end_ms=5000)
        assert error["message"] == "Audio content of 292ms is already shorter than 5000ms"
        assert error["param"] == "audio_end_ms"
        await client.send(**truncate, item_id=item_id, audio_end_ms=300)  # a player's rounding
        assert (await client.next())["type"] == "conversation.item.truncated"
        error = await client.refused(**truncate, item_id=item_id, audio_end_ms=100)
        assert error["code"] == "item_already_truncated"


class Small(FakeGenerator):
    """Takes conversations of up to four messages."""

    async def submit(self, request: Any, deliver: Deliver) -> Any:
        if len(request.messages) > 4:
            self.requests.append(request)
            raise InvalidRequestError("too long", code="context_length_exceeded")
        return await super().submit(request, deliver)


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns() -> None:
    async with RealtimeClient(Small()) as client:
        await client.opened(instructions="Be brief.")
        for number in range(8):
            await client.say(str(number))
        assert (await client.answer())["status"] == "completed"
        texts = [message.content for message in client.generator.last_request.messages]
        assert texts[0] == (TextPart("Be brief."),)
        assert texts[-1] == (TextPart("7"),)
        await client.send("session.update", session={"type": "realtime", "truncation": "disabled"})
        details = (await client.answer())["status_details"]
        assert details["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_turns_are_lost_for_the_room_that_an_answer_may_need_while_there_are_older_ones(
    truncation: str,
) -> None:
    async with RealtimeClient(Small()) as client:
        await client.opened(truncation=truncation)
        for number in range(2):
            await client.say(str(number))
            await client.answer()
        first, second = client.generator.requests
    assert not first.can_be_shortened
    assert second.can_be_shortened == (truncation == "auto")


@pytest.mark.parametrize(
    ("truncation", "outcome", "reason", "heard_s"),
    [("auto", "ok", "stop", 0.5), ("disabled", "error", "context_length_exceeded", 1.0)],
)
async def test_an_answer_to_a_conversation_that_is_too_long_is_counted_once(
    truncation: str, outcome: str, reason: str, heard_s: float
) -> None:
    """With the audio of the last prompt that was tried."""
    async with RealtimeClient(Small()) as client:
        await client.opened(audio=MANUAL, truncation=truncation)
        for number in range(8):
            if number in (0, 6):
                await client.append(voice(0.5))
                await client.send("input_audio_buffer.commit")
                await client.until("conversation.item.done")
            else:
                await client.say(str(number))
        await client.answer()
    families = text_string_to_metric_families(client.state.metrics.text().decode())
    samples = [sample for family in families for sample in family.samples]
    ended = [(sample.labels, sample.value) for sample in samples if sample.name == "omni_requests_total"]
    assert ended == [({"outcome": outcome, "reason": reason}, 1)]
    (heard,) = [sample.value for sample in samples if sample.name == "omni_audio_input_seconds_total"]
    assert heard == pytest.approx(heard_s)
    assert [sample.value for sample in samples if sample.name == "omni_requests_running"] == [0]
