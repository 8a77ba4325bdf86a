"""A Qwen3-Omni checkpoint whose speech ends with its first code."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reference.cases import Case
from tests.reference.qwen3_reference import Qwen3Reference

_HEAD = "talker.codec_head.weight"


def make_silent(checkpoint: Path, out: Path, case: Case) -> Path:
    """Copy `checkpoint` to `out`, with a talker that has nothing to say to `case`; returns `out`."""
    reference = Qwen3Reference(checkpoint)
    states: list[torch.Tensor] = []
    reference.model.talker.codec_head.register_forward_pre_hook(
        lambda _module, inputs: states.append(inputs[0][0, -1])
    )
    reference.run(replace(case, talker_max_tokens=1))  # the first step decides
    shutil.copytree(checkpoint, out)
    end = json.loads((out / "config.json").read_text())["talker_config"]["codec_eos_token_id"]
    weights = load_file(out / "model.safetensors")
    weights[_HEAD][end] = 10 * states[0]  # of all rows of this length, the one with the largest logit
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
