"""A stage that samples one code of a frame and predicts the others: its config and its engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import StageConfig
from omni_server.engine import launcher
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.launcher import EngineBuilder
from omni_server.engine.process_files import TempFolder
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel, ModelFamily
from omni_server.omni import WARM_UP_LENGTH, warm_up_request
from omni_server.orchestrator.codec_edge import check_longest_window
from omni_server.protocol.runtime_config import PredictorSamplingSpec, StageRuntimeConfig
from tests.toy_families.predicting import FAMILY, NUM_PREDICTED
from tests.toy_families.speech_only import NUM_CODEBOOKS, SpeechModel
from tests.unit.config.deployment import deployment_with

LENGTH = {"max_model_len": 64}
STAGES: dict[str, dict[str, Any]] = {"speaker": LENGTH, "vocoder": LENGTH}


def config_of(**speaker: object) -> StageConfig:
    stages = STAGES | {"speaker": LENGTH | speaker}
    document = {"model_family": "tests.toy_families.predicting:FAMILY", "platform": "cpu", "stages": stages}
    return StageConfig.model_validate(document)


def test_the_decoder_gets_all_codes_and_the_stage_samples_one_per_frame() -> None:
    config = config_of()
    assert (config.frames.num_codebooks, config.frames.num_sampled) == (NUM_CODEBOOKS, 1)
    model = cast(FamilyModel, SimpleNamespace(codec=SpeechModel.codec))
    check_longest_window(config, model)
    short = config.model_copy(
        update={
            "stages": {
                **config.stages,
                "vocoder": config.stages["vocoder"].model_copy(update={"max_model_len": 15}),
            }
        }
    )
    with pytest.raises(ConfigError, match="2 blocks, 16 codec tokens; max_model_len of vocoder is 15"):
        check_longest_window(short, model)


def test_a_warm_up_request_samples_one_token_per_frame() -> None:
    wanted = warm_up_request(config_of(), is_greedy=True)
    assert wanted.sampling["speaker"].max_tokens == WARM_UP_LENGTH


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"engine_args": {"speculative_config": {"method": "ngram"}}},
            "stages.speaker.engine_args.speculative_config is not supported: codes would be predicted for "
            "rejected draft tokens",
        ),
        (
            {"engine_args": {"enable_prefix_caching": True}},
            "stages.speaker.engine_args.enable_prefix_caching is not supported: the stage's token ids do "
            "not determine its inputs",
        ),
    ],
)
def test_what_predicted_codes_do_not_survive_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config_of(**fields)
    (problem,) = caught.value.errors()
    assert problem["msg"] == f"Value error, {message}"


def test_settings_of_a_predictor_are_for_a_stage_that_has_one() -> None:
    document = deployment_with("stages.talker.predictor_sampling", {"top_k": 5})
    with pytest.raises(ValidationError) as caught:
        StageConfig.model_validate(document)
    (problem,) = caught.value.errors()
    assert problem["msg"] == (
        "Value error, stages.talker.predictor_sampling must go: the talker of stages.qwen2_5_omni:FAMILY predicts "
        "no codes"
    )
    unset = config_of().model_dump(by_alias=True)  # what `config show` prints
    assert StageConfig.model_validate(unset) == config_of()
    StageConfig.model_validate(deployment_with("stages.talker.predictor_sampling", {"top_k": None}))


async def test_the_engine_takes_embeddings_and_its_predictors_settings_and_reads_no_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[AsyncEngineArgs] = []

    async def build_engine(
        name: str, client_class: type, arguments: AsyncEngineArgs, **_: Any
    ) -> BuiltEngine:
        built.append(arguments)
        engine = SimpleNamespace(renderer=None)
        return BuiltEngine(cast(AsyncLLM, engine), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    config = config_of(predictor_sampling={"temperature": 0, "top_k": 5})
    temp = SimpleNamespace(path=tmp_path, check_room=lambda: None, variables=dict)
    builder = EngineBuilder(
        tmp_path,
        config,
        cast(ModelFamily, FAMILY),
        queues={},
        temp=cast(TempFolder, temp),
        mps=None,
        load_format="dummy",
    )
    with StartProgress(lambda line: None) as progress:
        progress.began("speaker")
        await builder.build("speaker", progress)
    (arguments,) = built
    assert isinstance(arguments.additional_config, StageRuntimeConfig)
    assert arguments.additional_config.num_predicted == NUM_PREDICTED
    assert arguments.additional_config.predictor_sampling == PredictorSamplingSpec(temperature=0, top_k=5)
    assert (arguments.enable_prompt_embeds, arguments.enable_prefix_caching) == (True, False)
