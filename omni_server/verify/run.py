"""The whole comparison, from MODEL and a stage config to a report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_server.check.default_config import default_stage_config, describe, named_stage_config
from omni_server.check.files import refuse_damaged_files
from omni_server.config.load import find_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage, DiffusionStage, SolverConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel, load_family, open_model, servable_architectures
from omni_server.model_folder import resolve_model_folder
from omni_server.verify.answers import NOISE_SEED, TALKER_PENALTY, Answer, NoAnswer, answer_all
from omni_server.verify.cases import Case, all_prompts, cases_of, chosen
from omni_server.verify.compare import CaseResult, Precision, compare
from omni_server.verify.machine import checkpoint, hardware, versions
from omni_server.verify.reference_job import ReferenceAnswer, ReferenceJob
from omni_server.verify.reference_process import ReferenceFailedError, ReferenceProcess, ReferenceSettings
from omni_server.verify.report import Report

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    """What the command line asked for."""

    model: str
    stage_config: str | None = None
    """None: what `serve` would choose."""
    use_cpu: bool = False
    revision: str | None = None
    cases: str | None = None
    """Names of prompts, separated by commas, or how many; None: all."""
    timeout_s: float = 1800.0
    """For each answer, of either side."""


def verify(options: VerifyOptions, on_progress: Progress) -> Report:
    """Start this server's engines, ask, end them, and ask transformers.

    Raises `ConfigError` where the engines cannot start or there is nothing to ask.
    """
    folder = resolve_model_folder(
        options.model,
        architectures=servable_architectures(),
        revision=options.revision,
        on_progress=on_progress,
    )
    config = _stage_config(options, folder)
    on_progress(f"stage config: {describe(config)}")
    set_engine_environment(config)  # before the family imports what reads it
    refuse_damaged_files(folder, config, load_format="auto")
    family = load_family(config.model_family)
    model = open_model(family, folder)
    speaks = config.stage_named("talker") is not None
    cases = cases_of(chosen(all_prompts(model.task_messages), options.cases), model.voices if speaks else ())
    precision = _precision(config, model)
    assert model.codec is not None
    answers = answer_all(
        cases, folder, config, family, model.codec, timeout_s=options.timeout_s, on_progress=on_progress
    )
    settings = ReferenceSettings(
        folder, _reference_device(config), precision.language_models, config.model_family, NOISE_SEED
    )
    references = _references(
        cases,
        answers,
        settings,
        load_timeout_s=config.start_timeout_s,
        timeout_s=options.timeout_s,
        on_progress=on_progress,
    )
    results = tuple(
        compare(case, answer, reference, precision)
        for case, answer, reference in zip(cases, answers, references, strict=True)
    )
    return Report(
        model=folder.resolve().name if Path(options.model).expanduser().is_dir() else options.model,
        checkpoint=checkpoint(folder),
        versions=versions(),
        hardware=hardware(on_gpu=config.platform == "cuda"),
        stage_config_name=Path(options.stage_config).name if options.stage_config is not None else None,
        stage_config=config,
        precision=precision,
        reference_device=settings.device,
        results=results,
        left_out=_left_out(config, model, results),
        folders=(folder,),
    )


def _references(
    cases: Sequence[Case],
    answers: Sequence[Answer | NoAnswer],
    settings: ReferenceSettings,
    *,
    load_timeout_s: float,
    timeout_s: float,
    on_progress: Progress,
) -> list[ReferenceAnswer | NoAnswer]:
    on_progress(f"loading the checkpoint with transformers ({settings.dtype}, {settings.device})")
    references: list[ReferenceAnswer | NoAnswer] = []
    try:
        with ReferenceProcess(settings, timeout_s=load_timeout_s) as process:
            for number, (case, answer) in enumerate(zip(cases, answers, strict=True), 1):
                on_progress(f"transformers, {number} of {len(cases)}: {case.name}")
                references.append(_reference(process, case, answer, timeout_s))
    except ReferenceFailedError as error:  # it could not be loaded
        references += [NoAnswer(str(error))] * (len(cases) - len(references))
    return references


def _reference(
    process: ReferenceProcess, case: Case, answer: Answer | NoAnswer, timeout_s: float
) -> ReferenceAnswer | NoAnswer:
    if isinstance(answer, NoAnswer):
        return NoAnswer("there is nothing to compare with")
    job = ReferenceJob(
        messages=case.prompt.messages,
        voice=case.voice,
        given_text=case.prompt.text,
        text_ids=answer.text_ids,
        codes=answer.codes,
        max_text_tokens=case.prompt.max_text_tokens,
        max_codes=case.prompt.max_codes,
        talker_penalty=TALKER_PENALTY,
    )
    try:
        return process.answer(job, timeout_s=timeout_s)
    except ReferenceFailedError as error:
        return NoAnswer(str(error))


def _stage_config(options: VerifyOptions, folder: Path) -> StageConfig:
    if options.stage_config is None:
        return default_stage_config(folder, options.model, use_cpu=options.use_cpu)
    return named_stage_config(find_stage_config(options.stage_config), use_cpu=options.use_cpu)


def _precision(config: StageConfig, model: FamilyModel) -> Precision:
    """Raises `ConfigError` where thinker and talker compute in different types, which transformers cannot."""
    auto = model.dtype_name()
    stages = [stage for stage in config.stages.values() if isinstance(stage, ArStage)]
    types = {auto if stage.dtype == "auto" else stage.dtype for stage in stages}
    if len(types) > 1:
        raise ConfigError(
            f"thinker and talker compute in {' and '.join(sorted(types))}; transformers has one for both: "
            "set one dtype in the stage config"
        )
    (language_models,) = types
    code2wav = None
    for stage in config.stages.values():
        if isinstance(stage, DiffusionStage) and stage.solver == SolverConfig():
            default = "float16" if config.platform == "cuda" else "float32"
            code2wav = default if stage.dtype == "auto" else stage.dtype
    return Precision(language_models, code2wav)


def _reference_device(config: StageConfig) -> str:
    """The thinker's, whose weights are the most."""
    thinker = config.stage_named("thinker")
    assert thinker is not None
    return "cpu" if config.platform == "cpu" else f"cuda:{config.stages[thinker].devices[0]}"


def _left_out(config: StageConfig, model: FamilyModel, results: Sequence[CaseResult]) -> tuple[str, ...]:
    """What no case compared, each with its reason."""
    lines = [
        "sampling: all answers are greedy; transformers draws other random numbers",
        "several requests at once: each was alone, so that times are those of a single caller",
    ]
    if config.stage_named("talker") is None:
        lines.append("speech: the stage config has no talker")
    elif len(model.voices) == 1:
        lines.append("other voices: the checkpoint has one")
    asked = {result.case.prompt.name for result in results}
    unasked = [prompt.name for prompt in all_prompts(model.task_messages) if prompt.name not in asked]
    if unasked:
        lines.append(f"prompts that --cases left out or that need speech: {', '.join(unasked)}")
    if any(result.case.prompt.text is not None for result in results):
        lines.append("text of 'read aloud': it is given, so only its tokens are compared, not logits")
    thinker = config.stage_named("thinker")
    quantization = None if thinker is None else config.stages[thinker].engine_args.get("quantization")
    if quantization is not None:
        lines.append(
            f"the thinker's precision: here its weights are quantized ({quantization}), in the reference "
            "they are as in the checkpoint, so differences are to be expected"
        )
    return tuple(lines)
