"""The request body for each kind of server, one function each."""

import base64
from collections.abc import Callable

from pydantic import JsonValue

from benchmarks.serving.client import Served
from benchmarks.serving.workload import Turn, Workload

Body = dict[str, JsonValue]
"""The JSON to post."""

_CODEC_END_IDS = range(8194, 8448)
"""Ids in the vocabulary of Qwen2.5-Omni's talker that are not codec tokens. As stop ids, they are barred
until `min_tokens` are written."""


def openai_text(served: Served, workload: Workload, turn: Turn) -> Body:
    """Plain `vllm serve`: text only."""
    content: JsonValue = turn.text
    if turn.wav is not None:
        data = base64.b64encode(turn.wav).decode("ascii")
        parts: list[JsonValue] = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
        if turn.text:
            parts.append({"type": "text", "text": turn.text})
        content = parts
    return {
        "model": served.model,
        "messages": [{"role": "system", "content": turn.system}, {"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        **_exact_length(workload.text_tokens),
    }


def omni_server(served: Served, workload: Workload, turn: Turn) -> Body:
    body = openai_text(served, workload, turn)
    body["modalities"] = list(workload.modalities.split(","))
    if workload.codec_tokens:
        body["audio"] = {"voice": served.voice, "format": "pcm16"}
        body["stage_sampling"] = {"talker": _exact_length(workload.codec_tokens)}
    return body


def vllm_omni(served: Served, workload: Workload, turn: Turn) -> Body:
    """vLLM-Omni 0.30: the voice is a separate field; `sampling_params_list` has one entry per stage and
    replaces the stage's defaults, so those of its deploy file for Qwen2.5-Omni are repeated here.

    Follows its source code; the lengths are exact, as vLLM's `SamplingParams` define them.
    """
    body = openai_text(served, workload, turn)
    body["modalities"] = list(workload.modalities.split(","))
    if not workload.codec_tokens:
        return body
    thinker: Body = {
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 42,
        "repetition_penalty": 1.1,
        **_exact_length(workload.text_tokens),
    }
    talker: Body = {
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 40,
        "seed": 42,
        "repetition_penalty": 1.05,
        "stop_token_ids": list(_CODEC_END_IDS),
        **_exact_length(workload.codec_tokens),
    }
    code2wav: Body = {"temperature": 0.0, "max_tokens": 2048}
    body["audio"] = {"format": "wav"}
    body["voice"] = served.voice
    body["sampling_params_list"] = [thinker, talker, code2wav]
    return body


def image_generation(served: Served, workload: Workload, turn: Turn) -> Body:
    """For `/v1/images/generations` of omni-server. What the workload leaves to the server is left out."""
    body: Body = {
        "model": served.model,
        "prompt": turn.text,
        "stream": True,
        "partial_images": workload.partial_images,
    }
    if workload.size is not None:
        body["size"] = workload.size
    if workload.steps is not None:
        body["num_inference_steps"] = workload.steps
    return body


def text_to_speech(served: Served, workload: Workload, turn: Turn) -> Body:
    """For `/v1/audio/speech`. A server without `stage_sampling` ends the speech by itself."""
    return {
        "model": served.model,
        "input": turn.text,
        "voice": served.voice,
        "response_format": "pcm",
        "stream": True,
        "stage_sampling": {"talker": _exact_length(workload.codec_tokens)},
    }


Adapter = Callable[[Served, Workload, Turn], Body]
ADAPTERS: dict[str, Adapter] = {
    "omni-server": omni_server,
    "vllm-omni": vllm_omni,
    "openai-text": openai_text,
}
"""For chats, by kind of server."""


def _exact_length(tokens: int) -> Body:
    return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
