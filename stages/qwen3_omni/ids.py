"""Special token ids of a Qwen3-Omni checkpoint, read from its config.json; none are hard-coded."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from omni_server.config.checkpoint_files import config_errors, read_json_object


class SpeechIds(Struct, frozen=True):
    """Text ids are in the thinker's vocabulary, codec ids in the talker's."""

    # Text: fills the places of a prompt and of the end that have no text to speak.
    tts_pad: int = field(name="tts_pad_token_id")
    tts_bos: int = field(name="tts_bos_token_id")  # text: precedes the reply
    tts_eos: int = field(name="tts_eos_token_id")  # text: follows the reply, once
    codec_pad: int = field(name="codec_pad_id")
    codec_bos: int = field(name="codec_bos_id")
    codec_eos: int = field(name="codec_eos_token_id")  # ends the speech
    codec_nothink: int = field(name="codec_nothink_id")
    codec_think_bos: int = field(name="codec_think_bos_id")
    codec_think_eos: int = field(name="codec_think_eos_id")
    # Codec ids by voice, as config.json spells it.
    speakers: Annotated[dict[str, int], Meta(min_length=1)] = field(name="speaker_id")


class SpecialIds(Struct, frozen=True):
    """Ids in the thinker's vocabulary, and those of speech."""

    im_start: int = field(name="im_start_token_id")  # begins a turn; the role follows
    im_end: int = field(name="im_end_token_id")  # ends a turn, and the reply
    user: int = field(name="user_token_id")  # role
    assistant: int = field(name="assistant_token_id")  # role
    audio_placeholder: int = field(name="audio_token_id")
    image_placeholder: int = field(name="image_token_id")
    video_placeholder: int = field(name="video_token_id")
    speech: SpeechIds | None = None
    """None if the checkpoint has no talker (`enable_audio_output`)."""

    @property
    def placeholders(self) -> tuple[int, int, int]:
        """Those of all media."""
        return self.audio_placeholder, self.image_placeholder, self.video_placeholder


def read_special_ids(model_dir: Path) -> SpecialIds:
    """Raises `ConfigError` if config.json lacks one of the keys."""
    path = model_dir / "config.json"
    config: dict[str, Any] = read_json_object(path)
    with config_errors(f"{path}: is this a Qwen3-Omni checkpoint?"):
        ids, speech = msgspec.convert(config | config["thinker_config"], SpecialIds), None
        if config.get("enable_audio_output") in (None, True):  # True is the default of the reference's config
            speech = msgspec.convert(config | config["talker_config"], SpeechIds)
        return msgspec.structs.replace(ids, speech=speech)
