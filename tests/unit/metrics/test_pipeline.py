"""What the stages count, and how Prometheus gets it."""

from prometheus_client.parser import text_string_to_metric_families

from omni_server.metrics.stage_metrics import (
    ArStageMetrics,
    QueueLevel,
    RequestMeter,
    StageLevel,
    pipeline_text,
)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def samples(stages: dict[str, ArStageMetrics]) -> dict[tuple[str, str], float]:
    """By name and stage, without buckets."""
    families = text_string_to_metric_families(pipeline_text("omni", stages, {}, {}, {}).decode())
    return {
        (sample.name, sample.labels["stage"]): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket") and "finished_reason" not in sample.labels
    }


def ended(stage: ArStageMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(pipeline_text("omni", {"thinker": stage}, {}, {}, {}).decode())
    return {
        sample.labels["finished_reason"]: sample.value
        for family in families
        for sample in family.samples
        if "finished_reason" in sample.labels
    }


def test_request_that_gives_each_token_is_timed() -> None:
    clock, stage = Clock(), ArStageMetrics()
    meter = RequestMeter(stage, 30, has_first_token=True, clock=clock)
    clock.now += 0.5
    meter.tokens(0, num_cached=0)  # text without a token
    clock.now += 0.5
    meter.tokens(1, num_cached=10)
    clock.now += 1.0
    meter.tokens(3, num_cached=10)  # three steps, taken together
    clock.now += 1.0
    meter.tokens(1, num_cached=10)
    meter.ended("stop")
    meter.ended("abort")  # its release
    values = samples({"thinker": stage})
    assert values["vllm:prompt_tokens_total", "thinker"] == 30
    assert values["vllm:prompt_tokens_cached_total", "thinker"] == 10
    assert values["vllm:generation_tokens_total", "thinker"] == 5
    assert values["vllm:time_to_first_token_seconds_sum", "thinker"] == 1.0
    assert values["vllm:request_time_per_output_token_seconds_sum", "thinker"] == 2.0 / 4
    assert values["vllm:e2e_request_latency_seconds_sum", "thinker"] == 3.0
    assert ended(stage) == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_a_first_token_that_comes_with_others_has_no_time() -> None:
    clock, stage = Clock(), ArStageMetrics()
    meter = RequestMeter(stage, 30, has_first_token=False, clock=clock)
    clock.now += 1.0
    meter.tokens(12, num_cached=0)
    clock.now += 1.0
    meter.tokens(12, num_cached=0)
    clock.now += 0.5
    meter.tokens(3, num_cached=0)
    meter.ended("length")
    values = samples({"talker": stage})
    assert values["vllm:generation_tokens_total", "talker"] == 27
    assert values["vllm:time_to_first_token_seconds_count", "talker"] == 0
    assert values["vllm:request_time_per_output_token_seconds_sum", "talker"] == 1.5 / 15
    assert values["vllm:e2e_request_latency_seconds_count", "talker"] == 1


def test_aborted_and_failed_requests_are_counted_and_not_timed() -> None:
    stage = ArStageMetrics()
    for reason in ("abort", "abort", "error", "repetition"):
        RequestMeter(stage, 3, has_first_token=True).ended(reason)
    assert ended(stage) == {"stop": 0, "length": 0, "abort": 2, "error": 1, "repetition": 1}
    values = samples({"thinker": stage})
    assert values["vllm:e2e_request_latency_seconds_count", "thinker"] == 0
    assert values["vllm:prompt_tokens_total", "thinker"] == 0  # the prompt was not read


def test_one_token_has_no_time_between_tokens() -> None:
    stage = ArStageMetrics()
    meter = RequestMeter(stage, 3, has_first_token=True)
    meter.tokens(1, num_cached=0)
    meter.ended("stop")
    assert samples({"thinker": stage})["vllm:request_time_per_output_token_seconds_count", "thinker"] == 0


def test_the_warm_up_is_forgotten() -> None:
    stage = ArStageMetrics()
    meter = RequestMeter(stage, 3, has_first_token=True)
    meter.tokens(2, num_cached=1)
    meter.ended("length")
    stage.clear()
    assert set(samples({"thinker": stage}).values()) == {0.0}
    assert set(ended(stage).values()) == {0.0}


def test_replicas_have_labels_of_their_own_and_a_stage_without_has_the_same_as_ever() -> None:
    text = pipeline_text(
        "org/omni",
        {"thinker": ArStageMetrics(), "talker/0": ArStageMetrics(), "talker/1": ArStageMetrics()},
        {"thinker": 3, "talker/1": 2},
        {("thinker", "talker"): QueueLevel(8, 5, 70), ("talker/1", "other"): QueueLevel(8, 4, 60)},
        {
            "thinker": StageLevel(is_up=True, has_failed=False, num_restarts=0),
            "talker/1": StageLevel(False, True, 3, {"rows": 1}),
        },
    ).decode()
    lines = text.splitlines()
    assert 'omni_active_requests{stage="thinker"} 3.0' in lines
    assert 'omni_active_requests{replica="1",stage="talker"} 2.0' in lines
    assert 'omni_stage_failed{replica="1",stage="talker"} 1.0' in lines
    assert 'omni_stage_restarts_total{replica="1",stage="talker"} 3.0' in lines
    assert 'omni_corrupt_data_total{kind="rows",replica="1",stage="talker"} 1.0' in lines
    assert 'omni_shared_memory_slots_in_use{from_stage="thinker",to_stage="talker"} 5.0' in lines
    assert 'omni_shared_memory_slots_in_use{from_stage="talker",replica="1",to_stage="other"} 4.0' in lines
    assert 'vllm:num_requests_running{engine="0",model_name="org/omni",stage="thinker"} 0.0' in lines
    assert 'vllm:num_requests_running{engine="1",model_name="org/omni",stage="talker"} 0.0' in lines


def test_levels_of_stages_and_queues_are_told() -> None:
    thinker, talker = ArStageMetrics(), ArStageMetrics()
    thinker.reported(num_running=2, num_waiting=1, kv_cache_usage=0.5)
    text = pipeline_text(
        "org/omni",
        {"thinker": thinker, "talker": talker},
        {"thinker": 3, "talker": 2, "code2wav": 1},
        {("thinker", "talker"): QueueLevel(capacity=8, in_use=5, published=70)},
        {
            "thinker": StageLevel(is_up=True, has_failed=False, num_restarts=0),
            "talker": StageLevel(
                is_up=False, has_failed=True, num_restarts=3, num_corrupt={"logits": 2, "rows": 0}
            ),
        },
    ).decode()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "gauge"
        or family.name.startswith(("omni_shared_memory", "omni_stage", "omni_corrupt"))
    }
    assert values == {
        ("vllm:num_requests_running", "0", "org/omni", "thinker"): 2,
        ("vllm:num_requests_running", "0", "org/omni", "talker"): 0,
        ("vllm:num_requests_waiting", "0", "org/omni", "thinker"): 1,
        ("vllm:num_requests_waiting", "0", "org/omni", "talker"): 0,
        ("vllm:kv_cache_usage_perc", "0", "org/omni", "thinker"): 0.5,
        ("vllm:kv_cache_usage_perc", "0", "org/omni", "talker"): 0,
        ("omni_active_requests", "thinker"): 3,
        ("omni_active_requests", "talker"): 2,
        ("omni_active_requests", "code2wav"): 1,
        ("omni_stage_up", "thinker"): 1,
        ("omni_stage_up", "talker"): 0,
        ("omni_stage_failed", "thinker"): 0,
        ("omni_stage_failed", "talker"): 1,
        ("omni_stage_restarts_total", "thinker"): 0,
        ("omni_stage_restarts_total", "talker"): 3,
        ("omni_corrupt_data_total", "logits", "talker"): 2,
        ("omni_corrupt_data_total", "rows", "talker"): 0,
        ("omni_shared_memory_slots", "thinker", "talker"): 8,
        ("omni_shared_memory_slots_in_use", "thinker", "talker"): 5,
        ("omni_shared_memory_steps_total", "thinker", "talker"): 70,
    }


def test_buckets_of_vllms_families_are_vllms() -> None:
    from vllm.v1.metrics import buckets as theirs

    from omni_server.metrics import buckets as ours

    assert ours.FIRST_OUTPUT_S == theirs.TIME_TO_FIRST_TOKEN_BUCKETS
    assert ours.PER_TOKEN_S == theirs.INTER_TOKEN_LATENCY_BUCKETS
    assert ours.REQUEST_S == theirs.REQUEST_LATENCY_BUCKETS
