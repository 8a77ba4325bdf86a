"""A language model and the speech model that reads its answers aloud, as the server sees them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from huggingface_hub import constants

from omni_server.check.default_config import resolve_deployment
from omni_server.check.run import CheckOptions, check
from omni_server.config.model_folder import architectures_of
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ImagePart,
    Output,
    ReadAloud,
    SpeechOutput,
    TextPart,
    Transcribe,
    VideoPart,
)
from stages.spoken_llm import FAMILY
from stages.spoken_llm.family import SpokenLLMModel
from tests.checkpoints.write import make_demo_checkpoint

CONFIG = "spoken_llm.demo-cpu"
SPOKEN: frozenset[Output] = frozenset({"text", "audio"})


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module", params=["text", "vision"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint of each kind of language model."""
    out = tmp_path_factory.mktemp("demo") / request.param
    return make_demo_checkpoint(out, family="spoken_llm", pipeline=cast(str, request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> SpokenLLMModel:
    return FAMILY.open(folder)


# -- two checkpoints as one


def test_two_checkpoints_are_served_as_one_folder(folder: Path, cache: Path) -> None:
    llm, speech = folder / "llm", folder / "speech"
    joined, config = resolve_deployment(str(llm), None, speech_model=str(speech), use_cpu=True)
    assert joined.parent == cache / "omni-server"
    assert architectures_of(joined) == FAMILY.architectures
    assert ((joined / "llm").resolve(), (joined / "speech").resolve()) == (llm.resolve(), speech.resolve())
    assert list(config.stages) == ["thinker", "talker", "code2wav"]
    assert resolve_deployment(str(llm), CONFIG, speech_model=str(speech))[0] == joined
    assert [path.name for path in joined.parent.iterdir()].count(joined.name) == 1


def test_a_stage_config_may_name_the_speech_model(folder: Path, tmp_path: Path) -> None:
    _, config = resolve_deployment(str(folder), None, use_cpu=True)
    named = config.model_copy(update={"speech_model": str(folder / "speech")})
    joined, _ = resolve_deployment(str(folder / "llm"), named)
    assert (joined / "speech").samefile(folder / "speech")


def test_a_language_model_alone_is_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(ConfigError, match="; --speech-model gives any language model a voice"):
        resolve_deployment(str(folder / "llm"), None, use_cpu=True)


@pytest.mark.parametrize(
    ("model", "speech_model", "stage_config", "problem"),
    [
        (
            "speech",
            "speech",
            None,
            "needs no speech model: leave out --speech-model, or give a language model",
        ),
        ("llm", "llm", None, "^--speech-model '.*names (Llama|Qwen2_5_VL)For.*, and not Qwen3TTSFor"),
        ("llm", "speech", "qwen3_omni.demo-cpu", "the stage config is for Qwen3OmniMoe.*, which needs none"),
        ("llm", "nowhere", None, "^--speech-model '.*nowhere': no such folder"),
        ("nowhere", "speech", None, "^MODEL '.*nowhere': no such folder"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(
    folder: Path, model: str, speech_model: str, stage_config: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_deployment(
            str(folder / model), stage_config, speech_model=str(folder / speech_model), use_cpu=True
        )


def test_a_cache_that_cannot_be_written_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "omni-server").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to"):
        resolve_deployment(str(folder / "llm"), None, speech_model=str(folder / "speech"), use_cpu=True)


def test_a_folder_that_has_lost_a_link_is_made_anew(folder: Path) -> None:
    options = {"speech_model": str(folder / "speech"), "use_cpu": True}
    joined, _ = resolve_deployment(str(folder / "llm"), None, **options)
    (joined / "llm").unlink()
    assert resolve_deployment(str(folder / "llm"), None, **options)[0] == joined
    assert (joined / "llm").resolve() == (folder / "llm").resolve()


def test_code_of_a_checkpoint_is_not_run(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "llm" / "config.json").read_text())
    config |= {"model_type": "unknown", "auto_map": {"AutoConfig": "code.Config"}}
    (copy / "llm" / "config.json").write_text(json.dumps(config))
    (copy / "llm" / "code.py").write_text("raise SystemExit('it has been run')")
    with pytest.raises(ConfigError, match="custom code"):
        resolve_deployment(str(copy), None, use_cpu=True)


def test_the_check_knows_every_weight_of_both(folder: Path) -> None:
    options = CheckOptions(str(folder / "llm"), speech_model=str(folder / "speech"), use_cpu=True)
    report = check(options, lambda line: None)
    assert [finding.message for finding in report.findings if finding.area == "files"] == []
    assert [stage.name for stage in report.stages] == ["thinker", "talker", "code2wav"]
    stored = sum(path.stat().st_size for path in (folder / "llm").glob("*.safetensors"))
    assert report.stages[0].weights == pytest.approx(stored, rel=0.05)


def test_the_check_awaits_the_weights_of_a_language_model_of_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--org--llm"
    shutil.copytree(
        folder / "llm", cached / "snapshots" / "a", ignore=shutil.ignore_patterns("*.safetensors")
    )
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options = CheckOptions("org/llm", speech_model=str(folder / "speech"), use_cpu=True)
    report = check(options, lambda line: None)
    assert [finding.message for finding in report.findings if finding.area == "files"] == [
        "the weights of org/llm are not here yet; 'omni-server serve' downloads them"
    ]
    assert [stage.name for stage in report.stages] == ["thinker", "talker", "code2wav"]


def test_without_weights_the_sizes_are_those_of_the_config(folder: Path, tmp_path: Path) -> None:
    _, config = resolve_deployment(str(folder), None, use_cpu=True)
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    stored, described = (FAMILY.footprints(place, config)["thinker"] for place in (folder, copy))
    assert sorted(stored.tensors.values()) == sorted(described.tensors.values())
    assert (stored.kv, stored.encodes_media) == (described.kv, described.encodes_media)


# -- chats


def test_the_chat_is_that_of_the_language_model_and_the_voices_those_of_the_speech_model(
    model: SpokenLLMModel, folder: Path
) -> None:
    (end,) = json.loads((folder / "llm" / "generation_config.json").read_text())["eos_token_id"]
    assert model.stop_ids["thinker"] == (end,)
    assert model.stop_ids.keys() == {"thinker", "talker"}
    assert model.default_voice in model.voices
    text = model.prompt((ChatMessage("user", (TextPart("Hello"),)),), outputs=SPOKEN).text
    assert "Hello" in text
    assert text.endswith("assistant|>\n" if text.startswith("<s>") else "<|im_start|>assistant\n")
    spoken = model.speech_text(SpeechOutput(), model.default_voice)
    spoken.push("Hello")
    spoken.finish()
    assert spoken.prompt() is not None


def test_images_and_videos_reach_a_model_that_sees(model: SpokenLLMModel, folder: Path) -> None:
    assert model.input_modalities == (("image", "video") if folder.name == "vision" else ())
    pixels = np.zeros((56, 56, 3), np.uint8)
    content = (ImagePart(pixels), TextPart("or"), VideoPart(np.stack([pixels] * 4), 2.0))
    prompt = model.prompt((ChatMessage("user", content),), outputs=SPOKEN)
    assert (len(prompt.images), len(prompt.videos)) == (1, 1)
    seen = "<|image_pad|><|vision_end|>or<|vision_start|><|video_pad|>"
    assert (seen in prompt.text) == (folder.name == "vision")


def test_it_reads_aloud_but_does_not_hear(model: SpokenLLMModel) -> None:
    assert model.task_messages(ReadAloud("Hi")) == (ChatMessage("user", (TextPart("Hi"),)),)
    with pytest.raises(InvalidRequestError, match="hears nothing"):
        model.task_messages(Transcribe(AudioPart(np.zeros(16000, np.float32), 16000)))
