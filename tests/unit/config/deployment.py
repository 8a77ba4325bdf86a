"""A whole, valid deployment as plain data, for tests that break one thing in it."""

import copy
from collections.abc import Mapping
from typing import Any

_DEPLOYMENT: dict[str, Any] = {
    "model_family": "stages.qwen2_5_omni:FAMILY",
    "platform": "cuda",
    "stages": {
        "thinker": {
            "engine": "ar",
            "model_stage": "thinker",
            "devices": [0],
            "gpu_memory_utilization": 0.5,
            "max_model_len": 4096,
        },
        "talker": {
            "engine": "ar",
            "model_stage": "talker",
            "devices": [0],
            "gpu_memory_utilization": 0.2,
            "max_model_len": 4096,
            "default_sampling": {"temperature": 0.9},
            "predictor_sampling": {},
        },
        "code2wav": {
            "engine": "diffusion",
            "model_stage": "code2wav",
            "devices": [0],
            "gpu_memory_utilization": 0.1,
            "max_model_len": 2048,
            "solver": {"num_steps": 10},
        },
    },
    "edges": [
        {
            "from": "thinker",
            "to": "talker",
            "queue": {"capacity": 4},
        },
        {
            "from": "talker",
            "to": "code2wav",
            "queue": {"transport": "inline"},
            "chunks": {"past_blocks": 2, "max_start_delay_s": 4.0},
        },
    ],
}


def deployment() -> dict[str, Any]:
    """A fresh copy of the valid deployment."""
    return copy.deepcopy(_DEPLOYMENT)


def deployment_with(path: str, value: object) -> dict[str, Any]:
    """The deployment with `value` set at a dotted path, as in `stages.talker.devices` or `edges.0.to`."""
    return deployment_with_all({path: value})


def deployment_with_all(changes: Mapping[str, object]) -> dict[str, Any]:
    """The deployment with each value set at its dotted path."""
    document = deployment()
    for path, value in changes.items():
        parent, last = _place(document, path)
        parent[last] = value
    return document


def deployment_without(path: str) -> dict[str, Any]:
    """The deployment without what stands at a dotted path."""
    document = deployment()
    parent, last = _place(document, path)
    del parent[last]
    return document


def _place(document: dict[str, Any], path: str) -> tuple[Any, Any]:
    *parents, last = path.split(".")
    target: Any = document
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    return target, int(last) if isinstance(target, list) else last
