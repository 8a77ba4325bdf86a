"""Resolves the checkpoint and the stage config of a command: the named config, or else one that is planned
for this machine's GPUs or CPU."""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from omni_server.check.files import read_weights, refuse_damaged_files
from omni_server.check.machine import (
    Gpu,
    gpus_of_this_machine,
    has_gpu,
    memory_of_this_machine,
    refuse_cuda_build_without_gpu,
)
from omni_server.check.memory import ModelSizes
from omni_server.check.placement import budget, check_cpu_plan, plan
from omni_server.check.stage_flags import NO_STAGE_FLAGS, StageFlags
from omni_server.config.load import find_shipped_config, find_stage_config, load_stage_config
from omni_server.config.model_folder import architectures_of, resolve_model_folder
from omni_server.config.speech_model import SPOKEN_LLM, joined_folder
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment, set_library_environment
from omni_server.errors import ConfigError
from omni_server.family import (
    ModelFamily,
    family_of,
    load_family,
    servable_architectures,
    without_missing_voice_encoder,
)
from omni_server.types import Output

logger = logging.getLogger(__name__)

LARGEST_DEMO = 500_000_000
"""Most parameters of a checkpoint that counts as a demo (those of scripts/make_demo_checkpoint have a few
million) and runs on any machine. The family's smallest genuine model has 5.5 billion."""


