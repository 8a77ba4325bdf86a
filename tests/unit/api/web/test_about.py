"""What the page learns of the model from its card."""

from dataclasses import replace

from omni_server.types import AboutModel
from tests.unit.api.clients import app_of, http_client
from tests.unit.api.fake_generator import MODEL, FakeGenerator


async def test_card_says_what_the_checkpoint_says_of_itself() -> None:
    generator = FakeGenerator(replace(MODEL, about=AboutModel("A demo.", ("What are you?",))))
    async with http_client(app_of(generator)) as client:
        card = (await client.get("/v1/models/omni")).json()
        listed = (await client.get("/v1/models")).json()["data"]
    about = {"notice": "A demo.", "example_prompts": ["What are you?"], "understands_speech": True}
    assert card["about"] == about
    assert [model["about"] for model in listed] == [about, about]
