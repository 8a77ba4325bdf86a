"""Log-probabilities as OpenAI's responses have them."""

from collections.abc import Sequence

from omni_server.api.responses import ChoiceLogprobs, ContentLogprob, TopLogprob
from omni_server.types import SampledToken, TokenLogprob

_LOWEST = -9999.0
"""JSON has no infinity. What OpenAI's documentation names for a token of no importance, and vLLM sends."""


def choice_logprobs(tokens: Sequence[SampledToken]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        content=[
            ContentLogprob(
                token=token.sampled.text,
                logprob=_finite(token.sampled),
                bytes=_bytes(token.sampled),
                top_logprobs=[TopLogprob(token=top.text, logprob=_finite(top), bytes=_bytes(top)) for top in token.top],
            )
            for token in tokens
        ],
        refusal=None,
    )


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _LOWEST)


def _bytes(token: TokenLogprob) -> list[int] | None:
    return list(token.utf8) or None
