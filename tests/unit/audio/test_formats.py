import pytest

from omni_server.audio.formats import AUDIO_FORMATS, MEDIA_TYPES, parse_format


@pytest.mark.parametrize("name", AUDIO_FORMATS)
def test_every_format_is_known_by_its_own_name(name: str) -> None:
    assert parse_format(name) == name


def test_pcm_is_another_name_of_pcm16() -> None:
    assert parse_format("pcm") == "pcm16"


@pytest.mark.parametrize("name", ["", "m4a", "WAV", "wav ", "pcm24", "ogg"])
def test_other_names_are_no_format(name: str) -> None:
    assert parse_format(name) is None


def test_every_format_has_a_media_type_of_its_own() -> None:
    assert set(MEDIA_TYPES) == set(AUDIO_FORMATS)
    assert len(set(MEDIA_TYPES.values())) == len(AUDIO_FORMATS)
