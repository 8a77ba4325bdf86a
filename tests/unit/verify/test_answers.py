"""What `omni-server verify` asks this server, for any family and whatever its stages are called."""

from omni_server.config.stage_config import StageConfig
from omni_server.verify.answers import repetition_penalties
from tests.unit.config.deployment import deployment


def renamed() -> StageConfig:
    document = deployment()
    for old, new in (("thinker", "brain"), ("talker", "mouth")):
        document["stages"][new] = document["stages"].pop(old)
    document["stages"]["mouth"]["default_sampling"] = {"repetition_penalty": 1.1}
    del document["edges"]
    return StageConfig.model_validate(document)


def test_the_stage_that_speaks_is_found_by_what_flows_from_it() -> None:
    edge = renamed().speech_edge
    assert edge is not None
    assert edge.source == "mouth"


def test_the_reference_gets_the_penalties_under_the_names_of_the_family() -> None:
    assert repetition_penalties(renamed()) == {"thinker": 1.0, "talker": 1.1}


def test_a_family_that_only_speaks_has_such_a_stage_too() -> None:
    document = {
        "model_family": "tests.toy_families.speech_only:FAMILY",
        "platform": "cpu",
        "stages": {"speaker": {"max_model_len": 64}, "vocoder": {"max_model_len": 64}},
    }
    config = StageConfig.model_validate(document)
    assert config.speech_edge is not None
    assert config.speech_edge.source == "speaker"
    assert repetition_penalties(config) == {"speaker": 1.0}
