"""Writes a demo checkpoint into a folder atomically."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen2_5OmniForConditionalGeneration

from omni_server.errors import ConfigError
from scripts.demo_checkpoint.config import (
    DEMO_PREPROCESSING,
    Preprocessing,
    demo_model_config,
    write_configs,
)
from scripts.demo_checkpoint.genuine import (
    GENUINE_MEL_FRAMES,
    GENUINE_PREPROCESSING,
    GENUINE_SIZES,
    genuine_model_config,
)
from scripts.demo_checkpoint.sizes import SIZES, DemoSize
from scripts.demo_checkpoint.tokenizer import TokenIds, Vocabulary, write_tokenizer
from scripts.demo_checkpoint.weights import fill, speakers

Dtype = Literal["float32", "bfloat16"]
Weights = Literal["random", "dummy"]

DEMO_MEL_FRAMES = 120


@dataclass(frozen=True)
class _Contents:
    """What is to be written."""

    size: DemoSize | str
    """A name: one of `GENUINE_SIZES`."""
    vocabulary: Vocabulary
    dtype: Dtype
    weights: Weights
    preprocessing: Preprocessing
    num_mel_frames: int


def make_demo_checkpoint(
    out: Path,
    *,
    size: DemoSize | str = "tiny",
    weights: Weights = "random",
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
    dtype: Dtype | None = None,
) -> Path:
    """Write a Qwen2.5-Omni in the published layout; returns `out`.

    `size` is one of `SIZES` or of `GENUINE_SIZES`, the sizes of Qwen2.5-Omni-7B and -3B. `weights` "dummy"
    omits model.safetensors: serve such a folder with `--load-format dummy`. Genuine sizes require it.
    `vocabulary` is "small" (the default) or "full", `dtype` "float32" (the default) or "bfloat16"; genuine
    sizes have "full" and "bfloat16".

    The same arguments give the same model.safetensors, byte for byte (with one release of torch, on machines
    with AVX2). `dtype` applies to the thinker and the talker; code2wav stays in float32, in which the
    reference always runs it. The folder appears under its name only when it is complete.

    Raises `ConfigError` for an unknown size, for options that a genuine size cannot have, and if `out`
    exists and is not an empty folder.
    """
    contents = _contents(size, weights, vocabulary, dtype)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"cannot write the demo checkpoint to {out}: it exists; remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(unfinished, contents, seed)
        unfinished.chmod(0o755)  # mkdtemp's is private
        try:
            unfinished.rename(out)  # replaces an empty folder
        except OSError as error:
            raise ConfigError(
                f"cannot write the demo checkpoint to {out}: {error.strerror}; remove it first"
            ) from error
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return out


def _contents(
    size: DemoSize | str, weights: Weights, vocabulary: Vocabulary | None, dtype: Dtype | None
) -> _Contents:
    if isinstance(size, str) and size in GENUINE_SIZES:
        if weights == "random":
            raise ConfigError(
                f"size {size} is written without weights only: they would be {GENUINE_SIZES[size]} GB of random "
                "numbers, which the engines draw faster than they read them; use weights dummy"
            )
        if vocabulary == "small" or dtype == "float32":
            raise ConfigError(f"size {size} has the full vocabulary and bfloat16, as published")
        return _Contents(size, "full", "bfloat16", weights, GENUINE_PREPROCESSING, GENUINE_MEL_FRAMES)
    if isinstance(size, str):
        if size not in SIZES:
            raise ConfigError(
                f"unknown demo checkpoint size '{size}'; there are {', '.join((*SIZES, *GENUINE_SIZES))}"
            )
        size = SIZES[size]
    return _Contents(
        size, vocabulary or "small", dtype or "float32", weights, DEMO_PREPROCESSING, DEMO_MEL_FRAMES
    )


def _write(folder: Path, contents: _Contents, seed: int) -> None:
    ids = write_tokenizer(folder, contents.vocabulary)
    size = contents.size
    model = (
        genuine_model_config(size) if isinstance(size, str) else demo_model_config(size, ids, contents.dtype)
    )
    write_configs(folder, model, ids, contents.preprocessing)
    if contents.weights == "random":
        _write_weights(folder, ids, seed, contents.dtype)
    torch.save(speakers(ids, seed, contents.num_mel_frames), folder / "spk_dict.pt")
    for file in folder.iterdir():
        file.chmod(0o644)


def _write_weights(folder: Path, ids: TokenIds, seed: int, dtype: Dtype) -> None:
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights, which are then overwritten
        model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder)).float().eval()
    fill(model, ids, seed)
    target = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model.thinker.to(target)
    model.talker.to(target)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