def find_folder(
    model: str,
    speech_model: str | None,
    *,
    architectures: Collection[str],
    revision: str | None = None,
    needs_weights: bool = True,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """See `resolve_model_folder`. With a `speech_model`, `model` is any language model, and both are in the
    folder."""
    resolve = functools.partial(resolve_model_folder, needs_weights=needs_weights, on_progress=on_progress)
    if speech_model is None:
        return resolve(model, architectures=architectures, revision=revision)
    if SPOKEN_LLM not in architectures:
        raise ConfigError(
            f"speech model '{speech_model}': the stage config is for {', '.join(architectures)}, which "
            "needs none"
        )
    llm = resolve(model, revision=revision)
    if family_of(names := architectures_of(llm)) is not None:
        raise ConfigError(
            f"MODEL '{model}' ({', '.join(names)}) needs no speech model: leave out --speech-model, or give "
            "a language model"
        )
    # `spoken_llm` takes its voices from this family.
    voices = load_family("qwen3_tts").architectures
    return joined_folder(llm, resolve(speech_model, architectures=voices, argument="--speech-model"))


def base_config(folder: Path, name: str, *, on_gpu: bool) -> tuple[ModelFamily, Path, StageConfig]:
    """Returns the family that runs a checkpoint, and the shipped config that plans for it begin with. `name`
    is the model's name in messages.

    Raises `ConfigError` if no config is shipped for it.
    """
    architectures = architectures_of(folder)
    family = family_of(architectures)
    if family is None or family.default_configs is None:
        raise ConfigError(
            f"{name} ({', '.join(sorted(architectures))}) needs a stage config, and none is shipped for it: "
            "give one with --stage-config"
        )
    defaults = family.default_configs
    path = find_shipped_config(defaults.gpu if on_gpu else defaults.cpu or defaults.demo)
    return family, path, load_for(path, family.outputs(folder))


def load_for(path: Path, outputs: Collection[Output]) -> StageConfig:
    """A shipped config, reduced to `outputs`: without a talker, the thinker is served alone."""
    return load_stage_config(path).reduced_to(outputs)


def resolve_deployment(
    model: str,
    stage_config: str | Path | StageConfig | None,
    *,
    speech_model: str | None = None,
    use_cpu: bool = False,
    flags: StageFlags = NO_STAGE_FLAGS,
    revision: str | None = None,
    load_format: str = "auto",
    on_progress: Callable[[str], None] = lambda line: None,
) -> tuple[Path, StageConfig]:
    """Returns the checkpoint's folder, downloaded if necessary, and the config. `stage_config` may be a file
    or the name of a shipped config; None makes one for `model` and this machine. `speech_model`: None is the
    config's.

    Raises `ConfigError` for an invalid config, or one that this machine or this checkpoint cannot run, before
    downloading weights, and for a checkpoint with missing or damaged files.
    """
    set_library_environment()
    if stage_config is None:
        folder = find_folder(
            model,
            speech_model,
            architectures=servable_architectures(),
            revision=revision,
            needs_weights=False,
            on_progress=on_progress,
        )
        config = default_stage_config(folder, model, use_cpu=use_cpu, flags=flags)
        on_progress(f"stage config made for this machine, {describe(config)}")
    elif isinstance(stage_config, StageConfig):
        config = flags.applied(stage_config)
    else:
        path = find_stage_config(str(stage_config))
        on_progress(f"stage config {path}")
        config = load_stage_config(path)
        if config.platform == "cuda" and use_cpu:
            raise ConfigError(f"{path}: platform is cuda, which --cpu contradicts")
        config = flags.applied(config)
        if config.platform == "cuda" and not has_gpu():
            defaults = load_family(config.model_family).default_configs
            example = "" if defaults is None else f", such as {defaults.demo}"
            raise ConfigError(
                f"{path}: platform is cuda, but torch finds no NVIDIA GPU here; choose a config with "
                f"platform cpu{example}"
            )
    if config.platform == "cpu":
        refuse_cuda_build_without_gpu()
    family = load_family(config.model_family)
    find = functools.partial(
        find_folder,
        model,
        speech_model or config.speech_model,
        architectures=family.architectures,
        revision=revision,
    )
    config = without_missing_voice_encoder(config, family, find(needs_weights=False, on_progress=on_progress))
    folder = find(needs_weights=load_format != "dummy")
    refuse_damaged_files(folder, config, load_format=load_format)
    return folder, config


def default_stage_config(
    folder: Path, name: str, *, use_cpu: bool = False, flags: StageFlags = NO_STAGE_FLAGS
) -> StageConfig:
    """Makes a config for a checkpoint and this machine. `name` is the model's name in messages.

    Raises a one-line `ConfigError` if it cannot run.
    """
    on_gpu = has_gpu() and not use_cpu
    family, _, base = base_config(folder, name, on_gpu=on_gpu)
    base = flags.applied(base)
    set_engine_environment(base)  # the family's imports read it
    model = ModelSizes(name, family.footprints(folder, base), read_weights(folder, base))
    gpus = gpus_of_this_machine() if on_gpu else []
    config = chosen_config(gpus, base, model, family, use_cpu=use_cpu, flags=flags)
    if on_gpu:
        return config
    check_cpu_plan(memory_of_this_machine(), config, model)
    if config is base:
        logger.warning(
            "%s runs on the processor, which is much slower than speech; OMP_NUM_THREADS says how many "
            "cores each engine uses",
            name,
        )
    return config


def chosen_config(
    gpus: Sequence[Gpu],
    base: StageConfig,
    model: ModelSizes,
    family: ModelFamily,
    *,
    use_cpu: bool = False,
    flags: StageFlags = NO_STAGE_FLAGS,
) -> StageConfig:
    """Plans `base`, which has the flags, for `gpus`; without GPUs, returns `base` or the demo's config.
    Raises `ConfigError`."""
    defaults = family.default_configs
    assert defaults is not None  # `base` is one of them
    if gpus:
        if (share := flags.gpu_memory_utilization) is not None:
            gpus = [replace(gpu, free=budget(gpu, share)) for gpu in gpus]
        return plan(gpus, base, model, flags.quantization, flags.max_model_len or 0)
    if model.num_parameters <= LARGEST_DEMO:
        return flags.applied(load_for(find_shipped_config(defaults.demo), base.outputs))
    name = f"{model.name} ({model.num_parameters / 1e9:.1f} billion parameters)"
    if defaults.cpu is None:
        raise ConfigError(f"{name} needs an NVIDIA GPU: it is too slow on a processor")
    if not use_cpu:
        raise ConfigError(
            f"{name} needs an NVIDIA GPU, and torch finds none here; with --cpu it runs on the processor (stage "
            f"config {defaults.cpu}), much slower than speech"
        )
    return base


def describe(config: StageConfig) -> str:
    """A one-line summary."""
    stages = []
    for name, stage in config.stages.items():
        where = f"device {','.join(map(str, stage.devices))}, share {stage.gpu_memory_utilization:g}, "
        stages.append(
            f"{name} ({where if config.platform == 'cuda' else ''}{stage.max_num_seqs} requests of at most "
            f"{stage.max_model_len} tokens)"
        )
    return f"platform {config.platform}: {', '.join(stages)}"
