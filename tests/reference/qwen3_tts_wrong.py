"""Deliberate mistakes in the reference of Qwen3-TTS, those that implementations are likely to make.

That each of them changes codes or waveform of a case shows that a comparison on it is worth something,
whatever engine runs it. They are made in the reference's environment; others import this for the names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.reference.qwen3_tts_reference import Question, Reference

    Given = dict[str, Any]
    """Arguments of the talker's `generate`."""
    Wrong = Callable[[Reference, Question], AbstractContextManager[object]]

_NEW_FRAMES, _CONTEXT_FRAMES = 4, 8
"""Of a window with `short_context`."""


@contextmanager
def mistaken(reference: Reference, mistake: str, question: Question) -> Iterator[Question]:
    """Yields the question to ask meanwhile, alone."""
    if mistake in QUESTIONS:
        yield QUESTIONS[mistake](question)
    else:
        with (CODE_PATCHES | WAVE_PATCHES)[mistake](reference, question):
            yield question


def _asked_clone(question: Question, **changes: object) -> Question:
    return question | {"clone": question["clone"] | changes}


def _shifted_codes(question: Question) -> Question:
    first, *others = question["clone"]["codes"]
    return _asked_clone(question, codes=[*others, first])


QUESTIONS: dict[str, Callable[[Question], Question]] = {
    "no_language": lambda question: question | {"language": "auto"},
    "other_voice": lambda question: question | {"voice": "serena"},
    "shifted_codes": _shifted_codes,
    "no_reference_text": lambda question: _asked_clone(question, text=""),
}


# -- what the talker is given, in a batch of one


def _given(wrong: Callable[[Reference, Question, Given], Given]) -> Wrong:
    def changed(reference: Reference, question: Question) -> AbstractContextManager[object]:
        generate = reference.model.talker.generate
        return patch.object(
            reference.model.talker,
            "generate",
            lambda **given: generate(**given | wrong(reference, question, given)),
        )

    return changed


def _codec_row(reference: Reference, code: int) -> torch.Tensor:
    return reference.model.talker.get_input_embeddings()(torch.tensor([[code]]))


def _late_text(_reference: Reference, _question: Question, given: Given) -> Given:
    text = torch.cat([given["tts_pad_embed"], given["trailing_text_hidden"]], 1)
    return {"trailing_text_hidden": text}


def _first_text_behind_prompt(reference: Reference, _question: Question, given: Given) -> Given:
    rows, pad = given["inputs_embeds"].clone(), given["tts_pad_embed"]
    begin = _codec_row(reference, reference.model.config.talker_config.codec_bos_id)
    first = rows[:, -1:] - begin
    rows[:, -1:] = pad + begin
    return {
        "inputs_embeds": rows,
        "trailing_text_hidden": torch.cat([first, given["trailing_text_hidden"]], 1),
    }


def _codec_pad_with_instructions(reference: Reference, question: Question, given: Given) -> Given:
    rows = given["inputs_embeds"].clone()
    user = reference.user(question["instructions"])
    rows[:, : user.shape[1]] += _codec_row(reference, reference.model.config.talker_config.codec_pad_id)
    return {"inputs_embeds": rows}


def _speaker_first(_reference: Reference, _question: Question, given: Given) -> Given:
    rows = given["inputs_embeds"].clone()
    rows[:, 3:-2] = rows[:, 3:-2].roll(1, 1)  # between the role, and pad and beginning
    return {"inputs_embeds": rows}


# -- what the model computes


def _no_dialect(reference: Reference, _question: Question) -> AbstractContextManager[object]:
    config = reference.model.config.talker_config
    return patch.object(config, "spk_is_dialect", dict.fromkeys(config.spk_is_dialect, False))


def _tables(reference: Reference, wrong: list[Callable[..., torch.Tensor]]) -> AbstractContextManager[object]:
    """Those that the talker sums up."""
    return patch.object(reference.model.talker.code_predictor, "get_input_embeddings", lambda: wrong)


def _no_residuals(reference: Reference, _question: Question) -> AbstractContextManager[object]:
    tables = reference.model.talker.code_predictor.get_input_embeddings()
    return _tables(reference, [lambda codes, table=table: 0 * table(codes) for table in tables])


def _shifted_tables(reference: Reference, _question: Question) -> AbstractContextManager[object]:
    first, *others = reference.model.talker.code_predictor.get_input_embeddings()
    return _tables(reference, [*others, first])


@contextmanager
def _unnormed_hidden(reference: Reference, _question: Question) -> Iterator[None]:
    talker, hidden = reference.model.talker, list[torch.Tensor]()
    predict = talker.code_predictor.generate
    seen = talker.model.norm.register_forward_pre_hook(lambda _, given: hidden.append(given[0][:, -1:]))

    def unnormed(inputs_embeds: torch.Tensor, **given: object) -> object:
        return predict(inputs_embeds=torch.cat([hidden[-1], inputs_embeds[:, 1:]], 1), **given)

    with seen, patch.object(talker.code_predictor, "generate", unnormed):
        yield


CODE_PATCHES: dict[str, Wrong] = {
    "late_text": _given(_late_text),
    "first_text_behind_prompt": _given(_first_text_behind_prompt),
    "no_text_end": _given(lambda _r, _q, g: {"trailing_text_hidden": g["trailing_text_hidden"][:, :-1]}),
    "stop_feed": _given(lambda _r, _q, given: {"tts_pad_embed": 0 * given["tts_pad_embed"]}),
    "codec_pad_with_instructions": _given(_codec_pad_with_instructions),
    "speaker_first": _given(_speaker_first),
    "early_end": _given(lambda _r, _q, _g: {"min_new_tokens": 0}),
    "no_penalty": _given(lambda _r, _q, _g: {"repetition_penalty": 1.0}),
    "no_dialect": _no_dialect,
    "predictor_without_bias": lambda r, _: patch.object(
        r.model.talker.code_predictor.small_to_mtp_projection, "bias", None
    ),
    "unnormed_hidden": _unnormed_hidden,
    "no_residuals": _no_residuals,
    "shifted_tables": _shifted_tables,
}


# -- how frames are decoded


def _decoded(wrong: Callable[[Reference, Question, torch.Tensor], torch.Tensor]) -> Wrong:
    return lambda reference, question: patch.object(
        reference, "decode", lambda codes: wrong(reference, question, codes)
    )


def _short_context(reference: Reference, _question: Question, codes: torch.Tensor) -> torch.Tensor:
    decoder = reference.model.speech_tokenizer.model.decoder
    return decoder.chunked_decode(codes.T[None], _NEW_FRAMES, _CONTEXT_FRAMES)[0, 0]


def _primed(others: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """By `others` instead of the recording's codes."""

    def decode(reference: Reference, question: Question, codes: torch.Tensor) -> torch.Tensor:
        count = len(question["clone"]["codes"])
        whole = torch.cat([others(codes[:count]), codes[count:]])
        return reference.model.speech_tokenizer.model.decoder(whole.T[None])[0, 0]

    return _decoded(decode)


WAVE_PATCHES: dict[str, Wrong] = {
    "short_context": _decoded(_short_context),
    "primed_by_nothing": _primed(torch.zeros_like),
    "primed_by_another": _primed(lambda codes: codes.flip(0)),
}
