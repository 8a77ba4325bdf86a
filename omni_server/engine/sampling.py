"""Converts our sampling settings to vLLM's `SamplingParams`, for autoregressive stages."""

import json
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from omni_server.config.stages import SamplingDefaults
from omni_server.engine.prompt_rendering import context_length_exceeded
from omni_server.errors import InvalidRequestError
from omni_server.protocol.rows import REQUEST_KEY, RowsInput, RowsOutput, encode
from omni_server.types import SamplingConfig, StructuredOutput

StageSampling = SamplingParams
"""Parameters of `ArHandle.open`; built here, opaque to the layers above."""

_MINUS_ONE_SEED = 2**63 - 1
"""Replaces -1, which vLLM interprets as no seed at all."""


def merged(defaults: SamplingDefaults, request: SamplingConfig | None) -> SamplingConfig:
    """Returns the request's values, and those of the stage config where the request has none."""
    given = {} if request is None else _given(request)
    values = defaults.model_dump(exclude_none=True) | given
    if "min_tokens" in values and "min_tokens" not in given and "max_tokens" in values:
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    return SamplingConfig(**values)


def _given(sampling: SamplingConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(sampling).items() if value is not None}


def sampling_params(
    stage: str,
    sampling: SamplingConfig,
    *,
    end_ids: tuple[int, ...],
    is_text: bool,
    rows: RowsOutput | RowsInput | None = None,
    structured_output: StructuredOutput | None = None,
) -> SamplingParams:
    """`end_ids` end the sequence unless `ignore_eos` is set. Without text, they must not be sampled in that
    case.

    Raises `InvalidRequestError` for values that vLLM rejects.
    """
    min_tokens = sampling.min_tokens or 0
    stop_token_ids = list(sampling.stop_token_ids or ())
    if not sampling.ignore_eos:
        stop_token_ids += end_ids
    elif not is_text:
        # An end id among codec tokens has no audio: with min_tokens, it is never sampled.
        stop_token_ids += end_ids
        if sampling.max_tokens is None:
            raise InvalidRequestError(
                f"'ignore_eos' on the {stage} needs 'max_tokens'", param=f"stage_sampling.{stage}.max_tokens"
            )
        min_tokens = sampling.max_tokens
    values = {
        name: list(value) if isinstance(value, tuple) else value for name, value in _given(sampling).items()
    }
    values |= {
        "max_tokens": sampling.max_tokens,  # vLLM's default is 16
        "min_tokens": min_tokens,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": True,  # vLLM would add the tokenizer's end token; end_ids say which ones count
        "logit_bias": dict(sampling.logit_bias) if sampling.logit_bias else None,
        "seed": _MINUS_ONE_SEED if sampling.seed == -1 else sampling.seed,
        "structured_outputs": None if structured_output is None else _structured(structured_output),
        "detokenize": is_text,
        "output_kind": RequestOutputKind.DELTA,
        "extra_args": {},
        "skip_clone": True,  # made for one request; vLLM would deep-copy it
    }
    try:
        params = SamplingParams(**values)
    except VLLMClientError as exc:
        raise InvalidRequestError(f"{stage}: {exc}") from exc
    if rows is not None:
        add_rows(params, rows)
    return params


def add_rows(params: SamplingParams, rows: RowsOutput | RowsInput) -> None:
    """Makes the request send rows, or receive them."""
    params.extra_args = {REQUEST_KEY: encode(rows)}


def limit_tokens(
    stage: str,
    params: SamplingParams,
    max_model_len: int,
    prompt_length: int,
    *,
    asked: SamplingConfig | None,
    text_fields: tuple[str, str] | None = None,
) -> None:
    """Lowers `params` to what the stage may sample after a prompt of `prompt_length` tokens.

    `asked` holds the request's own settings for the stage: its `max_tokens` and `min_tokens` must fit the
    context. Values from the stage config are cut to the context instead. `text_fields`: the request's fields
    for both, if the stage writes text. Raises `InvalidRequestError`.
    """
    max_tokens, min_tokens = (None, None) if asked is None else (asked.max_tokens, asked.min_tokens)
    needed = prompt_length + (max_tokens or min_tokens or 1)
    room = max_model_len - prompt_length
    if needed > max_model_len:
        fields = text_fields or (f"stage_sampling.{stage}.max_tokens", f"stage_sampling.{stage}.min_tokens")
        param = "messages" if room < 1 else fields[0] if max_tokens else fields[1]
        raise context_length_exceeded(max_model_len, needed, param)
    params.max_tokens = min(room if params.max_tokens is None else params.max_tokens, room)
    params.min_tokens = min(params.min_tokens, params.max_tokens)


def _structured(output: StructuredOutput) -> StructuredOutputsParams:
    value = json.loads(output.value) if output.kind == "choice" else output.value
    return StructuredOutputsParams(**{output.kind: value})
