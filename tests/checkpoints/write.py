"""Writes a demo checkpoint into a folder atomically."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from omni_server.errors import ConfigError
from tests.checkpoints.diffusers.checkpoint import DiffusersCheckpoints
from tests.checkpoints.json_files import dump
from tests.checkpoints.options import DemoFamily, Dtype, Options, Weights
from tests.checkpoints.qwen2_5_omni.checkpoint import Qwen25OmniCheckpoints
from tests.checkpoints.qwen3_omni.checkpoint import Qwen3OmniCheckpoints
from tests.checkpoints.qwen3_tts.checkpoint import Qwen3TTSCheckpoints
from tests.checkpoints.spoken_llm.checkpoint import SpokenLLMCheckpoints
from tests.checkpoints.tokenizer import Vocabulary

FAMILIES: dict[str, DemoFamily] = {
    "qwen2_5_omni": Qwen25OmniCheckpoints(),
    "qwen3_omni": Qwen3OmniCheckpoints(),
    "qwen3_tts": Qwen3TTSCheckpoints(),
    "spoken_llm": SpokenLLMCheckpoints(),
    "diffusers": DiffusersCheckpoints(),
}

_ABOUT = {"notice": "The weights of this model are random: it generates nonsense and noise."}


def make_demo_checkpoint(
    out: Path,
    *,
    family: str = "qwen2_5_omni",
    size: str = "tiny",
    weights: Weights = "random",
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
    dtype: Dtype | None = None,
    pipeline: str | None = None,
) -> Path:
    """Write a model of `family`, one of `FAMILIES`, in the published layout; returns `out`.

    `size` is one of the family's sizes: small ones, and those of published models. `weights` "dummy" omits
    model.safetensors: serve such a folder with `--load-format dummy`. Genuine sizes require it. `vocabulary`
    is "small" (the default) or "full", `dtype` "float32" (the default) or "bfloat16"; genuine sizes have
    "full" and "bfloat16". `pipeline` is one of the family's pipelines, if it has several.

    The same arguments give the same weights, byte for byte (with one release of torch, on machines
    with AVX2). The folder appears under its name only when it is complete.

    Raises `ConfigError` for an unknown family or size, for options that a genuine size cannot have, and if
    `out` exists and is not an empty folder.
    """
    if family not in FAMILIES:
        raise ConfigError(f"unknown demo checkpoint family '{family}'; there are {', '.join(FAMILIES)}")
    writer = FAMILIES[family]
    options = replace(
        _options(writer, size, weights, seed, vocabulary, dtype), pipeline=_pipeline(writer, family, pipeline)
    )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"cannot write the demo checkpoint to {out}: it exists; remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        writer.write(unfinished, options)
        dump(unfinished / "about.json", _ABOUT)
        for path in unfinished.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
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


def _pipeline(writer: DemoFamily, family: str, pipeline: str | None) -> str | None:
    if pipeline is None:
        return next(iter(writer.pipelines), None)
    if pipeline not in writer.pipelines:
        known = ", ".join(writer.pipelines) or "none"
        raise ConfigError(f"unknown pipeline '{pipeline}' of {family}; there are {known}")
    return pipeline


def _options(
    family: DemoFamily,
    size: str,
    weights: Weights,
    seed: int,
    vocabulary: Vocabulary | None,
    dtype: Dtype | None,
) -> Options:
    if size in family.genuine_sizes:
        if weights == "random":
            raise ConfigError(
                f"size {size} is written without weights only: they would be {family.genuine_sizes[size]} GB "
                "of random numbers, which the engines draw faster than they read them; use weights dummy"
            )
        if vocabulary == "small" or dtype == "float32":
            raise ConfigError(f"size {size} has the full vocabulary and bfloat16, as published")
        return Options(size, "full", "bfloat16", weights, seed)
    if size not in family.sizes:
        known = ", ".join((*family.sizes, *family.genuine_sizes))
        raise ConfigError(f"unknown demo checkpoint size '{size}'; there are {known}")
    return Options(size, vocabulary or "small", dtype or "float32", weights, seed)
