"""The talker's input rows as integers: which text id, codec id, vector or frame each row is the sum of.

The server lays out a prompt, and the talker adds up what the layout names. Source: `generate` and
`generate_icl_prompt` of `Qwen3TTSForConditionalGeneration`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from omni_server.family.speech_text import SpeechPrompt
from stages.qwen3_tts.checkpoint_config import CheckpointConfig
from stages.qwen_codec.codec_layout import NUM_CODEBOOKS

NONE, VECTOR, FRAME = -1, -2, -3
"""In `PromptRows.codec`: nothing, the vector of the voice, the next frame of the reference recording. `NONE`
also in `PromptRows.text`."""


class PromptRows(msgspec.Struct, frozen=True, array_like=True):
    """What the rows of a prompt are composed of. `text` and `codec` have one id for each row."""

    text: tuple[int, ...]
    codec: tuple[int, ...]
    vector: bytes = b""
    """float32 [width of the talker]"""
    frames: bytes = b""
    """int16 [num_frames, NUM_CODEBOOKS]"""


@dataclass(frozen=True)
class Voice:
    """None of the fields: the model chooses the voice, or takes it from a description."""

    speaker: int | None = None
    """Codec id of one of the checkpoint's voices."""
    vector: bytes = b""
    """Of a cloned voice; see `PromptRows`, as for `frames`."""
    frames: bytes = b""
    """The recording that is cloned, which the prompt then begins with, and `text_ids`, what is said in it."""
    text_ids: tuple[int, ...] = ()

    @property
    def num_frames(self) -> int:
        return len(self.frames) // (2 * NUM_CODEBOOKS)


@dataclass(frozen=True)
class Speaking:
    """How a request wants its text spoken."""

    voice: Voice
    language: int | None = None
    """Codec id; None leaves it to the model."""
    instruction_ids: tuple[int, ...] = ()
    """The user's turn before the text, as in the template."""
    is_text_first: bool = True
    """All of the text is in the prompt. False: one token is added to each generated frame, so that a text
    can be spoken while it is written."""

    def has_enough(self, num_tokens: int) -> bool:
        """Whether a prompt can be laid out with the first tokens of a text that is not complete."""
        voice = self.voice
        return not self.is_text_first and num_tokens > max(0, voice.num_frames - len(voice.text_ids))


def speech_prompt(
    config: CheckpointConfig,
    role_ids: Sequence[int],
    speaking: Speaking,
    text: Sequence[int],
    *,
    is_complete: bool,
) -> SpeechPrompt:
    """`text` has at least one token; if it is not complete, see `Speaking.has_enough`."""
    codec, voice = config.talker_config, speaking.voice
    pad, eos = config.tts_pad_token_id, config.tts_eos_token_id
    prefix = _prefix(config, speaking)
    text_only = (*speaking.instruction_ids, *role_ids)
    rows = [(token, NONE) for token in text_only]
    rows += [(pad, token) for token in prefix] + [(config.tts_bos_token_id, codec.codec_pad_id)]
    following: Sequence[int] = ()
    tail: tuple[int, ...] = (pad,)
    frames = (codec.codec_bos_id, *[FRAME] * voice.num_frames)
    spoken_ids = (*voice.text_ids, *text)
    if speaking.is_text_first:  # and then the recording, or nothing but its beginning
        rows += [(token, codec.codec_pad_id) for token in (*spoken_ids, eos)]
        rows += [(pad, frame) for frame in frames]
    elif is_complete and len(spoken_ids) < len(frames):  # side by side, and the recording is longer
        spoken_ids += (eos, *[pad] * (len(frames) - len(spoken_ids) - 1))
        rows += zip(spoken_ids, frames, strict=True)
    else:
        rows += zip(spoken_ids, frames, strict=False)
        following, tail = spoken_ids[len(frames) :], (eos, pad)
    text_ids, codec_ids = zip(*rows, strict=True)
    return SpeechPrompt(
        token_ids=(codec.codec_pad_id,) * len(rows),
        rows=msgspec.msgpack.encode(PromptRows(text_ids, codec_ids, voice.vector, voice.frames)),
        text_ids=tuple(following),
        tail_ids=tail,
    )


def _prefix(config: CheckpointConfig, speaking: Speaking) -> list[int]:
    """The codec ids that say language and voice."""
    codec, voice = config.talker_config, speaking.voice
    if speaking.language is None:
        prefix = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
    else:
        prefix = [codec.codec_think_id, codec.codec_think_bos_id, speaking.language, codec.codec_think_eos_id]
    if voice.speaker is not None:
        prefix.append(voice.speaker)
    elif voice.vector:
        prefix.append(VECTOR)
    return prefix
