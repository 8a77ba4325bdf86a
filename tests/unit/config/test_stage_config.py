"""What a stage config accepts, and every inconsistency that it refuses, with the words of the refusal."""

from typing import Any

import pytest
from pydantic import ValidationError

from omni_server.config.chunk_plan import BusyChunks, ChunkPlan
from omni_server.config.pipeline import installed_families
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import RESERVED_ENGINE_ARGS, DiffusionStage
from stages.qwen2_5_omni.options import Code2WavChunks
from tests.unit.config.deployment import deployment, deployment_with, deployment_with_all, deployment_without


def refusal(document: dict[str, Any]) -> str:
    """The message of the only problem found in `document`."""
    with pytest.raises(ValidationError) as caught:
        StageConfig.model_validate(document)
    problems = caught.value.errors()
    assert len(problems) == 1, problems
    return problems[0]["msg"].removeprefix("Value error, ")


def test_a_thinker_alone_is_a_deployment() -> None:
    document = deployment_with("edges", [])
    del document["stages"]["talker"], document["stages"]["code2wav"]

    config = StageConfig.model_validate(document)

    assert config.stages_for({"text"}) == ("thinker",)
    assert config.outputs == {"text"}


def test_a_stage_is_found_by_its_role_whatever_its_name() -> None:
    document = deployment_with("edges.0.from", "brain")
    document["stages"]["brain"] = document["stages"].pop("thinker")

    assert StageConfig.model_validate(document).stages_for({"text"}) == ("brain",)


@pytest.mark.parametrize("argument", sorted(RESERVED_ENGINE_ARGS))
def test_an_engine_argument_with_a_field_of_its_own_is_refused(argument: str) -> None:
    assert refusal(deployment_with("stages.talker.engine_args", {"seed": 0, argument: 1})) == (
        f"engine_args may not set {argument}: a field of the stage or the server itself sets it"
    )


def test_devices_are_dealt_out_to_the_replicas() -> None:
    document = deployment_with("stages.thinker.devices", [2, 3, 4, 5])
    document["stages"]["thinker"] |= {"replicas": 2, "tensor_parallel_size": 2}

    thinker = StageConfig.model_validate(document).stages["thinker"]
    assert [thinker.devices_of(replica) for replica in range(2)] == [(2, 3), (4, 5)]


@pytest.mark.parametrize(("missing", "without"), [("thinker", "talker"), ("talker", "code2wav")])
def test_a_stage_without_its_source_is_refused(missing: str, without: str) -> None:
    assert refusal(deployment_without(f"stages.{missing}")) == (
        f"stages.{without} needs a stage that runs the {missing} (model_stage: {missing}): add it, or remove this one"
    )


def test_a_stage_that_leads_to_no_output_is_refused() -> None:
    assert refusal(deployment_without("stages.code2wav")) == (
        "stages.talker leads to no output without a stage that runs the code2wav: add it, or remove this one"
    )


@pytest.mark.parametrize(
    ("stage", "engine", "role"), [("thinker", "ar", "code2wav"), ("code2wav", "diffusion", "thinker")]
)
def test_a_stage_on_the_wrong_engine_is_refused(stage: str, engine: str, role: str) -> None:
    document = deployment_without("edges")
    del document["stages"]["code2wav"]["solver"]
    document["stages"] = {stage: document["stages"][stage] | {"model_stage": role, "engine": engine}}

    with pytest.raises(ValidationError, match=f"engine must be .*, as {role} is|needs a stage that runs"):
        StageConfig.model_validate(document)


def test_what_the_file_leaves_out_comes_from_the_family() -> None:
    document = deployment_without("edges")
    document["model_family"] = "qwen2_5_omni"
    for stage in document["stages"].values():
        del stage["model_stage"], stage["engine"]
    short, whole = StageConfig.model_validate(document), StageConfig.model_validate(deployment())

    assert short.stages == whole.stages
    assert [(e.source, e.target, e.queue.transport) for e in short.edges] == [
        (e.source, e.target, e.queue.transport) for e in whole.edges
    ]
    assert [e.chunks for e in short.edges] == [None, Code2WavChunks()]


