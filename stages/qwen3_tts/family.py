"""Qwen3-TTS in the server process: texts, voices, ids, but no weights and no engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from omni_server.config.checkpoint_files import config_errors, read_json_object
from omni_server.config.pipeline import Pipeline, StageSpec
from omni_server.config.stage_config import StageConfig
from omni_server.errors import InvalidRequestError
from omni_server.family import (
    DefaultConfigs,
    DiffusionPrompt,
    FamilyModel,
    NeededFile,
    ReferenceImplementation,
)
from omni_server.family.footprint import StageFootprint
from omni_server.family.speech_text import SpeechText
from omni_server.types import (
    AudioPart,
    ChatMessage,
    ClonedVoice,
    Output,
    ReadAloud,
    SpeechOutput,
    Task,
    TextPart,
)
from stages.qwen3_tts.checkpoint_config import CODEC_FOLDER, read_checkpoint_config
from stages.qwen3_tts.codec_layout import decoder_layout
from stages.qwen3_tts.layout import Speaking, Voice
from stages.qwen3_tts.recording import Recording, check_voice
from stages.qwen3_tts.speech_text import Qwen3TTSText
from stages.qwen3_tts.tokens import TextTokenizer
from stages.qwen_codec.codec_layout import check_num_codebooks
from stages.qwen_codec.options import Code2WavStage, VoiceEncoderStage
from stages.qwen_codec.talker_to_code2wav import CODEC_EDGE
from stages.stage_models import DeclaresModels, modules_of

PIPELINE = Pipeline(
    stages={
        "talker": StageSpec("ar", reads_text=True),
        "code2wav": StageSpec("diffusion", output="audio", config=Code2WavStage, folder=CODEC_FOLDER),
        "voice_encoder": StageSpec("diffusion", output="voice", config=VoiceEncoderStage),
    },
    edges=(CODEC_EDGE,),
)

NO_VOICE = "Default"
"""The one name on the list of a checkpoint without voices, whose requests bring their own."""

AUTO = "auto"
"""The language that the model itself finds out."""


class Qwen3TTSFamily(DeclaresModels):
    """Implements `omni_server.family.ModelFamily`."""

    pipeline = PIPELINE

    architectures = ("Qwen3TTSForConditionalGeneration",)
    reference: ReferenceImplementation | None = ReferenceImplementation(
        "stages.qwen3_tts.reference:Qwen3TTSReference", package="qwen-tts-hf"
    )
    models: ClassVar[Mapping[str, str]] = {
        "talker": "stages.qwen3_tts.talker:Qwen3TTSTalker",
        "code2wav": "stages.qwen3_tts.code2wav:Qwen3TTSCode2Wav",
        "voice_encoder": "stages.qwen3_tts.voice_encoder:Qwen3TTSVoiceEncoder",
    }
    configs = "stages.qwen3_tts.hf_config"
    engine_modules: tuple[str, ...] = modules_of(models)
    default_configs: DefaultConfigs | None = DefaultConfigs(gpu="qwen3_tts", demo="qwen3_tts.demo-cpu")

    def open(self, model_dir: Path) -> "Qwen3TTSModel":
        return Qwen3TTSModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        return (
            NeededFile(("tokenizer.json", "vocab.json"), "the tokenizer"),
            NeededFile(("tokenizer_config.json",), "the tokenizer's settings"),
            NeededFile((f"{CODEC_FOLDER}/config.json",), "the codec"),
        )

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.qwen3_tts.footprint import stage_footprints

        return stage_footprints(model_dir, config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        is_base = read_checkpoint_config(model_dir).tts_model_type == "base"
        return self.pipeline.outputs if is_base else self.pipeline.outputs - {"voice"}

    def register(self) -> None:
        from stages.qwen3_tts.hf_config import register_configs

        register_configs()
        super().register()


class Qwen3TTSModel(FamilyModel):
    """One checkpoint folder. There are three kinds: CustomVoice has voices, VoiceDesign takes a description
    of one, and Base clones one."""

    def __init__(self, model_dir: Path) -> None:
        self._config = config = read_checkpoint_config(model_dir)
        talker = config.talker_config
        self._languages = {name.lower(): token for name, token in talker.codec_language_id.items()}
        # The reference compares names in lower case, as they are in the published config.
        self._speakers = {
            name.capitalize(): token if isinstance(token, int) else token[0]
            for name, token in talker.spk_id.items()
        }
        with config_errors(f"{model_dir / 'config.json'}: codec_language_id lacks the dialect of a speaker"):
            self._dialects = {
                name.capitalize(): self._languages[dialect]
                for name, dialect in talker.spk_is_dialect.items()
                if isinstance(dialect, str)
            }
        self.voices = tuple(self._speakers) or (NO_VOICE,)
        self.default_voice = self.voices[0]
        clone = ClonedVoice(bytes(4 * talker.hidden_size)) if config.tts_model_type == "base" else None
        self.warm_up_speech = SpeechOutput(text="Hello", clone=clone)
        self.stop_ids = {"talker": (talker.codec_eos_token_id,)}
        path = model_dir / CODEC_FOLDER / "config.json"
        codec: dict[str, Any] = read_json_object(path)
        with config_errors(f"{path}: is this the codec of Qwen3-TTS?"):
            decoder = codec["decoder_config"]
            check_num_codebooks("decoder_config.num_quantizers", decoder["num_quantizers"])
            self.codec = decoder_layout(decoder)
            self._codebook_size = int(decoder["codebook_size"])
        self._tokenizer = TextTokenizer(model_dir)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        if not isinstance(task, ReadAloud):
            raise InvalidRequestError("this model hears nothing: it reads text", param="model")
        return (ChatMessage("user", (TextPart(task.text),)),)

    def speech_text(self, speech: SpeechOutput, voice: str) -> SpeechText:
        is_text_first = speech.text_first
        if is_text_first is None:  # the reference's `non_streaming_mode`
            is_text_first = speech.pieces is None and speech.clone is None
        speaking = Speaking(
            self._voice(speech.clone, voice),
            self._language(speech.language, voice),
            self._instruction_ids(speech.instructions),
            is_text_first,
        )
        return Qwen3TTSText(self._config, self._tokenizer, speaking)

    def _voice(self, clone: ClonedVoice | None, voice: str) -> Voice:
        is_base = self._config.tts_model_type == "base"
        if clone is None:
            if is_base:
                raise InvalidRequestError(
                    "this model speaks with voices that it clones: name one that was sent to "
                    "/v1/audio/voices, or send a recording as 'ref_audio'",
                    param="voice",
                )
            return Voice(self._speakers.get(voice))
        if not is_base:
            raise InvalidRequestError("this model clones no voices", param="voice")
        check_voice(clone, self._config.talker_config.hidden_size, self._codebook_size)
        return Voice(None, clone.vector, clone.frames, self._tokenizer.plain_ids(clone.text))

    def _language(self, language: str | None, voice: str) -> int | None:
        from transformers.models.whisper.tokenization_whisper import LANGUAGES  # names by ISO 639-1 code

        name = AUTO if language is None else language.lower()
        name = LANGUAGES.get(name.partition("-")[0], name)  # en-GB is English
        # A dialect cannot be asked for: it belongs to a voice.
        known = [AUTO, *sorted(name for name in self._languages if "dialect" not in name)]
        if name not in known:
            raise InvalidRequestError(
                f"Unknown language '{name[:64]}'; known are {', '.join(known)}", param="language"
            )
        if name in (AUTO, "chinese") and voice in self._dialects:
            return self._dialects[voice]
        return self._languages.get(name)

    def _instruction_ids(self, instructions: str | None) -> tuple[int, ...]:
        if not instructions:
            return ()
        if self._config.tts_model_size == "0b6":
            raise InvalidRequestError(
                "this model follows no instructions; the larger one, of 1.7B, does", param="instructions"
            )
        begin, end = map(self._tokenizer.template_ids, ("<|im_start|>user\n", "<|im_end|>\n"))
        return (*begin, *self._tokenizer.plain_ids(instructions), *end)

    def voice_prompt(self, recording: AudioPart, *, has_text: bool) -> DiffusionPrompt:
        return Recording(recording.samples.tobytes(), has_codes=has_text).prompt()

    def cloned_voice(self, result: npt.NDArray[np.float32]) -> ClonedVoice:
        width = self._config.talker_config.hidden_size
        return ClonedVoice(result[:width].tobytes(), result[width:].astype(np.int16).tobytes())

    def dtype_name(self) -> str:
        return self._config.dtype_name
