"""Our sampling settings -> vLLM's `SamplingParams`, for autoregressive stages."""

import json
from dataclasses import fields
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from omni_server.config.stages import SamplingDefaults
from omni_server.errors import InvalidRequestError
from omni_server.protocol.rows import REQUEST_KEY, RowsInput, RowsOutput, encode
from omni_server.types import SamplingConfig, StructuredOutput

StageSampling = SamplingParams
"""What `ArHandle.open` takes; built here, opaque to the layers above."""

_MINUS_ONE_SEED = 2**63 - 1
"""Stands for -1, which vLLM takes for no seed at all."""


def merged(defaults: SamplingDefaults, request: SamplingConfig | None) -> SamplingConfig:
    """The request's value where it has one, else the stage config's."""
    given = {} if request is None else {f.name: getattr(request, f.name) for f in fields(request)}
    chosen = defaults.model_dump(exclude_none=True) | {k: v for k, v in given.items() if v is not None}
    return SamplingConfig(**chosen)


def sampling_params(
    stage: str,
    sampling: SamplingConfig,
    *,
    end_ids: tuple[int, ...],
    is_text: bool,
    rows: RowsOutput | RowsInput | None,
    structured_output: StructuredOutput | None = None,
) -> SamplingParams:
    """`end_ids` end the sequence unless `ignore_eos` is set; without text, they must not be sampled then
    either.

    The repetition penalty of a stage that is fed with rows goes to our runner: vLLM's makes each step wait
    for the one before. Raises `InvalidRequestError` for values that vLLM refuses.
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
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": _MINUS_ONE_SEED if sampling.seed == -1 else sampling.seed,
        "stop": list(sampling.stop) if sampling.stop else None,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "skip_special_tokens": sampling.skip_special_tokens,
        "logit_bias": dict(sampling.logit_bias) if sampling.logit_bias else None,
        "allowed_token_ids": None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        "bad_words": list(sampling.bad_words) if sampling.bad_words else None,
        "logprobs": sampling.logprobs,
        "structured_outputs": None if structured_output is None else _structured(structured_output),
    }
    try:
        params = SamplingParams(
            **{name: value for name, value in arguments.items() if value is not None},
            max_tokens=sampling.max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            # vLLM would add the tokenizer's end token; end_ids say which ones count.
            ignore_eos=True,
            detokenize=is_text,
            output_kind=RequestOutputKind.DELTA,
            extra_args={},
            skip_clone=True,  # made for one request: vLLM would copy all of it in depth
        )
    except (VLLMClientError, ValueError) as exc:
        raise InvalidRequestError(f"{stage}: {exc}") from exc
    if rows is not None:
        add_rows(params, rows)
    return params


def add_rows(params: SamplingParams, rows: RowsOutput | RowsInput) -> None:
    """The request sends rows, or is fed with rows."""
    params.extra_args = {REQUEST_KEY: encode(rows)}


def _structured(output: StructuredOutput) -> StructuredOutputsParams:
    match output.kind:
        case "choice":
            return StructuredOutputsParams(choice=json.loads(output.value))
        case "json":
            return StructuredOutputsParams(json=output.value)
        case "regex":
            return StructuredOutputsParams(regex=output.value)
        case "grammar":
            return StructuredOutputsParams(grammar=output.value)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=output.value)
