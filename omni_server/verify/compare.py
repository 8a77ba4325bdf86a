"""Compares an answer with the reference's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omni_server.protocol.reference import Difference, ReferenceAnswer
from omni_server.verify.answers import Answer, Samples
from omni_server.verify.cases import Case

NEAR_TIE = {"float32": 2**-16, "bfloat16": 2**-5, "float16": 2**-8}
"""Rounding decides between two tokens whose logits are closer than this fraction of the step's largest logit.
It is four units in the last place of the 16-bit types, in which both sides pass activations between layers,
and 128 in float32, where sums are rounded in the type itself, in an order that differs by side."""

MIN_SNR_DB = {"float32": 60.0, "float16": 40.0, "bfloat16": 25.0}
"""By the decoder's dtype; the reference computes in float32. The steps of the solver amplify rounding."""


@dataclass(frozen=True)
class TokenMatch:
    """Compares this server's tokens with those that the reference prefers at the same steps."""

    num_tokens: int
    near_ties: tuple[Difference, ...] = ()
    differences: tuple[Difference, ...] = ()
    """Those not explained by rounding."""


@dataclass(frozen=True)
class CaseResult:
    """None marks parts that were not compared; `left_out` and `failure` say why."""

    case: Case
    text: TokenMatch | None = None
    codes: TokenMatch | None = None
    snr_db: float | None = None
    """Audio decoded in one window, against the reference."""
    streamed_snr_db: float | None = None
    """Streamed audio, against the reference. Windows see less of their context."""
    problems: tuple[str, ...] = ()
    """What differs."""
    left_out: tuple[str, ...] = ()
    """Parts that could not be compared."""
    failure: str | None = None
    """Why the comparison failed as a whole."""

    @property
    def agrees(self) -> bool:
        return not self.problems and self.failure is None

    @property
    def near_ties(self) -> tuple[Difference, ...]:
        return tuple(tie for match in (self.text, self.codes) if match is not None for tie in match.near_ties)

    @property
    def num_tokens(self) -> int:
        return sum(match.num_tokens for match in (self.text, self.codes) if match is not None)


@dataclass(frozen=True)
class Precision:
    """Types in which this server computes: float32, bfloat16 or float16."""

    language_models: str
    decoder: str | None
    """None if there is no decoder, or its options differ from the reference's."""


def compare(
    case: Case, answer: Answer | str, reference: ReferenceAnswer | str, precision: Precision
) -> CaseResult:
    """`reference` was forced along `answer`. A `str` says why there is none."""
    if isinstance(answer, str):
        return CaseResult(case, failure=answer)
    if isinstance(reference, str):
        return CaseResult(case, failure=reference)
    problems, left_out = [], []
    if answer.prompt_tokens != reference.prompt_tokens:
        problems.append(f"prompt: {answer.prompt_tokens} tokens, reference {reference.prompt_tokens}")
    text = None
    if reference.given_ids is None:
        text = token_match(answer.text_ids, reference.text, precision.language_models)
        problems += _told("text", text)
    elif answer.text_ids != reference.given_ids:
        problems.append(f"text to be read: {len(answer.text_ids)} tokens are not the reference's")
    if case.voice is None:
        return CaseResult(case, text, problems=tuple(problems))

    codes = token_match(answer.codes, reference.codes, precision.language_models)
    problems += _told("codes", codes)
    snr_db, streamed_snr_db = None, None
    if not answer.codes:
        left_out.append("waveform: there are no codes")
    elif precision.decoder is None:
        left_out.append("waveform: the decoder's options in the stage config are not the reference's")
    else:
        streamed_snr_db = signal_to_noise_db(reference.waveform, answer.streamed)
        problems += _lengths("streamed waveform", answer.streamed, reference.waveform)
        if answer.whole is None:
            left_out.append("waveform in one window: it would be longer than the stage config's longest")
        else:
            snr_db = signal_to_noise_db(reference.waveform, answer.whole)
            least = MIN_SNR_DB[precision.decoder]
            problems += _lengths("waveform", answer.whole, reference.waveform)
            if snr_db < least:
                problems.append(f"waveform: {snr_db:.1f} dB, where at least {least:g} are expected")
    return CaseResult(case, text, codes, snr_db, streamed_snr_db, tuple(problems), tuple(left_out))


def token_match(tokens: Sequence[int], differences: Sequence[Difference], dtype: str) -> TokenMatch:
    """Splits `differences` by whether rounding in `dtype` explains them."""
    near = NEAR_TIE[dtype]
    return TokenMatch(
        len(tokens),
        tuple(d for d in differences if d.margin <= near * d.largest),
        tuple(d for d in differences if d.margin > near * d.largest),
    )


def signal_to_noise_db(signal: Samples, other: Samples) -> float:
    """SNR of `other` against `signal`, both [num_samples]; infinite if they are equal, NaN if their lengths
    differ."""
    if signal.shape != other.shape:
        return math.nan
    if np.array_equal(signal, other):
        return math.inf
    noise = float(np.mean((signal.astype(np.float64) - other) ** 2))
    power = float(np.mean(signal.astype(np.float64) ** 2))
    return 10 * math.log10(power / noise) if power else -math.inf


def _lengths(what: str, ours: Samples, reference: Samples) -> list[str]:
    return [] if len(ours) == len(reference) else [f"{what}: {len(ours)} samples, reference {len(reference)}"]


def _told(what: str, match: TokenMatch) -> list[str]:
    if not match.differences:
        return []
    first = match.differences[0]
    others = len(match.differences) - 1
    more = f", and {others} more" if others else ""
    return [
        f"{what}: first difference at token {first.index} of {match.num_tokens}: {first.ours}, reference "
        f"{first.reference}, ahead by {first.margin:.3g} of a largest logit of {first.largest:.3g}{more}"
    ]
