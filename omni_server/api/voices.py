"""Maps voice names to the model's voices."""

from omni_server.api.voice_store import StoredVoice, VoiceStore
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo, SpeechOutput

OPENAI_VOICES = (
    "alloy", "ash", "coral", "echo", "nova", "onyx", "shimmer",
    "ballad", "sage", "verse", "marin", "cedar", "fable",
)  # fmt: skip
"""OpenAI's voices. Clients written for OpenAI send these names, and some refuse to send others. The order
determines which of the model's voices each one maps to."""


def speech_output(
    name: str | None, model: ModelInfo, voices: VoiceStore, param: str = "audio.voice"
) -> SpeechOutput:
    """Returns speech with the voice `name`: the model's (see `resolve_voice`), or one that was sent earlier.
    Raises `InvalidRequestError` for `param`."""
    if model.clones_voices:
        return SpeechOutput(clone=sent_voice(name, voices, param).clone)
    return SpeechOutput(voice=None if name is None else resolve_voice(name, model, param))


def sent_voice(name: str | None, voices: VoiceStore, param: str) -> StoredVoice:
    """Raises `InvalidRequestError` for `param` if there is no such voice."""
    if name is None or (voice := voices.find(name)) is None:
        raise InvalidRequestError(
            "This model speaks with voices that it clones: send a recording to /v1/audio/voices and name it as "
            "the voice, or send 'ref_audio' to /v1/audio/speech.",
            param=param,
        )
    return voice


def resolve_voice(name: str, model: ModelInfo, param: str = "audio.voice") -> str:
    """Returns the model's voice `name`, ignoring case, or the one that an OpenAI name maps to.

    OpenAI's names cycle through the model's voices, starting with the default voice for "alloy". A voice of
    the model with such a name takes precedence. Raises `InvalidRequestError` for `param`.
    """
    wanted = name.casefold()
    for voice in model.voices:
        if voice == name:
            return voice
    for voice in model.voices:
        if voice.casefold() == wanted:
            return voice
    aliases = voice_aliases(model)
    if wanted in aliases:
        return aliases[wanted]
    raise InvalidRequestError(
        f"Unknown voice: '{name[:64]}'. The voices of this model are: {', '.join(model.voices)}; "
        f"OpenAI's names ({', '.join(OPENAI_VOICES)}) are taken as aliases.",
        param=param,
    )


def voice_aliases(model: ModelInfo) -> dict[str, str]:
    """OpenAI's names that are not voices of the model itself, mapped to the model's voices."""
    if not model.voices:
        return {}
    own = {voice.casefold() for voice in model.voices}
    start = model.voices.index(model.default_voice) if model.default_voice is not None else 0
    return {
        name: model.voices[(start + index) % len(model.voices)]
        for index, name in enumerate(OPENAI_VOICES)
        if name not in own
    }
