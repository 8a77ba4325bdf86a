"""Names of voices."""

from dataclasses import replace
from typing import Any

import pytest

from omni_server.api.voices import OPENAI_VOICES, resolve_voice
from omni_server.types import SpeechOutput
from tests.unit.api.clients import request_for
from tests.unit.api.fake_generator import MODEL


@pytest.mark.parametrize("voice", ["Ethan", "ethan", "ETHAN", {"id": "Ethan"}])
async def test_voice_is_found_in_every_spelling(voice: Any) -> None:
    request = await request_for(modalities=["text", "audio"], audio={"voice": voice, "format": "wav"})
    assert request.speech == SpeechOutput("Ethan")


def test_alloy_is_the_default_voice() -> None:
    assert resolve_voice("alloy", MODEL) == "Chelsie"
    assert resolve_voice("Alloy", replace(MODEL, default_voice="Ethan")) == "Ethan"


def test_every_openai_voice_stands_for_one_of_the_models_and_all_are_used() -> None:
    resolved = {name: resolve_voice(name, MODEL) for name in OPENAI_VOICES}
    assert set(resolved.values()) == {"Chelsie", "Ethan"}
    assert resolved == {name: resolve_voice(name, MODEL) for name in OPENAI_VOICES}


def test_voice_of_the_model_comes_before_the_alias() -> None:
    assert resolve_voice("echo", replace(MODEL, voices=("Chelsie", "Ethan", "Echo"))) == "Echo"
