"""The voices of a checkpoint: `spk_dict.pt` beside its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from omni_server.config.checkpoint_files import config_errors
from omni_server.errors import ConfigError

VOICES_FILE = "spk_dict.pt"


@dataclass(frozen=True)
class Voice:
    """One speaker's inputs to the talker's prompt and the DiT."""

    name: str
    bos_token: int
    """Text token that names the speaker in the talker's prompt."""
    conditioning: torch.Tensor
    """x-vector, float32 [1, enc_emb_dim]."""
    reference_mel: torch.Tensor
    """Mel spectrogram of the speaker, float32 [1, num_frames, mel_dim]."""


def load_voices(model_dir: Path) -> dict[str, Voice]:
    """Returns voices by case-sensitive name, in the file's order.

    The file is a pickle, read with `weights_only=True`: tensors and numbers, no code. Raises `ConfigError` if
    it is missing or its layout is not {name: {"bos_token": int, "cond": [1, dim], "ref_mel": [1, frames,
    dim]}}.
    """
    path = model_dir / VOICES_FILE
    if not path.is_file():
        raise ConfigError(
            f"{model_dir} has no {VOICES_FILE}: speech needs the checkpoint's voices, download it whole"
        )
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Without torch's text, which advises to trust the file.
        raise ConfigError(
            f"{path} cannot be read as tensors ({type(error).__name__}): download it again"
        ) from error
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path} holds no voices")
    with config_errors(f"{path} holds no voices"):
        return {str(name): _voice(path, str(name), entry) for name, entry in content.items()}


def _voice(path: Path, name: str, entry: object) -> Voice:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: voice '{name}' is {type(entry).__name__}, not a mapping")
    missing = {"bos_token", "cond", "ref_mel"} - entry.keys()
    if missing:
        raise ConfigError(f"{path}: voice '{name}' lacks {', '.join(sorted(missing))}")
    for key, num_dims in (("cond", 2), ("ref_mel", 3)):
        tensor = entry[key]
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != num_dims or tensor.shape[0] != 1:
            shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{path}: '{key}' of voice '{name}' must have {num_dims} dimensions, the first 1: {shape}"
            )
    return Voice(name, int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
