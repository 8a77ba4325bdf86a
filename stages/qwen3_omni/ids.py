"""Special token ids of a Qwen3-Omni checkpoint, read from its config.json; none are hard-coded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.qwen_omni.config_keys import ConfigKeys


@dataclass(frozen=True)
class SpeechIds:
    """Text ids are in the thinker's vocabulary, codec ids in the talker's."""

    tts_pad: int  # text: fills the places of a prompt and of the end that have no text to speak
    tts_bos: int  # text: precedes the reply
    tts_eos: int  # text: follows the reply, once
    codec_pad: int
    codec_bos: int
    codec_eos: int  # ends the speech
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int
    speakers: Mapping[str, int]  # codec ids by voice, as config.json spells it


@dataclass(frozen=True)
class SpecialIds:
    """Ids in the thinker's vocabulary, and those of speech."""

    im_start: int  # begins a turn; the role follows
    im_end: int  # ends a turn, and the reply
    user: int  # role
    assistant: int  # role
    audio_placeholder: int
    image_placeholder: int
    video_placeholder: int
    speech: SpeechIds | None
    """None if the checkpoint has no talker (`enable_audio_output`)."""

    @property
    def placeholders(self) -> tuple[int, int, int]:
        """Those of all media."""
        return self.audio_placeholder, self.image_placeholder, self.video_placeholder


def read_special_ids(model_dir: Path) -> SpecialIds:
    """Raises `ConfigError` if config.json lacks one of the keys."""
    keys = ConfigKeys(model_dir, "Qwen3-Omni")
    return SpecialIds(
        im_start=keys.number("im_start_token_id"),
        im_end=keys.number("im_end_token_id"),
        user=keys.number("user_token_id"),
        assistant=keys.number("assistant_token_id"),
        audio_placeholder=keys.number("thinker_config", "audio_token_id"),
        image_placeholder=keys.number("thinker_config", "image_token_id"),
        video_placeholder=keys.number("thinker_config", "video_token_id"),
        # True is the default of the reference's config.
        speech=_speech_ids(keys) if keys.find("enable_audio_output") in (None, True) else None,
    )


def _speech_ids(keys: ConfigKeys) -> SpeechIds:
    return SpeechIds(
        tts_pad=keys.number("tts_pad_token_id"),
        tts_bos=keys.number("tts_bos_token_id"),
        tts_eos=keys.number("tts_eos_token_id"),
        codec_pad=keys.number("talker_config", "codec_pad_id"),
        codec_bos=keys.number("talker_config", "codec_bos_id"),
        codec_eos=keys.number("talker_config", "codec_eos_token_id"),
        codec_nothink=keys.number("talker_config", "codec_nothink_id"),
        codec_think_bos=keys.number("talker_config", "codec_think_bos_id"),
        codec_think_eos=keys.number("talker_config", "codec_think_eos_id"),
        speakers=keys.numbers("talker_config", "speaker_id"),
    )
