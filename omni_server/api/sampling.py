"""Converts a request's sampling fields to one `SamplingConfig` per stage.

OpenAI's fields apply to the text. The extension `stage_sampling` applies to the stage that samples codec
tokens, by its name in the stage config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from omni_server.api.schemas import ChatCompletionRequest, SamplingFields, StageSampling, TextFields
from omni_server.api.validation import unsupported
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo, SamplingConfig


def stage_sampling(
    body: ChatCompletionRequest, model: ModelInfo, *, with_speech: bool
) -> Mapping[str, SamplingConfig]:
    """Uses OpenAI's fields for the text; `stage_sampling` and the common seed for the speech.

    Raises `InvalidRequestError` if a stage's minimum of tokens exceeds its maximum, or if fields contradict
    each other.
    """
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    text = sampling_of_text(body, max_tokens, _logprobs(body))
    if with_speech and body.skip_special_tokens is False:
        raise unsupported(
            "'skip_special_tokens' can be false only where the answer is text: special tokens cannot be "
            "spoken.",
            "skip_special_tokens",
        )
    speech = speech_sampling(body.stage_sampling, body.seed, model)
    return text_sampling(text, model) | (speech if with_speech else {})


def sampling_of_text(body: TextFields, max_tokens: int | None, logprobs: int | None) -> SamplingConfig:
    """Raises `InvalidRequestError` if the minimum of tokens exceeds the maximum, or for an unfit bias."""
    _check_min_tokens(body.min_tokens, max_tokens, "min_tokens")
    return replace(
        _common(body),
        max_tokens=max_tokens,
        stop=tuple(body.stop) if body.stop is not None else None,
        stop_token_ids=_distinct(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=_distinct(body.allowed_token_ids),
        bad_words=tuple(body.bad_words) if body.bad_words is not None else None,
        logprobs=logprobs,
    )


def text_sampling(sampling: SamplingConfig, model: ModelInfo) -> dict[str, SamplingConfig]:
    """Keyed by the text stage; empty without one."""
    return {} if model.text_stage is None else {model.text_stage: sampling}


def speech_sampling(
    given: Mapping[str, StageSampling] | None, seed: int | None, model: ModelInfo
) -> dict[str, SamplingConfig]:
    """Keyed by the stage that samples codec tokens; empty without one. `seed` is the default seed.

    Raises `InvalidRequestError` for other stages, and if the minimum of tokens exceeds the maximum.
    """
    name = model.speech_stage
    for other in given or {}:
        if other != name:
            known = f"only '{name}' can be given" if name is not None else "the served model does not speak"
            raise InvalidRequestError(
                f"Unknown parameter: 'stage_sampling.{other[:64]}'; {known}.",
                param=f"stage_sampling.{other[:64]}",
                code="unknown_parameter",
            )
    if name is None:
        return {}
    stage = (given or {}).get(name) or StageSampling()
    _check_min_tokens(stage.min_tokens, stage.max_tokens, f"stage_sampling.{name}.min_tokens")
    return {name: replace(_common(stage), seed=stage.seed if stage.seed is not None else seed)}


def _common(given: SamplingFields) -> SamplingConfig:
    config = SamplingConfig(**given.model_dump(include=set(SamplingFields.model_fields)))
    return replace(config, top_k=0) if config.top_k == -1 else config  # vLLM's older value for all tokens


def _distinct(token_ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if token_ids is None else tuple(dict.fromkeys(token_ids))


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """The number of likeliest tokens to return besides the sampled one; None without logprobs."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise InvalidRequestError(
            "'top_logprobs' is allowed only where 'logprobs' is true.", param="top_logprobs"
        )
    return None


def _logit_bias(bias: Mapping[str, float] | None) -> Mapping[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequestError(
                f"Invalid 'logit_bias': '{key[:64]}' is not a token id.",
                param="logit_bias",
                code="invalid_value",
            )
    return {int(key): value for key, value in bias.items()}


def _check_min_tokens(min_tokens: int | None, max_tokens: int | None, param: str) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(
            f"'{param}' is {min_tokens}, more than the {max_tokens} tokens that the request allows at most.",
            param=param,
        )
