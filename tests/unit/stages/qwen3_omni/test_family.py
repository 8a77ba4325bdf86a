"""Qwen3-Omni as the server sees it: prompts, voices, sizes; against the reference where it says the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_server.check.default_config import resolve_deployment
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stages import ArStage
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.types import (
    AudioPart,
    ChatMessage,
    FunctionTool,
    Output,
    ReadAloud,
    TextPart,
    Transcribe,
)
from stages.qwen3_omni import FAMILY
from stages.qwen3_omni.family import Qwen3OmniModel
from stages.qwen3_omni.talker import CODE_SAMPLING
from stages.runtime.code_sampling import CodeSampling
from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference

SPOKEN: frozenset[Output] = frozenset({"text", "audio"})
CONFIGS = (
    "qwen3_omni",
    "qwen3_omni.80gb",
    "qwen3_omni.2gpu",
    "qwen3_omni.4gpu",
    "qwen3_omni.demo-cpu",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", family="qwen3_omni")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Qwen3OmniModel:
    return FAMILY.open(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Qwen3Reference:
    return Qwen3Reference(checkpoint)


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy without weights, to be changed."""
    shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "copy"


def change_config(folder: Path, *keys: str, value: object) -> None:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(config))


def user(*parts: TextPart | AudioPart) -> ChatMessage:
    return ChatMessage("user", parts)


# -- the checkpoint


def test_voices_are_the_configs_speakers_with_capital_letters(model: Qwen3OmniModel) -> None:
    assert model.voices == ("Chelsie", "Ethan", "Aiden")
    assert model.default_voice == "Ethan"


def test_without_the_references_default_voice_the_first_one_is_used(changed: Path) -> None:
    change_config(changed, "talker_config", "speaker_id", value={"cherry": 2301, "serena": 2302})
    model = FAMILY.open(changed)
    assert (model.voices, model.default_voice) == (("Cherry", "Serena"), "Cherry")


def test_sizes_come_from_the_checkpoint(model: Qwen3OmniModel) -> None:
    assert model.codec is not None
    assert model.codec.samples_per_frame == 1920  # 24 kHz at 12.5 frames a second
    assert model.codec.lead_samples == 555
    assert model.row_width == 64
    assert model.stop_ids["talker"] == (2150,)
    assert model.dtype_name() == "float32"


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan", "Aiden"])
def test_each_voice_is_a_code_of_the_talkers_prompt(
    voice: str, model: Qwen3OmniModel, reference: Qwen3Reference
) -> None:
    case = QWEN3_CASES["three_turns"]
    result = reference.run(replace(case, voice=voice, thinker_max_tokens=3, talker_max_tokens=1))
    prompt = model.embeddings_prompt("talker", result.prompt_ids, voice=voice)
    assert len(prompt.token_ids) == len(result.talker_prompt)
    assert reference.model.config.talker_config.speaker_id[voice.lower()] in prompt.token_ids


def test_a_checkpoint_without_a_talker_writes_only(changed: Path) -> None:
    change_config(changed, "enable_audio_output", value=False)
    model = FAMILY.open(changed)
    assert (model.voices, model.default_voice, model.codec, model.row_width) == ((), None, None, 0)
    assert set(model.stop_ids) == {"thinker"}
    assert FAMILY.outputs(changed) == {"text"}
    _, config = resolve_deployment(str(changed), None, use_cpu=True, load_format="dummy")
    assert (list(config.stages), config.edges) == (["thinker"], ())
    message = "text only and has no talker or code2wav: use a stage config with the thinker alone, or none"
    with pytest.raises(ConfigError, match=message):
        resolve_deployment(str(changed), "qwen3_omni.demo-cpu", load_format="dummy")


def test_another_number_of_codebooks_is_refused(changed: Path) -> None:
    change_config(changed, "code2wav_config", "num_quantizers", value=32)
    with pytest.raises(ConfigError, match="num_quantizers is 32"):
        FAMILY.open(changed)


# -- memory


def test_footprints_name_every_weight_of_the_checkpoint_once(checkpoint: Path) -> None:
    from safetensors import safe_open

    config = load_stage_config(find_shipped_config("qwen3_omni.demo-cpu"))
    footprints = FAMILY.footprints(checkpoint, config)
    named = [name for footprint in footprints.values() for name in footprint.tensors]
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        assert sorted(named) == sorted(weights.keys())
    assert "talker.hidden_projection.linear_fc1.weight" in footprints["thinker"].tensors


