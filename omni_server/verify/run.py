"""The whole comparison, from MODEL and a stage config to a report."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omni_server.check.default_config import resolve_deployment
from omni_server.check.machine import version_of
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError
from omni_server.family import (
    FamilyModel,
    ModelFamily,
    ReferenceImplementation,
    load_family,
    open_model,
)
from omni_server.protocol.reference import ReferenceAnswer, ReferenceJob
from omni_server.types import SAMPLE_RATE_HZ
from omni_server.verify.answers import NOISE_SEED, Answer, answer_all, repetition_penalties
from omni_server.verify.cases import Case, Prompt, all_prompts, cases_of, chosen
from omni_server.verify.compare import CaseResult, Precision, compare
from omni_server.verify.machine import facts
from omni_server.verify.reference_process import ReferenceFailedError, ReferenceProcess
from omni_server.verify.report import Report

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    model: str
    stage_config: str | None = None
    """None uses what `serve` chooses."""
    use_cpu: bool = False
    revision: str | None = None
    cases: str | None = None
    """Comma-separated prompt names, or a number; None for all."""
    timeout_s: float = 1800.0
    """Per answer, on either side."""


def verify(options: VerifyOptions, on_progress: Progress) -> Report:
    """Asks this server's engines, stops them, and asks the reference.

    Raises `ConfigError` if the engines cannot start or there are no cases.
    """
    folder, config = resolve_deployment(
        options.model,
        options.stage_config,
        use_cpu=options.use_cpu,
        revision=options.revision,
        on_progress=on_progress,
    )
    family = load_family(config.model_family)
    reference = _reference_of(family, config)
    set_engine_environment(config)  # the family's imports read it
    model = open_model(family, folder)
    if model.codec is not None and model.codec.sample_rate_hz != SAMPLE_RATE_HZ:
        raise ConfigError(
            f"the model cannot be verified: its audio has {model.codec.sample_rate_hz} Hz, and only audio of "
            f"{SAMPLE_RATE_HZ} Hz is compared"
        )
    cases = cases_of(
        chosen(_prompts(model, config), options.cases),
        model.voices if "audio" in config.outputs else (),
        in_text="text" in config.outputs,
        clone=model.warm_up_speech.clone,
    )
    precision = _precision(config, model)
    answers = answer_all(
        cases, folder, config, family, model.codec, timeout_s=options.timeout_s, on_progress=on_progress
    )
    device = "cpu" if config.platform == "cpu" else f"cuda:{config.stages[config.entry].devices[0]}"
    on_progress(f"loading the checkpoint with {reference.package} ({precision.language_models}, {device})")
    load = partial(
        ReferenceProcess, reference.factory, folder, device=device, dtype=precision.language_models
    )
    references = _references(
        cases,
        answers,
        load,
        config,
        timeout_s=options.timeout_s,
        on_progress=lambda line: on_progress(f"{reference.package}, {line}"),
    )
    results = tuple(
        compare(case, answer, reference, precision)
        for case, answer, reference in zip(cases, answers, references, strict=True)
    )
    name = folder.resolve().name if Path(options.model).expanduser().is_dir() else options.model
    return Report(
        model=name,
        facts=facts(folder, name, reference.package, on_gpu=config.platform == "cuda"),
        stage_config_name=Path(options.stage_config).name if options.stage_config is not None else None,
        stage_config=config,
        precision=precision,
        reference=reference.package,
        reference_device=device,
        results=results,
        left_out=_left_out(config, model, results),
        folders=(folder,),
    )


def _references(
    cases: Sequence[Case],
    answers: Sequence[Answer | str],
    load: Callable[..., ReferenceProcess],
    config: StageConfig,
    *,
    timeout_s: float,
    on_progress: Progress,
) -> list[ReferenceAnswer | str]:
    try:
        process = load(timeout_s=config.start_timeout_s)
    except ReferenceFailedError as error:
        return [str(error)] * len(cases)
    references: list[ReferenceAnswer | str] = []
    with contextlib.closing(process):
        for number, (case, answer) in enumerate(zip(cases, answers, strict=True), 1):
            on_progress(f"{number} of {len(cases)}: {case.name}")
            if isinstance(answer, str):
                references.append("there is nothing to compare with")
                continue
            job = ReferenceJob(
                messages=case.prompt.messages,
                voice=case.voice,
                noise_seed=NOISE_SEED,
                given_text=case.prompt.text,
                clone=case.clone,
                text_ids=answer.text_ids,
                codes=answer.codes,
                max_text_tokens=case.prompt.max_text_tokens,
                max_codes=case.prompt.max_codes,
                repetition_penalties=repetition_penalties(config),
            )
            try:
                references.append(process.answer(job, timeout_s=timeout_s))
            except ReferenceFailedError as error:
                references.append(str(error))
    return references


def _reference_of(family: ModelFamily, config: StageConfig) -> ReferenceImplementation:
    """Raises `ConfigError` if there is none, or if answers are neither text nor audio."""
    reference = family.reference
    if reference is None:
        raise ConfigError(
            f"model_family '{config.model_family}' cannot be verified: it has no reference implementation"
        )
    if not config.outputs & {"text", "audio"}:
        raise ConfigError("the deployment cannot be verified: it answers neither with text nor with audio")
    if version_of(reference.package) is None:
        raise ConfigError(
            f"model_family '{config.model_family}' is compared with {reference.package}, which is not "
            f"installed: install it with 'pip install {reference.package}'"
        )
    return reference


def _precision(config: StageConfig, model: FamilyModel) -> Precision:
    """Raises `ConfigError` if autoregressive stages have different dtypes, which no reference can do."""
    auto = model.dtype_name()
    stages = {name: stage for name, stage in config.stages.items() if isinstance(stage, ArStage)}
    types = {auto if stage.dtype == "auto" else stage.dtype for stage in stages.values()}
    if len(types) > 1:
        raise ConfigError(
            f"{' and '.join(stages)} compute in {' and '.join(sorted(types))}; the reference has one for "
            "all: set one dtype in the stage config"
        )
    decoders = [stage for stage in config.stages.values() if isinstance(stage, DiffusionStage)]
    decoder = None
    if decoders and all(stage.has_default_options for stage in decoders):
        decoder = decoders[-1].compute_dtype(config.platform)
    return Precision(types.pop() if types else auto, decoder)


def _prompts(model: FamilyModel, config: StageConfig) -> tuple[Prompt, ...]:
    return all_prompts(
        model.task_messages,
        with_chats=config.entry != config.reader,
        with_media=bool(model.input_modalities),
        with_tracks=model.hears_videos,
    )


def _left_out(config: StageConfig, model: FamilyModel, results: Sequence[CaseResult]) -> tuple[str, ...]:
    """What no case compared, each with its reason."""
    lines = ["sampling: all answers are greedy; several requests at once: each was alone"]
    asked = {result.case.prompt.name for result in results}
    unasked = [prompt.name for prompt in _prompts(model, config) if prompt.name not in asked]
    if unasked:
        lines.append(f"prompts that --cases left out or that need speech: {', '.join(unasked)}")
    lines += [
        f"the precision of {name}: here its weights are quantized ({quantization}), in the reference they "
        "are as in the checkpoint, so differences are to be expected"
        for name, stage in config.stages.items()
        if (quantization := stage.engine_args.get("quantization")) is not None
    ]
    return tuple(lines)
