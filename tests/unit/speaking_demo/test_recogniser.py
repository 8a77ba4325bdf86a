"""The recogniser by which the demo is judged hears what is there, and nothing else."""

import pytest
import torch

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.codes import Codebook
from scripts.speaking_demo.recogniser import Recogniser, hear, nearest, num_in_order
from scripts.speaking_demo.voice import SPEAKERS, render

SENTENCES = (
    "Every morning the doctor writes a question on the board.",
    "In 1984 my brother was 12, and we sell bread by the sea.",
    "Red, green and blue are the colors of light.",
)
VOICE = SPEAKERS["Chelsie"]


@pytest.fixture(scope="module")
def recogniser(codebook: Codebook) -> Recogniser:
    return Recogniser(codebook, VOICE)


@pytest.fixture(scope="module")
def readings(codebook: Codebook) -> list[torch.Tensor]:
    return [
        render(codebook.envelope(list(vocabulary.read(text))), VOICE, seed)
        for seed, text in enumerate(SENTENCES)
    ]


def share(recogniser: Recogniser, text: str, wave: torch.Tensor) -> float:
    wanted = recogniser.wanted(text)
    return num_in_order(wanted, recogniser.found(hear(wave))) / len(wanted)


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_words_of_the_voice_itself_are_found(
    recogniser: Recogniser, readings: list[torch.Tensor], gain: float
) -> None:
    for text, wave in zip(SENTENCES, readings, strict=True):
        wanted = recogniser.wanted(text)
        found = recogniser.found(hear(gain * wave))
        assert num_in_order(wanted, found) >= 0.95 * len(wanted), found
        assert len(found) <= len(wanted) + 1


def test_words_are_not_found_in_noise_nor_in_silence(recogniser: Recogniser) -> None:
    noise = 0.1 * torch.randn(3 * 24_000, generator=torch.Generator().manual_seed(0))
    for text in SENTENCES:
        assert share(recogniser, text, noise) <= 0.1
    assert recogniser.found(hear(torch.zeros(24_000))) == []
    assert recogniser.found(hear(torch.zeros(0))) == []


def test_words_are_not_found_in_another_sentence(
    recogniser: Recogniser, readings: list[torch.Tensor]
) -> None:
    assert share(recogniser, SENTENCES[0], readings[2]) <= 0.3
    assert share(recogniser, SENTENCES[2], readings[0]) <= 0.3


def test_words_are_not_found_when_they_are_spoken_backwards(
    recogniser: Recogniser, readings: list[torch.Tensor]
) -> None:
    assert share(recogniser, SENTENCES[0], readings[0].flip(0)) <= 0.3


def test_words_that_sound_the_same_count_as_the_same(recogniser: Recogniser) -> None:
    assert recogniser.wanted("sun, too 2!") == recogniser.wanted("son two two")
    assert recogniser.sound_of("red") != recogniser.sound_of("bed")
    assert recogniser.sound_of("a") != recogniser.sound_of("<a>")


def test_a_reading_under_noise_is_nearest_to_itself(readings: list[torch.Tensor]) -> None:
    heard = [hear(reading) for reading in readings]
    generator = torch.Generator().manual_seed(0)
    for index, reading in enumerate(readings):
        noisy = reading + 0.003 * torch.randn(len(reading), generator=generator)
        assert nearest(hear(noisy), heard) == index


@pytest.mark.parametrize(
    ("wanted", "found", "num"),
    [
        ("abc", "abc", 3),
        ("abc", "", 0),
        ("", "abc", 0),
        ("abc", "cba", 1),
        ("abcd", "xaxcd", 3),
        ("aab", "ab", 2),
    ],
)
def test_words_count_in_order(wanted: str, found: str, num: int) -> None:
    assert num_in_order(list(wanted), list(found)) == num
