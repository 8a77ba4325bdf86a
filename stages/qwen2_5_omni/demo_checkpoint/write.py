"""Writing a demo checkpoint into a folder, all of it or nothing."""

import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen2_5OmniForConditionalGeneration

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.demo_checkpoint.config import write_configs
from stages.qwen2_5_omni.demo_checkpoint.sizes import DemoSize, demo_size
from stages.qwen2_5_omni.demo_checkpoint.tokenizer import Vocabulary, write_tokenizer
from stages.qwen2_5_omni.demo_checkpoint.weights import fill, speakers

Dtype = Literal["float32", "bfloat16"]


def make_demo_checkpoint(
    out: Path,
    *,
    size: DemoSize | str = "tiny",
    seed: int = 0,
    vocabulary: Vocabulary = "small",
    dtype: Dtype = "float32",
) -> Path:
    """Write a Qwen2.5-Omni with random weights in the layout of the published ones; returns `out`.

    The same arguments give the same model.safetensors, byte for byte (with one release of torch, on machines with
    AVX2). `dtype` is that of the thinker and the talker; code2wav stays in float32, in which the reference always runs
    it. The folder appears under its name only when it is complete.

    Raises `ConfigError` for an unknown size and where `out` exists already and is not an empty folder.
    """
    dimensions = demo_size(size) if isinstance(size, str) else size
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"cannot write the demo checkpoint to {out}: it exists; remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(unfinished, dimensions, seed, vocabulary, dtype)
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


def _write(folder: Path, size: DemoSize, seed: int, vocabulary: Vocabulary, dtype: Dtype) -> None:
    ids = write_tokenizer(folder, vocabulary)
    write_configs(folder, size, ids, dtype)
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights, which are then overwritten
        model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder)).float().eval()
    fill(model, ids, seed)
    target = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model.thinker.to(target)
    model.talker.to(target)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(speakers(ids, seed), folder / "spk_dict.pt")
    for file in folder.iterdir():
        file.chmod(0o644)
