"""The talker's prompt, made of the thinker's.

Source: `Qwen3OmniMoeForConditionalGeneration.generate` in transformers 5.19, with `_get_talker_user_parts`
and `_get_talker_assistant_parts`. The talker sees the user's turns without those of system and assistant,
then the beginning of the assistant's last turn, and then the reply, one text token per frame of audio. Media
are the thinker's hidden states, and text is the embedding of its ids.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from omni_server.errors import ConfigError
from omni_server.family import MEDIA_ROW, EmbeddingsPrompt, TextRows
from omni_server.protocol.rows import SourceSpan
from stages.qwen3_omni.ids import SpecialIds

_BEGINNING = 3
"""Tokens with which the assistant's turn begins: the start token, the role and a newline."""


def talker_prompt(ids: SpecialIds, source_ids: Sequence[int], voice: str) -> EmbeddingsPrompt:
    """`source_ids` is the thinker's prompt, with its last turn begun; `voice` is one of the speakers.

    The prompt's own ids are codec tokens that are never sampled, so that a repetition penalty applies to
    generated ones only, as in the reference.

    Raises `ConfigError` if the checkpoint has no talker, or if its chat template ends otherwise.
    """
    speech = ids.speech
    if speech is None:
        raise ConfigError("this checkpoint has no talker")
    source = np.asarray(source_ids)
    beginning = source[-_BEGINNING:]
    if beginning[:2].tolist() != [ids.im_start, ids.assistant]:
        raise ConfigError("the chat template does not end where the assistant's turn begins")
    is_media = np.isin(source, ids.placeholders)
    row_ids: list[int] = []
    spans: list[SourceSpan] = []
    starts = np.flatnonzero(source == ids.im_start)
    # The last turn is the assistant's.
    for turn, end in pairwise(starts.tolist()):
        if source[turn + 1] != ids.user:
            continue
        cuts = np.flatnonzero(np.diff(is_media[turn:end])) + turn + 1
        for first, behind in pairwise((turn, *cuts.tolist(), end)):
            has_rows = bool(is_media[first])
            spans.append(SourceSpan(first, len(row_ids), behind - first, has_rows))
            row_ids += [MEDIA_ROW] * (behind - first) if has_rows else source[first:behind].tolist()
    num_replaced = len(row_ids) + _BEGINNING
    row_ids += [*beginning.tolist(), *[speech.tts_pad] * 4, speech.tts_bos]
    codec_ids = (
        speech.codec_nothink,
        speech.codec_think_bos,
        speech.codec_think_eos,
        speech.speakers[voice],
        speech.codec_pad,
        speech.codec_bos,
    )
    return EmbeddingsPrompt(
        (speech.codec_pad,) * num_replaced + codec_ids,
        num_replaced,
        TextRows(tuple(row_ids), tuple(spans), (speech.tts_eos, speech.tts_pad)),
    )
