"""Prompts of Qwen3-TTS, row by row, as the reference builds them."""

from dataclasses import replace

import msgspec
import pytest

from omni_server.family.speech_text import SpeechPrompt
from stages.qwen3_tts.checkpoint_config import CheckpointConfig
from stages.qwen3_tts.layout import FRAME, NONE, VECTOR, PromptRows, Speaking, Voice, speech_prompt
from tests.unit.stages.qwen3_tts.checkpoint import CONFIG

PAD, BOS, EOS = CONFIG["tts_pad_token_id"], CONFIG["tts_bos_token_id"], CONFIG["tts_eos_token_id"]
CODEC_PAD, CODEC_BOS = 2148, 2149
THINK, NOTHINK, THINK_BOS, THINK_EOS = 2154, 2155, 2156, 2157
ENGLISH, SERENA = 2050, 3066
ROLE, TEXT = (1, 2, 3), (11, 12, 13, 14)
ROLE_ROWS = [(1, NONE), (2, NONE), (3, NONE)]
MODEL_CHOOSES = [(PAD, NOTHINK), (PAD, THINK_BOS), (PAD, THINK_EOS)]
IN_ENGLISH = [(PAD, THINK), (PAD, THINK_BOS), (PAD, ENGLISH), (PAD, THINK_EOS)]
BEGIN = [(BOS, CODEC_PAD)]


def config_with(**changes: int) -> CheckpointConfig:
    """With other ids in `talker_config`."""
    talker = {**CONFIG["talker_config"], **changes}
    return msgspec.convert({**CONFIG, "talker_config": talker}, CheckpointConfig)


def laid_out(
    speaking: Speaking,
    text: tuple[int, ...] = TEXT,
    *,
    is_complete: bool = True,
    config: CheckpointConfig | None = None,
) -> SpeechPrompt:
    return speech_prompt(config or config_with(), ROLE, speaking, text, is_complete=is_complete)


def decoded(prompt: SpeechPrompt) -> PromptRows:
    return msgspec.msgpack.decode(prompt.rows, type=PromptRows)


def rows_of(prompt: SpeechPrompt) -> list[tuple[int, int]]:
    rows = decoded(prompt)
    return list(zip(rows.text, rows.codec, strict=True))


def clone(num_frames: int, num_text: int) -> Voice:
    """Of a recording of so many frames, in which so many tokens are said."""
    frames = bytes(range(num_frames)) * 32
    return Voice(vector=b"vector", frames=frames, text_ids=tuple(range(21, 21 + num_text)))


SPEAKINGS = {
    "a voice in the model's language": (
        Speaking(Voice(SERENA)),
        [*ROLE_ROWS, *MODEL_CHOOSES, (PAD, SERENA), *BEGIN],
    ),
    "a voice in English": (
        Speaking(Voice(SERENA), ENGLISH),
        [*ROLE_ROWS, *IN_ENGLISH, (PAD, SERENA), *BEGIN],
    ),
    "no voice": (
        Speaking(Voice(), ENGLISH),
        [*ROLE_ROWS, *IN_ENGLISH, *BEGIN],
    ),
    "instructions": (
        Speaking(Voice(SERENA), None, (31, 32)),
        [(31, NONE), (32, NONE), *ROLE_ROWS, *MODEL_CHOOSES, (PAD, SERENA), *BEGIN],
    ),
    "the vector of a voice": (
        Speaking(Voice(vector=b"vector"), ENGLISH),
        [*ROLE_ROWS, *IN_ENGLISH, (PAD, VECTOR), *BEGIN],
    ),
}


@pytest.mark.parametrize("case", SPEAKINGS)
def test_with_the_text_first_all_of_it_is_in_the_prompt(case: str) -> None:
    speaking, begin = SPEAKINGS[case]
    prompt = laid_out(speaking)
    text = [(11, CODEC_PAD), (12, CODEC_PAD), (13, CODEC_PAD), (14, CODEC_PAD), (EOS, CODEC_PAD)]
    assert rows_of(prompt) == [*begin, *text, (PAD, CODEC_BOS)]
    assert (prompt.text_ids, prompt.tail_ids) == ((), (PAD,))
    assert prompt.token_ids == (CODEC_PAD,) * len(rows_of(prompt))  # never sampled
    assert decoded(prompt).vector == speaking.voice.vector


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("case", SPEAKINGS)
def test_otherwise_one_token_is_in_the_prompt_and_one_follows_with_each_frame(
    case: str, is_complete: bool
) -> None:
    speaking, begin = SPEAKINGS[case]
    prompt = laid_out(replace(speaking, is_text_first=False), is_complete=is_complete)
    assert rows_of(prompt) == [*begin, (11, CODEC_BOS)]
    assert (prompt.text_ids, prompt.tail_ids) == ((12, 13, 14), (EOS, PAD))