def test_options_of_one_family_are_unknown_to_another() -> None:
    document = {
        "model_family": "tests.toy_families.speech_only:FAMILY",
        "platform": "cpu",
        "stages": {
            "speaker": {"max_model_len": 64},
            "vocoder": {"max_model_len": 64, "solver": {"num_steps": 10}},
        },
    }
    assert refusal(document).startswith("unknown key; known are model_stage, replicas, devices")
    del document["stages"]["vocoder"]["solver"]  # type: ignore[index]
    document["edges"] = [{"from": "speaker", "to": "vocoder", "chunks": {"vocoder_margin_frames": 20}}]
    assert refusal(document).startswith("unknown key; known are mode, carry")
    document["edges"] = [{"from": "speaker", "to": "vocoder", "chunks": {"new_blocks": 3}}]
    chunks = StageConfig.model_validate(document).edges[0].chunks
    assert chunks == ChunkPlan(carry=False, past_blocks=0, new_blocks=(3,), future_blocks=0)


def test_a_dump_of_a_config_holds_the_options_of_the_family_and_is_a_config() -> None:
    config = StageConfig.model_validate(deployment_with("edges.1.chunks.vocoder_margin_frames", 28))
    dump = config.model_dump(mode="json", by_alias=True)
    assert dump["stages"]["code2wav"]["solver"]["num_steps"] == 10
    assert dump["edges"][1]["chunks"]["vocoder_margin_frames"] == 28
    assert StageConfig.model_validate(dump) == config


@pytest.mark.parametrize("names", [("from", "to"), ("source", "target")])
@pytest.mark.parametrize("left_out", [{}, {"chunks": None}])
def test_what_an_edge_leaves_out_comes_from_the_family(
    names: tuple[str, str], left_out: dict[str, Any]
) -> None:
    document = deployment()
    for edge in document["edges"]:
        ends = dict(zip(names, (edge["from"], edge["to"]), strict=True))
        edge.clear()
        edge.update(ends | left_out)

    edges = StageConfig.model_validate(document).edges

    assert edges == StageConfig.model_validate(deployment_without("edges")).edges


def test_a_missing_edge_is_refused() -> None:
    assert refusal(deployment_without("edges.0")) == (
        "edges must be: thinker -> talker, talker -> code2wav; found: talker -> code2wav"
    )


def test_windows_for_one_busy_time_need_no_list() -> None:
    busy = {"min_streams": 9, "new_blocks": 4}
    configs = [
        StageConfig.model_validate(deployment_with("edges.1.chunks.busy", value)) for value in (busy, [busy])
    ]
    assert configs[0] == configs[1]
    assert configs[0].edges[1].chunks is not None
    assert configs[0].edges[1].chunks.busy == (BusyChunks(min_streams=9, new_blocks=(4,)),)
    none = StageConfig.model_validate(deployment_with("edges.1.chunks.busy", None)).edges[1].chunks
    assert none is not None
    assert none.busy == ()


def test_frames_are_sent_as_windows_need_them_or_in_blocks_if_windows_are_not_known_before() -> None:
    assert ChunkPlan(new_blocks=(1, 2, 4), future_blocks=2).blocks_per_output(may_pause=False) == (3, 2, 4)
    assert ChunkPlan(new_blocks=(3,), future_blocks=1).blocks_per_output(may_pause=False) == (4, 3)
    busy = (BusyChunks(min_streams=8, new_blocks=(4,)),)
    assert ChunkPlan(new_blocks=(1, 2, 4), busy=busy).blocks_per_output(may_pause=False) == (1,)
    assert ChunkPlan(mode="whole").blocks_per_output(may_pause=False) == (1,)
    assert ChunkPlan(new_blocks=(1, 2, 4)).blocks_per_output(may_pause=True) == (1,)