@pytest.mark.parametrize(
    ("dtype", "computed", "value_bytes"),
    [("auto", "bfloat16", 2), ("float16", "float16", 2), ("float32", "float32", 4)],
)
def test_the_decoders_state_has_the_type_it_computes_in(
    checkpoint: Path, dtype: str, computed: str, value_bytes: int
) -> None:
    on_cpu = load_stage_config(find_shipped_config("qwen3_omni.demo-cpu"))
    on_gpu = load_stage_config(find_shipped_config("qwen3_omni"))
    stage = on_gpu.stages["code2wav"].model_copy(update={"dtype": dtype})
    on_gpu = on_gpu.model_copy(update={"stages": {**on_gpu.stages, "code2wav": stage}})
    in_float32 = FAMILY.footprints(checkpoint, on_cpu)["code2wav"]
    footprint = FAMILY.footprints(checkpoint, on_gpu)["code2wav"]
    assert (in_float32.dtype, footprint.dtype) == ("float32", computed)
    assert 4 * footprint.stream_state_bytes == value_bytes * in_float32.stream_state_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid(name: str) -> None:
    config = load_stage_config(find_shipped_config(name))
    assert config.model_family == "stages.qwen3_omni:FAMILY"
    assert config.frames.num_codebooks == 16
    talker = config.stages["talker"]
    assert isinstance(talker, ArStage)
    assert CodeSampling(**talker.predictor_sampling.model_dump()) == CODE_SAMPLING


def test_only_attention_and_experts_of_the_thinker_are_quantized(checkpoint: Path) -> None:
    config = load_stage_config(find_shipped_config("qwen3_omni.demo-cpu"))
    quantizable = FAMILY.footprints(checkpoint, config)["thinker"].quantizable
    assert quantizable is not None
    kinds = {name.split(".")[-2] for name in quantizable.weights}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(name.startswith("thinker.model.layers.") for name in quantizable.weights)


# -- prompts


@pytest.mark.parametrize("name", ["hello", "system_prompt", "three_turns", "mixed", "media_in_turns"])
def test_the_prompt_is_what_the_references_processor_makes(
    name: str, model: Qwen3OmniModel, reference: Qwen3Reference
) -> None:
    """With the media left out: the processor puts their placeholders in only when it has them."""
    kinds = {"AudioPart": "audio", "ImagePart": "image", "VideoPart": "video"}
    messages = QWEN3_CASES[name].messages
    conversation = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": kinds[type(part).__name__]}
                for part in message.content
            ],
        }
        for message in messages
    ]
    expected = reference.processor.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    assert model.prompt(messages, outputs=SPOKEN).text == expected


LOOK = FunctionTool("look", '{"type": "function", "function": {"name": "look"}}', "{}")
TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "look"}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def test_tools_are_written_as_qwen3s_text_models_do(model: Qwen3OmniModel) -> None:
    text = model.prompt((user(TextPart("Hi")),), outputs={"text"}, tools=(LOOK,)).text
    assert text.startswith(f"<|im_start|>system\n{TOOLS}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


SOUND = AudioPart(np.zeros(1600, np.float32), 16_000)


def test_transcription_is_asked_for_in_the_authors_words(model: Qwen3OmniModel) -> None:
    (message,) = model.task_messages(Transcribe(SOUND, language="en", hint=None, to_english=False))
    assert message.content == (SOUND, TextPart("Transcribe the English audio into text."))
    (message,) = model.task_messages(Transcribe(SOUND, language="de", hint=None, to_english=True))
    assert message.content == (
        SOUND,
        TextPart("Listen to the provided German speech and produce a translation in English text."),
    )


@pytest.mark.parametrize("code", ["xx", "eng", "en-GB, and sing"])
def test_a_language_that_is_not_known_is_refused(model: Qwen3OmniModel, code: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"Unknown language '{code}'; known are af, am") as error:
        model.task_messages(Transcribe(SOUND, language=code, hint=None, to_english=False))
    assert error.value.param == "language"


def test_reading_aloud_asks_for_the_text_alone(model: Qwen3OmniModel) -> None:
    (message,) = model.task_messages(ReadAloud("Good morning."))
    (part,) = message.content
    assert isinstance(part, TextPart)
    assert part.text.endswith("say nothing else.\n\nGood morning.")