def test_a_cloned_recording_comes_after_all_text() -> None:
    voice = clone(num_frames=2, num_text=3)
    prompt = laid_out(Speaking(voice))
    told = (21, 22, 23, *TEXT, EOS)
    assert rows_of(prompt) == [
        *ROLE_ROWS,
        *MODEL_CHOOSES,
        (PAD, VECTOR),
        *BEGIN,
        *[(token, CODEC_PAD) for token in told],
        (PAD, CODEC_BOS),
        (PAD, FRAME),
        (PAD, FRAME),
    ]
    assert (prompt.text_ids, prompt.tail_ids) == ((), (PAD,))
    assert (decoded(prompt).vector, decoded(prompt).frames) == (voice.vector, voice.frames)


@pytest.mark.parametrize(
    ("num_frames", "in_prompt", "following", "tail"),
    [
        (3, (21, 22, 11, 12), (13, 14), (EOS, PAD)),
        (5, (21, 22, *TEXT), (), (EOS, PAD)),
        (6, (21, 22, *TEXT, EOS), (), (PAD,)),
        (8, (21, 22, *TEXT, EOS, PAD, PAD), (), (PAD,)),
    ],
    ids=["longer text", "equal but for the end", "equal", "longer recording"],
)
def test_otherwise_text_and_recording_begin_together(
    num_frames: int, in_prompt: tuple[int, ...], following: tuple[int, ...], tail: tuple[int, ...]
) -> None:
    prompt = laid_out(Speaking(clone(num_frames, num_text=2), is_text_first=False))
    begin = [*ROLE_ROWS, *MODEL_CHOOSES, (PAD, VECTOR), *BEGIN]
    codec = (CODEC_BOS, *[FRAME] * num_frames)
    assert rows_of(prompt) == [*begin, *zip(in_prompt, codec, strict=True)]
    assert (prompt.text_ids, prompt.tail_ids) == (following, tail)


@pytest.mark.parametrize("voice", [Voice(SERENA), clone(3, 2), clone(5, 2), clone(2, 3)])
def test_as_soon_as_there_is_enough_text_the_prompt_is_that_of_the_whole(voice: Voice) -> None:
    speaking = Speaking(voice, ENGLISH, is_text_first=False)
    whole = laid_out(speaking)
    num_enough = next(number for number in range(len(TEXT) + 1) if speaking.has_enough(number))
    for number in range(num_enough, len(TEXT) + 1):
        part = laid_out(speaking, TEXT[:number], is_complete=False)
        assert part.rows == whole.rows
        assert part.text_ids + TEXT[number:] == whole.text_ids
        assert part.tail_ids == whole.tail_ids


@pytest.mark.parametrize(
    ("speaking", "num_needed"),
    [
        (Speaking(Voice(SERENA), is_text_first=False), 1),
        (Speaking(clone(2, 3), is_text_first=False), 1),
        (Speaking(clone(5, 2), is_text_first=False), 4),
        (Speaking(Voice(SERENA)), None),
    ],
)
def test_the_text_that_a_prompt_needs(speaking: Speaking, num_needed: int | None) -> None:
    enough = [number for number in range(100) if speaking.has_enough(number)]
    assert enough == ([] if num_needed is None else list(range(num_needed, 100)))


def test_ids_come_from_the_config() -> None:
    names = ("codec_pad_id", "codec_bos_id", "codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id")
    other = config_with(**{name: 900 + i for i, name in enumerate(names)})
    prompt = laid_out(Speaking(Voice(7)), config=other)
    text = [900] * (len(TEXT) + 1)
    assert decoded(prompt).codec == (NONE, NONE, NONE, 902, 903, 904, 7, 900, *text, 901)
    in_a_language = laid_out(Speaking(Voice(), 5), config=config_with(codec_think_id=905))
    assert decoded(in_a_language).codec[3:7] == (905, THINK_BOS, 5, THINK_EOS)