def test_the_longest_window_is_what_the_plan_can_cut() -> None:
    assert ChunkPlan(past_blocks=3, new_blocks=(1, 6, 4), future_blocks=2).longest_window_blocks == 11
    assert ChunkPlan(mode="whole").longest_window_blocks is None
    busy = (BusyChunks(min_streams=8, new_blocks=(4, 7)), BusyChunks(min_streams=9, new_blocks=(5,)))
    assert ChunkPlan(past_blocks=3, new_blocks=(1, 6), busy=busy, future_blocks=2).longest_window_blocks == 12


def test_with_carry_one_window_of_a_stream_is_out_at_a_time() -> None:
    assert ChunkPlan().max_outstanding_windows == 1
    assert ChunkPlan(carry=False).max_outstanding_windows == 2


def test_a_deployment_carries_state_unless_its_plan_does_without() -> None:
    assert StageConfig.model_validate(deployment()).carries_state
    assert not StageConfig.model_validate(deployment_with("edges.1.chunks.carry", False)).carries_state
    assert not StageConfig.model_validate(deployment_with("edges.1.chunks.mode", "whole")).carries_state


def test_every_window_of_a_step_has_room_for_its_stream() -> None:
    document = deployment_with("stages.code2wav.max_num_seqs", 20)
    stage = StageConfig.model_validate(document).stages["code2wav"]
    assert isinstance(stage, DiffusionStage)
    assert stage.num_stream_slots == 40
    document["stages"]["code2wav"]["max_streams"] = 20
    StageConfig.model_validate(document)
    document["stages"]["code2wav"]["max_streams"] = 19
    assert refusal(document) == (
        "max_streams is 19, less than the windows of one step (max_num_seqs 20), each of which may need a place: raise "
        "it"
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stages.thinker.gpu_memory_utilization", 0),
        ("stages.thinker.gpu_memory_utilization", 1.1),
        ("stages.thinker.max_model_len", 0),
        ("stages.thinker.max_num_seqs", 0),
        ("stages.thinker.max_num_batched_tokens", 0),
        ("stages.thinker.tensor_parallel_size", 0),
        ("stages.thinker.devices", [-1]),
        ("stages.thinker.dtype", "float8"),
        ("stages.code2wav.engine", "autoregressive"),
        ("stages.code2wav.solver.num_steps", 1),
        ("stages.code2wav.solver.guidance_scale", -0.1),
        ("stages.talker.default_sampling.temperature", 2.5),
        ("stages.talker.default_sampling.top_p", 0),
        ("stages.talker.default_sampling.top_k", -1),
        ("stages.talker.default_sampling.min_p", 1.5),
        ("stages.talker.default_sampling.repetition_penalty", 0),
        ("stages.talker.default_sampling.presence_penalty", 3),
        ("stages.talker.default_sampling.frequency_penalty", -3),
        ("stages.talker.default_sampling.max_tokens", 0),
        ("stages.talker.default_sampling.min_tokens", -1),
        ("stages.talker.predictor_sampling.temperature", 2.5),
        ("stages.talker.predictor_sampling.top_k", -1),
        ("stages.talker.predictor_sampling.top_p", 0),
        ("edges.0.queue.capacity", 0),
        ("edges.0.queue.transport", "rdma"),
        ("edges.1.chunks.mode", "overlap"),
        ("edges.1.chunks.past_blocks", -1),
        ("edges.1.chunks.new_blocks", 0),
        ("edges.1.chunks.new_blocks", [0]),
        ("edges.1.chunks.new_blocks", []),
        ("edges.1.chunks.max_start_delay_s", -0.1),
        ("edges.1.chunks.future_blocks", -1),
        ("edges.1.chunks.vocoder_margin_frames", -1),
        ("model_family", "stages/qwen"),
        ("platform", "tpu"),
        ("start_timeout_s", 0),
        ("request_timeout_s", 0),
    ],
)
def test_a_value_out_of_range_is_refused_at_its_field(path: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        StageConfig.model_validate(deployment_with(path, value))

    [problem] = caught.value.errors()
    named = [str(item) for item in problem["loc"] if item not in ("ar", "diffusion")]
    assert ".".join(named) in (path, f"{path}.0", path.removesuffix(".engine"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": {}, "edges": []}, "a pipeline has at least one stage"),
        ({"stages.code2wav.default_sampling": {}}, "unknown key; known are "),
        (
            {"stages.second": deployment()["stages"]["talker"]},
            "stages.talker: another stage runs the talker, too",
        ),
        (
            {"stages.thinker.devices": [0, 1, 2], "stages.thinker.tensor_parallel_size": 2},
            "devices names 3 devices for 2 ranks",
        ),
        (
            {"stages.thinker.devices": [0, 1], "stages.thinker.replicas": 3},
            "devices names 2 devices for 3 replicas: name 3, or 1 that all replicas share",
        ),
        (
            {
                "stages.thinker.devices": [0, 1, 2],
                "stages.thinker.replicas": 3,
                "stages.thinker.tensor_parallel_size": 2,
            },
            "devices names 3 devices for 3 replicas with 2 ranks each: name 6, or 2 that all",
        ),
        (
            {"model_family": "gpt_5"},
            "model_family 'gpt_5': no model family 'gpt_5' is installed; installed are "
            f"{', '.join(installed_families())}",
        ),
        (
            {"edges.0.to": "code2wav"},
            "edges must be: thinker -> talker, talker -> code2wav; found: thinker -> code2wav, talker -> code2wav",
        ),
        ({"edges.0.chunks": {}}, "edges[0]: remove 'chunks', only an edge with codec tokens has it"),
        (
            {"edges.1.queue.transport": "shared_memory"},
            "edges[1].queue.transport must be inline from talker to code2wav: only embeddings travel through shared "
            "memory",
        ),
        (
            {"edges.1.chunks.busy": [{"min_streams": n, "new_blocks": [4]} for n in (8, 8)]},
            "busy must be in ascending order of min_streams, but they are [8, 8]",
        ),
        (
            {"stages.code2wav.max_num_batched_tokens": 2047},
            "max_num_batched_tokens is 2047, less than the longest window (max_model_len 2048), which is computed "
            "whole in one step: raise it",
        ),
        (
            {"stages.code2wav.dtype": "float16", "platform": "cpu"},
            "stages.code2wav.dtype is float16; code2wav computes in float32 on a CPU: set it to float32 or auto",
        ),
        *(
            (
                {f"stages.{stage}.engine_args": {"speculative_config": {"method": "ngram"}}},
                f"stages.{stage}.engine_args.speculative_config is not supported: rows of rejected draft tokens "
                "would reach the next stage",
            )
            for stage in ("thinker", "talker")
        ),
        (
            {"stages.talker.engine_args": {"enable_prefix_caching": True}},
            "stages.talker.engine_args.enable_prefix_caching is not supported: the stage's token ids do not "
            "determine its inputs",
        ),
        (
            {"stages.thinker.gpu_memory_utilization": 0.7},
            "gpu_memory_utilization on device 0 sums to 1.00 (thinker 0.7 + talker 0.2 + code2wav 0.1); at most 0.95 "
            "is possible: lower one or move a stage",
        ),
        (
            {"stages.talker.replicas": 2},
            "gpu_memory_utilization on device 0 sums to 1.00 (thinker 0.5 + talker 0.2 + talker 0.2 + code2wav 0.1); ",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_what_to_do(
    changes: dict[str, object], message: str
) -> None:
    assert refusal(deployment_with_all(changes)).startswith(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages.code2wav.dtype": "float16"},
        {"stages.thinker.engine_args": {"enable_prefix_caching": True}},
        {"stages.thinker.devices": [1, 2], "stages.thinker.tensor_parallel_size": 2},
        {"stages.thinker.gpu_memory_utilization": 0.7, "stages.thinker.devices": [1]},
        {"stages.thinker.gpu_memory_utilization": 0.9, "platform": "cpu"},
        {"stages.talker.replicas": 2, "stages.talker.devices": [0, 1]},
        {"stages.thinker.gpu_memory_utilization": 0.3, "stages.thinker.replicas": 2},
    ],
)
def test_what_fits_together_is_accepted(changes: dict[str, object]) -> None:
    StageConfig.model_validate(deployment_with_all(changes))
