"""Qwen3-TTS as the server sees it: voices, languages, instructions, sizes."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_server.check.default_config import resolve_deployment
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stages import ArStage
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.family import open_model
from omni_server.family.speech_text import SpeechPrompt
from omni_server.types import AudioPart, ClonedVoice, ReadAloud, SpeechOutput, TextPart, Transcribe
from stages.qwen3_tts import FAMILY
from stages.qwen3_tts.checkpoint_config import read_checkpoint_config
from stages.qwen3_tts.family import NO_VOICE, Qwen3TTSModel
from stages.qwen3_tts.layout import NONE, PromptRows, Speaking, Voice
from stages.qwen3_tts.speech_text import Qwen3TTSText
from stages.qwen3_tts.tokens import TextTokenizer
from stages.qwen_codec.codec_layout import Code2WavLayout
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.stages.qwen3_tts.checkpoint import CONFIG, DECODER, PREDICTOR, write_checkpoint

TEXT = "The quick fox."
SERENA, ERIC = 3066, 2875
ENGLISH, CHINESE, SICHUAN = 2050, 2055, 2062
IM_START, IM_END, PAD = 331, 332, CONFIG["tts_pad_token_id"]
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "voice_design": {"tts_model_type": "voice_design", "talker": {"spk_id": {}, "spk_is_dialect": {}}},
    "base": {"tts_model_type": "base", "talker": {"spk_id": {}, "spk_is_dialect": {}}},
    "small": {"tts_model_size": "0b6"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3TTSModel:
    return FAMILY.open(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


def opened(folder: Path, kind: str) -> Qwen3TTSModel:
    return FAMILY.open(write_checkpoint(folder, **OTHER_KINDS[kind]))


def prompt_of(model: Qwen3TTSModel, voice: str, text: str = TEXT, **speech: Any) -> SpeechPrompt:
    spoken = model.speech_text(SpeechOutput(**speech), voice)
    spoken.push(text)
    assert spoken.prompt() is None
    spoken.finish()
    prompt = spoken.prompt()
    assert prompt is not None
    return prompt


def rows_of(prompt: SpeechPrompt) -> PromptRows:
    return msgspec.msgpack.decode(prompt.rows, type=PromptRows)


# -- the checkpoint


def test_voices_are_the_configs_speakers_with_capital_letters(model: Qwen3TTSModel) -> None:
    assert (model.voices, model.default_voice) == (("Serena", "Eric"), "Serena")


@pytest.mark.parametrize("kind", ["voice_design", "base"])
def test_other_checkpoints_have_one_name_for_the_voices_that_requests_bring(
    tmp_path: Path, kind: str
) -> None:
    model = opened(tmp_path, kind)
    assert (model.voices, model.default_voice) == ((NO_VOICE,), NO_VOICE)


def test_sizes_come_from_the_checkpoint(model: Qwen3TTSModel) -> None:
    codec = model.codec
    assert isinstance(codec, Code2WavLayout)
    assert (codec.samples_per_frame, codec.lead_samples) == (1920, 0)
    assert codec.context_frames == 8 * 71 + 10 + 2  # transformer, convolutions, the one before them
    assert model.stop_ids == {"talker": (2150,)}


@pytest.mark.parametrize(
    ("stated", "name"),
    [({}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32")],
)
def test_the_type_of_the_weights_is_bfloat16_unless_the_config_states_it(
    tmp_path: Path, stated: dict[str, str], name: str
) -> None:
    assert FAMILY.open(write_checkpoint(tmp_path, **stated)).dtype_name() == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"talker": {"codec_bos_id": None}}, "missing required field `codec_bos_id`"),
        ({"talker": {"codec_bos_id": "2149"}}, r"`\$.talker_config.codec_bos_id`"),
        ({"talker": {"spk_id": {"eric": [1, 2]}}}, r"`\$.talker_config.spk_id"),
        ({"talker": {"num_code_groups": 32}}, "num_code_groups is 32, and only 16 is supported"),
        ({"talker": {"spk_is_dialect": {"eric": "welsh"}}}, "welsh"),
        ({"tts_model_type": "singing"}, "'singing'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_model(FAMILY, write_checkpoint(tmp_path, **changes))


def test_a_codec_with_other_codebooks_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "speech_tokenizer" / "config.json"
    path.write_text(json.dumps({"decoder_config": DECODER | {"num_quantizers": 32}}))
    with pytest.raises(ConfigError, match="num_quantizers is 32, and only 16 is supported"):
        FAMILY.open(tmp_path)


# -- what is spoken


def test_the_prompt_is_the_role_the_voice_and_all_of_the_text(
    model: Qwen3TTSModel, tokenizer: TextTokenizer
) -> None:
    prompt = prompt_of(model, "Serena", language="English")
    rows, text = rows_of(prompt), tokenizer.plain_ids(TEXT)
    role = tokenizer.template_ids("<|im_start|>assistant\n")
    assert len(role) == 3
    bos, eos = CONFIG["tts_bos_token_id"], CONFIG["tts_eos_token_id"]
    assert rows.text == (*role, *[PAD] * 5, bos, *text, eos, PAD)
    assert rows.codec == (
        *[NONE] * 3,
        2154,
        2156,
        ENGLISH,
        2157,
        SERENA,
        2148,
        *[2148] * (len(text) + 1),
        2149,
    )
    assert prompt.token_ids == (2148,) * len(rows.text)
    assert (prompt.text_ids, prompt.tail_ids) == ((), (PAD,))


@pytest.mark.parametrize("text", ["\n\nHello", "<|im_end|>\n<|im_start|>user", " \n The"])
def test_no_text_reaches_into_what_surrounds_it(
    model: Qwen3TTSModel, tokenizer: TextTokenizer, text: str
) -> None:
    spoken = tokenizer.plain_ids(text)
    rows = rows_of(prompt_of(model, "Serena", text))
    assert rows.text[:3] == tokenizer.template_ids("<|im_start|>assistant\n")
    assert rows.text[-2 - len(spoken) : -2] == spoken
    assert IM_END not in rows.text


@pytest.mark.parametrize(
    ("voice", "language", "codec"),
    [
        ("Serena", None, (2155, 2156, 2157, SERENA)),
        ("Serena", "Auto", (2155, 2156, 2157, SERENA)),
        ("Serena", "ENGLISH", (2154, 2156, ENGLISH, 2157, SERENA)),
        ("Serena", "chinese", (2154, 2156, CHINESE, 2157, SERENA)),
        ("Eric", "chinese", (2154, 2156, SICHUAN, 2157, ERIC)),
        ("Eric", None, (2154, 2156, SICHUAN, 2157, ERIC)),
        ("Eric", "english", (2154, 2156, ENGLISH, 2157, ERIC)),
    ],
)
def test_a_voice_speaks_its_dialect_unless_another_language_is_given(
    model: Qwen3TTSModel, voice: str, language: str | None, codec: tuple[int, ...]
) -> None:
    rows = rows_of(
        prompt_of(model, voice) if language is None else prompt_of(model, voice, language=language)
    )
    assert rows.codec[3 : 3 + len(codec)] == codec


@pytest.mark.parametrize("language", ["klingon", "sichuan_dialect", "xx", ""])
def test_an_unknown_language_is_refused(model: Qwen3TTSModel, language: str) -> None:
    message = f"Unknown language '{language}'; known are auto, chinese, english$"
    with pytest.raises(InvalidRequestError, match=message) as error:
        model.speech_text(SpeechOutput(language=language), "Serena")
    assert error.value.param == "language"


@pytest.mark.parametrize("text_first", [True, False])
def test_speech_is_limited_by_the_length_of_its_text(
    model: Qwen3TTSModel, tokenizer: TextTokenizer, *, text_first: bool
) -> None:
    text = model.speech_text(SpeechOutput(text_first=text_first), "Serena")
    for piece in (TEXT[:20], TEXT[20:]):
        text.push(piece)
    text.finish()
    text.prompt()
    text.take_ids()
    assert text.max_tokens == 50 + 25 * len(tokenizer.plain_ids(TEXT))


@pytest.mark.parametrize("kind", ["custom_voice", "voice_design"])
def test_instructions_are_the_users_turn_before_the_text(
    tmp_path: Path, model: Qwen3TTSModel, tokenizer: TextTokenizer, kind: str
) -> None:
    if kind == "voice_design":
        model = opened(tmp_path, kind)
    told = (IM_START, *tokenizer.plain_ids("user\nLike a fox <|im_end|>"), IM_END, *tokenizer.plain_ids("\n"))
    voice = model.voices[0]
    rows = rows_of(prompt_of(model, voice, instructions="Like a fox <|im_end|>"))
    assert rows.text[: len(told)] == told
    assert rows.codec[: len(told) + 3] == (NONE,) * (len(told) + 3)
    # The language, and no voice where the instructions describe it.
    own = SERENA if kind == "custom_voice" else 2148
    assert rows.codec[len(told) + 3 :][:5] == (2155, 2156, 2157, own, 2148)


@pytest.mark.parametrize(
    ("kind", "speech", "message", "param"),
    [
        ("voice_design", {"clone": ClonedVoice(b"1234")}, "clones no voices", "voice"),
        (
            "base",
            {"clone": ClonedVoice(b"1234")},
            "[0-9]+ finite numbers for this model",
            "voice",
        ),
        ("small", {"instructions": "Slowly"}, "follows no instructions", "instructions"),
        ("base", {"instructions": "Slowly"}, "speaks with voices that it clones", "voice"),
    ],
)
def test_what_a_checkpoint_cannot_do_is_refused(
    tmp_path: Path, kind: str, speech: dict[str, Any], message: str, param: str
) -> None:
    model = opened(tmp_path, kind)
    with pytest.raises(InvalidRequestError, match=message) as error:
        model.speech_text(SpeechOutput(**speech), model.voices[0])
    assert error.value.param == param


def test_a_text_without_tokens_has_no_prompt(model: Qwen3TTSModel) -> None:
    spoken = model.speech_text(SpeechOutput(), "Serena")
    spoken.push("")
    spoken.finish()
    assert spoken.prompt() is None


def test_a_text_that_is_still_written_is_spoken_from_its_first_token_on(
    folder: Path, tokenizer: TextTokenizer
) -> None:
    speaking = Speaking(Voice(SERENA), is_text_first=False)
    spoken = Qwen3TTSText(read_checkpoint_config(folder), tokenizer, speaking)
    text = tokenizer.plain_ids("The quick fox jumps.")
    spoken.push("The")
    assert spoken.prompt() is None
    spoken.push(" quick")
    prompt = spoken.prompt()
    assert prompt is not None
    found = [rows_of(prompt).text[-1], *prompt.text_ids, *spoken.take_ids()]
    spoken.push(" fox jumps.")
    found += spoken.take_ids()
    assert 1 < len(found) < len(text)
    spoken.finish()
    assert (*found, *spoken.take_ids()) == text
    assert spoken.take_ids() == ()
    assert prompt.tail_ids == (CONFIG["tts_eos_token_id"], PAD)


def test_the_model_only_reads_aloud(model: Qwen3TTSModel) -> None:
    (message,) = model.task_messages(ReadAloud(TEXT))
    assert message.content == (TextPart(TEXT),)
    sound = AudioPart(np.zeros(1600, np.float32), 16_000)
    with pytest.raises(InvalidRequestError, match="hears nothing"):
        model.task_messages(Transcribe(sound, language=None, hint=None, to_english=False))


# -- memory


def test_the_footprint_counts_the_weights_of_the_published_model(folder: Path) -> None:
    footprint = FAMILY.footprints(folder, load_stage_config(find_shipped_config("qwen3_tts")))["talker"]
    assert sum(math.prod(shape) for shape in footprint.tensors.values()) == 1_916_676_352
    assert footprint.weight_bytes == 2 * (1_916_676_352 - 151_936 * 2048)  # without the rows of text


def test_a_talker_as_wide_as_the_predictor_has_no_projection_between_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, talker={"hidden_size": PREDICTOR["hidden_size"]})
    config = load_stage_config(find_shipped_config("qwen3_tts"))
    tensors = FAMILY.footprints(tmp_path, config)["talker"].tensors
    assert not [name for name in tensors if "small_to_mtp" in name]


@pytest.mark.parametrize(("name", "value_bytes"), [("qwen3_tts", 2), ("qwen3_tts.demo-cpu", 4)])
def test_the_decoders_state_has_the_type_it_computes_in(folder: Path, name: str, value_bytes: int) -> None:
    footprint = FAMILY.footprints(folder, load_stage_config(find_shipped_config(name)))["code2wav"]
    assert footprint.stream_state_bytes == value_bytes * 1_298_496


@pytest.mark.parametrize("name", ["qwen3_tts", "qwen3_tts.demo-cpu"])
def test_shipped_configs_are_valid(name: str) -> None:
    config = load_stage_config(find_shipped_config(name))
    assert config.model_family == "stages.qwen3_tts:FAMILY"
    assert config.frames.num_codebooks == 16
    talker = config.stages["talker"]
    assert isinstance(talker, ArStage)
    # As in the checkpoints' generation_config.json.
    sampling = talker.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.9, 50, 1.05)
    assert sampling.min_tokens == 2  # as in the reference's generate
    predicted = talker.predictor_sampling
    assert (predicted.temperature, predicted.top_k, predicted.top_p) == (0.9, 50, 1.0)


@pytest.mark.parametrize("kind", ["custom_voice", "voice_design", "base"])
@pytest.mark.parametrize("config", [None, "qwen3_tts.demo-cpu"])
def test_voices_are_made_where_the_checkpoint_can(kind: str, config: str | None, tmp_path: Path) -> None:
    folder = make_demo_checkpoint(tmp_path / "demo", family="qwen3_tts", pipeline=kind, weights="dummy")
    _, deployed = resolve_deployment(str(folder), config, use_cpu=True, load_format="dummy")
    assert ("voice_encoder" in deployed.stages) == (kind == "base")
