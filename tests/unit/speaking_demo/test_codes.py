"""Codes that say where in the text they are."""

import torch
from tokenizers import Tokenizer

from scripts.speaking_demo import checkpoint, codes, vocabulary
from scripts.speaking_demo.codes import BLOCKS, LONGEST, NUM_SOUNDS, SILENT_STEPS, STEPS, Codebook
from scripts.speaking_demo.talker import Speech
from scripts.speaking_demo.voice import SPEAKERS, render
from tests.checkpoints.qwen2_5_omni.config import CODES
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds


def with_silence(sounds: tuple[int, ...], block: int = 0) -> tuple[int, ...]:
    return (block,) * SILENT_STEPS + sounds


def test_every_unit_is_spoken(codebook: Codebook) -> None:
    assert set(codebook.units) == set(vocabulary.units())
    for unit, sounds in codebook.units.items():
        assert sounds or unit == vocabulary.NO_PAUSE
        assert all(BLOCKS <= sound < NUM_SOUNDS for sound in sounds), (
            f"{unit} has the sound of a block's silence"
        )


def test_ids_of_all_codes_are_those_that_the_model_has(codebook: Codebook) -> None:
    for unit in codebook.units:
        for token in (0, LONGEST - 1):
            sounds = torch.tensor(with_silence(codebook.units[unit], token // codes.TOKENS))
            ids = codes.to_ids(sounds, torch.full_like(sounds, token), torch.arange(len(sounds)))
            assert ids.min() >= 1
            assert ids.max() < CODES
            assert torch.equal(codes.sounds_of(ids), sounds)
    corner = codes.to_ids(*(torch.tensor([value]) for value in (NUM_SOUNDS - 1, codes.TOKENS - 1, STEPS - 1)))
    assert corner.item() == CODES - 1


def test_unit_and_last_code_decide_the_next(codebook: Codebook) -> None:
    for unit, sounds in codebook.units.items():
        steps = [(sound, step % STEPS) for step, sound in enumerate(with_silence(sounds))]
        assert len(set(steps)) == len(steps), unit


def test_words_that_differ_are_spoken_differently(codebook: Codebook) -> None:
    spoken = [codebook.units[word] for word in ("red", "bed", "yes", "no", "fifteen", "fifty", "hundred")]
    assert len(set(spoken)) == len(spoken)


def test_what_is_rendered_lasts_as_long_as_its_codes(codebook: Codebook) -> None:
    units = list(vocabulary.read("Hello, I am 12."))
    for speaker in SPEAKERS.values():
        wave = render(codebook.envelope(units), speaker)
        assert len(wave) == 480 * len(codebook.sounds(units))
        assert 0.1 < wave.abs().max() < 1


def test_layout_of_the_talker_has_the_sounds_of_the_codebook(
    codebook: Codebook, tokenizer: Tokenizer, layout: tuple[object, TokenIds]
) -> None:
    speech = Speech(codebook, checkpoint.special_tokens(layout[1]))
    for text in ("Hello! I am 12.", "one two three four five six seven eight nine ten " * 13, "Zyx"):
        units = list(vocabulary.read(text))
        sound, token, step = speech.layout(tokenizer.encode(text, add_special_tokens=False).ids)
        assert torch.equal(sound, codebook.sounds(units))
        assert token[-1] == len(units)
        assert torch.equal(torch.where(step == 0)[0], torch.where(token.diff(prepend=torch.tensor([-1])))[0])
