"""What schemathesis cannot know when it makes requests: which model is served, what sound and image files
look like, and the rules between fields. Loaded by schemathesis, in a process of its own.
"""

import io
from typing import Any

import numpy as np
import schemathesis
import soundfile
from PIL import Image
from schemathesis.transport.serialization import Binary

MODEL = "omni"
CONVERSATION = [{"role": "user", "content": "hi"}]
BOUND_TO_OTHERS = (
    "allowed_token_ids",
    "ignore_eos",
    "logit_bias",
    "min_tokens",
    "response_format",
    "skip_special_tokens",
    "stage_sampling",
    "stream_options",
    "structured_outputs",
    "tool_choice",
    "tools",
    "top_logprobs",
)
"""Fields of a chat request that are refused beside some values of others."""


def _sound_file() -> bytes:
    file = io.BytesIO()
    samples = 0.3 * np.sin(2 * np.pi * 440 * np.arange(2400) / 24_000)
    soundfile.write(file, samples.astype(np.float32), 24_000, format="WAV")
    return file.getvalue()


def _image_file() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    return file.getvalue()


SOUND = Binary(_sound_file())
PICTURE = Binary(_image_file())


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: schemathesis.Case) -> schemathesis.Case:
    """Most requests name the served model and a voice. Of those that are right by the schema, half of the
    files are sound or images, and a third of the chats keep the rules between fields, too, so that they are
    answered."""
    name = case.path_parameters.get("model_id") if isinstance(case.path_parameters, dict) else None
    if isinstance(name, str) and len(name) % 2 == 0:
        case.path_parameters["model_id"] = MODEL
    if isinstance(case.body, dict):
        # Asked first, and changed in place: a body that was changed is judged anew, and files are no strings
        # then.
        is_right = case.meta is not None and not case.meta.generation.mode.is_negative
        body = case.body
        _name_what_is_there(body)
        if is_right:
            for field in ("file", "audio_sample"):
                file = body.get(field)
                if isinstance(file, bytes | str) and len(file) % 2 == 0:
                    body[field] = SOUND
            images = body.get("image")
            if isinstance(images, list) and len(images) % 2 == 1:
                body["image"] = [PICTURE] * len(images)
                body.pop("size", None)
                body.pop("stream", None)
                body.pop("partial_images", None)
                body.pop("lora", None)  # none of the model's has such a name
            if "messages" in body and len(str(body)) % 3 == 0:
                _keep_rules(body)
    return case


def _name_what_is_there(body: dict[str, Any]) -> None:
    model, voice = body.get("model"), body.get("voice")
    if isinstance(model, str) and model and len(model) % 4 != 3:
        body["model"] = MODEL
    if isinstance(voice, str) and len(voice) % 4 != 3:
        body["voice"] = "alloy"
    if "audio_sample" in body and isinstance(body.get("name"), str):
        body["name"] = "alloy"


def _keep_rules(body: dict[str, Any]) -> None:
    for field in BOUND_TO_OTHERS:
        body.pop(field, None)
    body["model"] = MODEL
    body["messages"] = CONVERSATION
    if "audio" in (body.get("modalities") or []):
        body["audio"] = {"voice": "alloy", "format": "wav"}
        body.pop("n", None)
